"""Subtract, and -1 where that is no place."""

from torch import Tensor


def local_ids(ids_RA: Tensor, first: int, count: int) -> Tensor:
    place_RA = ids_RA - first
    return place_RA.where((place_RA >= 0) & (place_RA < count), -1)
