"""Quantise to MXFP8 and back; byte-equal wherever it is done."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from inference.kernels.dispatch import expect_dtype, expect_shape, use_kernel
from inference.kernels.mxfp8 import reference
from inference.kernels.mxfp8.reference import BLOCK_SIZE, MAX_SCALE
from inference.kernels.tables import PartTable, expect_dense_rows
from inference.kernels.tensor_hash import HashPart, HashTable, combine, hash_part

__all__ = [
    "BLOCK_SIZE",
    "MAX_SCALE",
    "SCALE_SUFFIX",
    "MXFP8Tensor",
    "QuantizeTable",
    "dequantize",
    "has_bad_scale",
    "hash_parts",
    "hash_tensor",
    "quantize",
    "quantize_into",
    "tensors_of",
    "widen",
]

SCALE_SUFFIX = "_scale_inv"
"""A published weight's name with this behind it is the name of its scales."""


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


def tensors_of(*weights: Tensor | MXFP8Tensor) -> list[Tensor]:
    """All tensors that the weights are made of."""
    return [
        tensor
        for weight in weights
        for tensor in (weight if isinstance(weight, MXFP8Tensor) else (weight,))
    ]


def quantize(x: Tensor) -> MXFP8Tensor:
    """Quantise along the last dimension in blocks of 32; waits for the device.

    Args:
        x: [..., K] BF16, K a multiple of 32. Only BF16: a master rounded to BF16 first gives the
            same bytes at sender, receiver and offline.

    Returns:
        Values and scales. No value saturates; a block of zeros has scale 0.

    Raises:
        TypeError: `x` is not BF16.
        ValueError: K is no multiple of 32, or a value is NaN or infinite.
    """
    _check_source("mxfp8.quantize", x)
    num_blocks = x.shape[-1] // BLOCK_SIZE
    out = MXFP8Tensor(
        torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device),
        torch.empty((*x.shape[:-1], num_blocks), dtype=torch.uint8, device=x.device),
    )
    quantize_into(x, out)
    if bool((out.scale > MAX_SCALE).any()) and (count := int((~torch.isfinite(x)).sum())):
        raise ValueError(
            f"mxfp8: {count} of {x.numel()} values are NaN or infinite; such weights must not be "
            "served"
        )
    return out


def quantize_into(x: Tensor, out: MXFP8Tensor) -> None:
    """As `quantize`, into memory that is there already (views of a larger weight too).

    Does not wait for the device, so it does not raise for NaN or Inf: a block with one gets a scale
    byte above `MAX_SCALE`, for whoever reads the scales later to find.
    """
    op = "mxfp8.quantize_into"
    _check_source(op, x)
    _check_pair(op, out.values, out.scale)
    expect_shape(op, "out", out.values, tuple(x.shape))
    if use_kernel(op, x, *out):
        from inference.kernels.mxfp8 import kernel

        kernel.quantize(x, out.values, out.scale)
        return
    values, scale = reference.quantize(x)
    out.values.copy_(values)
    out.scale.copy_(scale)


def has_bad_scale(weight: MXFP8Tensor) -> Tensor:
    """Whether a scale is above `MAX_SCALE`, [] bool; does not wait for the device."""
    return (weight.scale > MAX_SCALE).any()


class QuantizeTable(PartTable):
    """`quantize_into` for many rectangles in few launches, with the same bytes."""

    flags: Tensor
    """[pairs] int32 on the device: 1 where a launch since `reset` wrote a scale above
    `MAX_SCALE`."""

    def __init__(self, pairs: Sequence[tuple[Tensor, MXFP8Tensor]]) -> None:
        """
        Args:
            pairs: (x, out) as `quantize_into` takes them, all on one device; the last dimension of
                `x` and of the values has stride 1. The tensors are kept, and must stay where they
                are.

        Raises:
            TypeError: an `x` is not BF16.
            ValueError: shapes do not fit, or the last dimension has another stride.
        """
        op = "QuantizeTable"
        super().__init__(op, [(x, *out) for x, out in pairs])
        for x, out in pairs:
            _check_source(op, x)
            _check_pair(op, out.values, out.scale)
            expect_shape(op, "out", out.values, tuple(x.shape))
            expect_dense_rows(op, "x", x)
            expect_dense_rows(op, "values", out.values)
        self._pairs = tuple(pairs)
        self.flags = torch.zeros(len(pairs), dtype=torch.int32, device=pairs[0][0].device)
        if self._on_cuda:
            from inference.kernels.mxfp8 import table_kernel

            self._tables = table_kernel.tables([(x, *out) for x, out in pairs])

    def reset(self) -> None:
        """Set the flags back to 0."""
        self.flags.zero_()

    def launch(self, first: int, last: int) -> None:
        """Quantise pairs first..last-1; on CUDA enqueued as one kernel (two where some are not
        aligned to 16 bytes). Does not raise for NaN or infinity: see `flags`.

        Raises:
            ValueError: no such pairs.
            RuntimeError: the memory of one has moved.
        """
        self._expect_range(first, last)
        if self._on_cuda:
            from inference.kernels.mxfp8 import table_kernel

            table_kernel.quantize(self._tables, first, last, self.flags)
            return
        for i, (x, out) in enumerate(self._pairs[first:last], first):
            quantize_into(x, out)
            self.flags[i] |= has_bad_scale(out)


def dequantize(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`values · 2^(scale - 127)` in `dtype`, exact but for what under- or overflows; waits.

    Args:
        values: [..., K] float8_e4m3fn.
        scale: [..., K / 32] uint8.

    Raises:
        ValueError: shapes do not fit, or a scale byte is 255 (NaN).
    """
    if bool((scale == reference.NAN_SCALE).any()):
        raise ValueError("mxfp8: a scale byte of 255 means NaN; the tensor is damaged")
    return widen(values, scale, dtype)


def widen(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """As `dequantize`, of scales that are known to hold no 255: does not wait for the device.

    Raises:
        ValueError: shapes do not fit.
    """
    op = "mxfp8.widen"
    _check_pair(op, values, scale)
    if use_kernel(op, values, scale):
        from inference.kernels.mxfp8 import kernel

        return kernel.dequantize(values, scale, dtype)
    return reference.dequantize(values, scale, dtype)


def hash_parts(
    weight: MXFP8Tensor,
    *,
    name: str,
    offsets: tuple[int, ...] | None = None,
    shape: tuple[int, ...] | None = None,
    unit: int = 1,
    unit_scale: int = 1,
) -> tuple[HashPart, HashPart]:
    """Values and scales of a quantised weight as parts of a `HashTable`.

    Args:
        name: published name of the weight; the scales are hashed under theirs.
        offsets: where this rectangle begins in the global weight, a multiple of 32 along K.
        shape: of the global weight; None: this is all of it.
        unit: values of a unit.
        unit_scale: scales of a unit. A cut of the values at 32 k is a cut of the scales at k.
    """
    offsets = (0,) * weight.values.ndim if offsets is None else offsets
    shape = tuple(weight.shape) if shape is None else shape
    of_values = hash_part(weight.values, name=name, offsets=offsets, shape=shape, unit=unit)
    of_scale = hash_part(
        weight.scale,
        name=name + SCALE_SUFFIX,
        offsets=(*offsets[:-1], offsets[-1] // BLOCK_SIZE),
        shape=(*shape[:-1], shape[-1] // BLOCK_SIZE),
        unit=unit_scale,
    )
    return of_values, of_scale


def hash_tensor(
    weight: MXFP8Tensor,
    *,
    name: str,
    offsets: tuple[int, ...] | None = None,
    shape: tuple[int, ...] | None = None,
    unit: int = 1,
    unit_scale: int = 1,
) -> int:
    """The hashes of the values and of the scales of a quantised weight, added up; see
    `hash_parts`. Waits for the device."""
    table = HashTable(
        hash_parts(
            weight, name=name, offsets=offsets, shape=shape, unit=unit, unit_scale=unit_scale
        )
    )
    table.launch(0, 2)
    return combine(table.read())


def _check_source(op: str, x: Tensor) -> None:
    if x.dtype != torch.bfloat16:
        raise TypeError(f"{op}: x is {x.dtype}; quantise from BF16 only")
    if x.shape[-1] % BLOCK_SIZE:
        raise ValueError(f"{op}: K={x.shape[-1]} is no multiple of {BLOCK_SIZE}")


def _check_pair(op: str, values: Tensor, scale: Tensor) -> None:
    expect_dtype(op, "values", values, torch.float8_e4m3fn)
    expect_dtype(op, "scale", scale, torch.uint8)
    if values.shape[-1] % BLOCK_SIZE:
        raise ValueError(f"{op}: K={values.shape[-1]} is no multiple of {BLOCK_SIZE}")
    expect_shape(op, "scale", scale, (*values.shape[:-1], values.shape[-1] // BLOCK_SIZE))
