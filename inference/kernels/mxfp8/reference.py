"""MXFP8 (OCP microscaling): e4m3 elements, one power-of-two scale for 32 of them along K.

The scale is the smallest power of two that keeps the block within ±448 (rounded up, "RCEIL"),
found in integers from the bits of the largest BF16 magnitude: 448 = 1.75 · 2^8, so
ceil(log2(a / 448)) is a's exponent - 8, plus one when a's mantissa exceeds 1.75.
"""

import torch
from torch import Tensor

BLOCK_SIZE = 32
MAX_SCALE = 134
"""Largest scale byte that the products take (weights up to 448 · 2^7): the kernels widen a value by
2^(scale - 7), which must be a BF16 number. A block that held NaN or Inf gets a byte above it."""
NAN_SCALE = 255


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """(values, scale); a block with NaN or Inf gets a scale of at least 247."""
    magnitude_bits = x.unflatten(-1, (-1, BLOCK_SIZE)).view(torch.int16) & 0x7FFF
    amax_bits = magnitude_bits.amax(-1).int()  # non-negative floats order like their bits
    exponent, mantissa = amax_bits >> 7, amax_bits & 0x7F
    scale = (exponent - 8 + (mantissa > 0x60).int()).clamp(min=0).to(torch.uint8)
    blocks = x.unflatten(-1, (-1, BLOCK_SIZE)).float()
    values = blocks * _power_of_two(127 - scale.int())[..., None]
    return values.flatten(-2).to(torch.float8_e4m3fn), scale


def dequantize(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    blocks = values.float().unflatten(-1, (-1, BLOCK_SIZE))
    return (blocks * _power_of_two(scale.int() - 127)[..., None]).flatten(-2).to(dtype)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in FP32 for -127 <= exponent <= 127, exactly, by its bits."""
    subnormal = 1 << 22  # 2^-127
    return torch.where(exponent == -127, subnormal, (exponent + 127) << 23).view(torch.float32)
