"""Quantise to MXFP8 and back; byte-equal wherever it is done."""

from typing import NamedTuple

import torch
from torch import Tensor

from inference.kernels.dispatch import expect_dtype, expect_shape, require_reference
from inference.kernels.mxfp8 import reference
from inference.kernels.mxfp8.reference import BLOCK_SIZE

__all__ = ["BLOCK_SIZE", "MXFP8Tensor", "dequantize", "quantize"]


class MXFP8Tensor(NamedTuple):
    """A weight as it lies in memory: a value is worth `values · 2^(scale - 127)`."""

    values: Tensor
    """[..., N, K] float8_e4m3fn."""
    scale: Tensor
    """[..., N, K / 32] uint8."""

    @property
    def shape(self) -> torch.Size:
        """Of the weight, [..., N, K]."""
        return self.values.shape


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise along the last dimension in blocks of 32.

    Args:
        x: [..., K] BF16, K a multiple of 32. Only BF16: a master rounded to BF16 first gives the
            same bytes at sender, receiver and offline.

    Returns:
        (values [..., K] float8_e4m3fn, scale [..., K / 32] uint8); a value is worth
        `value · 2^(scale - 127)`. No value saturates; a block of zeros has scale 0.

    Raises:
        TypeError: `x` is not BF16.
        ValueError: K is no multiple of 32, or a value is NaN or infinite.
    """
    require_reference("mxfp8.quantize", x)
    if x.dtype != torch.bfloat16:
        raise TypeError(f"mxfp8.quantize: x is {x.dtype}; quantise from BF16 only")
    if x.shape[-1] % BLOCK_SIZE:
        raise ValueError(f"mxfp8.quantize: K={x.shape[-1]} is no multiple of {BLOCK_SIZE}")
    return reference.quantize(x)


def dequantize(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`values · 2^(scale - 127)` in `dtype`.

    Args:
        values: [..., K] float8_e4m3fn.
        scale: [..., K / 32] uint8.

    Raises:
        ValueError: shapes do not fit, or a scale byte is 255 (NaN).
    """
    require_reference("mxfp8.dequantize", values, scale)
    expect_dtype("mxfp8.dequantize", "values", values, torch.float8_e4m3fn)
    expect_dtype("mxfp8.dequantize", "scale", scale, torch.uint8)
    if values.shape[-1] % BLOCK_SIZE:
        raise ValueError(f"mxfp8.dequantize: K={values.shape[-1]} is no multiple of {BLOCK_SIZE}")
    num_blocks = values.shape[-1] // BLOCK_SIZE
    expect_shape("mxfp8.dequantize", "scale", scale, (*values.shape[:-1], num_blocks))
    return reference.dequantize(values, scale, dtype)
