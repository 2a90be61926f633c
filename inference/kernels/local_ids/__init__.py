"""Experts by their place among those that this rank holds."""

import torch
from torch import Tensor

from inference.kernels.dispatch import expect_dtype, use_kernel
from inference.kernels.local_ids import reference

OP = "local_ids"


def local_ids(ids_RA: Tensor, first: int, count: int) -> Tensor:
    """Experts of the model -> places among the `count` from `first` on, -1 for all others.

    Args:
        ids_RA: [R, A] int32, -1: none.

    Returns:
        [R, A] int32.
    """
    on_gpu = use_kernel(OP, ids_RA)
    expect_dtype(OP, "ids_RA", ids_RA, torch.int32)
    if on_gpu:
        from inference.kernels.local_ids import kernel

        return kernel.local_ids(ids_RA, first, count)
    return reference.local_ids(ids_RA, first, count)
