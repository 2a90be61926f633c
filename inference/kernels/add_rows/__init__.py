"""Partial sums that other ranks computed, added to the tokens they belong to."""

import torch
from torch import Tensor

from inference.kernels.add_rows import reference
from inference.kernels.dispatch import expect_dtype, expect_shape, use_kernel

OP = "add_rows"


def add_rows(y_SC: Tensor, rows_RC: Tensor, own_XC: Tensor, index_SW: Tensor) -> None:
    """y[s] += Σ_w row(index[s, w]): FP32 inside, w ascending and then y itself, one rounding.

    Args:
        y_SC: [S, C], changed in place; its columns are contiguous.
        rows_RC: [R, C] of the same dtype, contiguous.
        own_XC: [X, C], likewise; row R + x of the sum is its row x.
        index_SW: [S, W] int32, below R + X (nobody checks); -1 adds nothing.
    """
    on_gpu = use_kernel(OP, y_SC, rows_RC, own_XC, index_SW)
    (num_tokens, width), num_ranks = y_SC.shape, index_SW.shape[-1]
    expect_shape(OP, "rows_RC", rows_RC, (len(rows_RC), width))
    expect_shape(OP, "own_XC", own_XC, (len(own_XC), width))
    expect_shape(OP, "index_SW", index_SW, (num_tokens, num_ranks))
    expect_dtype(OP, "index_SW", index_SW, torch.int32)
    for name, tensor in (("rows_RC", rows_RC), ("own_XC", own_XC)):
        expect_dtype(OP, name, tensor, y_SC.dtype)
    if on_gpu:
        from inference.kernels.add_rows import kernel

        kernel.add_rows(y_SC, rows_RC, own_XC, index_SW)
    else:
        reference.add_rows(y_SC, rows_RC, own_XC, index_SW)
