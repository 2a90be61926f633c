"""What is hashed under one sum."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from inference.kernels.dispatch import expect_dtype
from inference.kernels.tensor_hash import reference

OP = "tensor_hash"
MAX_UNIT_BYTES = 16


class HashPart(NamedTuple):
    """A rectangle of a published tensor; made by `hash_part`."""

    tensor: Tensor
    salt: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    unit: int
    check_finite: bool


def hash_part(
    tensor: Tensor,
    *,
    name: str,
    offsets: tuple[int, ...] | None = None,
    shape: tuple[int, ...] | None = None,
    unit: int = 1,
    check_finite: bool = False,
) -> HashPart:
    """A part of a `HashTable`.

    Args:
        tensor: FP32, BF16, FP8 e4m3 or uint8; need not be contiguous.
        name: published name; the same bits under another name hash to something else.
        offsets: where the rectangle begins in the global tensor; None: at its origin.
        shape: of the global tensor; None: `tensor` is all of it.
        unit: neighbouring elements of the last dimension that are mixed at once, see `unit_of`.
            Hashes of different units do not compare.
        check_finite: also look for NaN and infinity; not for uint8.

    Raises:
        TypeError: another dtype.
        ValueError: the rectangle does not lie inside `shape`, or it or `shape` cuts a unit.
    """
    expect_dtype(OP, name, tensor, *reference.HASHABLE_DTYPES)
    local = tuple(tensor.shape)
    offsets = (0,) * tensor.ndim if offsets is None else tuple(offsets)
    shape = local if shape is None else tuple(shape)
    is_inside = len(offsets) == len(shape) == len(local) and all(
        offset >= 0 and offset + size <= total
        for offset, size, total in zip(offsets, local, shape, strict=True)
    )
    if not is_inside:
        raise ValueError(
            f"{OP}: {name}: a rectangle {local} at {offsets} does not lie inside {shape}"
        )
    if unit not in (1, 2, 4, 8, 16) or unit * tensor.element_size() > MAX_UNIT_BYTES:
        raise ValueError(
            f"{OP}: {name}: unit={unit} of {tensor.dtype}, needs a power of two and at most "
            f"{MAX_UNIT_BYTES} bytes"
        )
    if unit > 1 and (not shape or any(at % unit for at in (offsets[-1], local[-1], shape[-1]))):
        raise ValueError(
            f"{OP}: {name}: a rectangle {local} at {offsets} of {shape} cuts units of {unit}; use "
            "`unit_of` on all edges of the last dimension"
        )
    if check_finite and tensor.dtype == torch.uint8:
        raise ValueError(f"{OP}: {name}: bytes have no NaN to look for")
    return HashPart(tensor, reference.salt(name, unit), offsets, shape, unit, check_finite)


def unit_of(dtype: torch.dtype, edges: Iterable[int]) -> int:
    """The largest unit that no cut of the last dimension divides.

    Args:
        edges: where the last dimension begins, is cut and ends, in all layouts that are compared.
    """
    return math.gcd(MAX_UNIT_BYTES // dtype.itemsize, *edges)
