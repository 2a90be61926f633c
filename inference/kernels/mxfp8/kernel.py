"""MXFP8 in one pass over memory.

GPUs from compute capability 8.9 on convert FP32 to e4m3; elsewhere, Triton's interpreter too, the
same bytes are built in integers.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from inference.kernels.mxfp8.reference import BLOCK_SIZE

TILE = 128
"""Blocks of 32 that a program does."""


@triton.jit
def _block_offsets(num_blocks, blocks_per_row, TILE: tl.constexpr):
    """(row, block inside the row, which of them exist) of this program's blocks."""
    # [TILE]
    o_b = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    return o_b // blocks_per_row, o_b % blocks_per_row, o_b < num_blocks


@triton.jit
def quantized(b_bits, CONVERTS: tl.constexpr):
    """(codes [TILE, 32] uint8, scales [TILE] uint8) of the bits of BF16 numbers [TILE, 32]."""
    b_bits = b_bits.to(tl.int32)
    # [TILE]
    b_amax = tl.max(b_bits & 0x7FFF, 1)
    b_scale = (b_amax >> 7) - 8 + ((b_amax & 0x7F) > 0x60).to(tl.int32)
    b_scale = tl.maximum(b_scale, 0)
    b_factor = ((254 - b_scale) << 23).to(tl.float32, bitcast=True)
    # [TILE, BLOCK_SIZE]
    b_y = (b_bits << 16).to(tl.float32, bitcast=True) * b_factor[:, None]
    if CONVERTS:
        b_code = b_y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        # 2^-120 takes e4m3's bias of 7 to FP32's of 127 and its subnormals to FP32's: exponent and
        # mantissa are e4m3's but for 20 bits behind, which are rounded off, ties to even.
        b_z = (b_y * 7.52316384526264e-37).to(tl.int32, bitcast=True)
        b_z += 0x7FFFF + ((b_z >> 20) & 1)
        b_code = ((b_z >> 20) & 0x7F) | ((b_z >> 24) & 0x80)
    return b_code.to(tl.uint8), b_scale.to(tl.uint8)


@triton.jit
def _quantize_kernel(
    x_ptr,
    values_ptr,
    scale_ptr,
    num_blocks,
    blocks_per_row,
    stride_x,
    stride_values,
    stride_scale,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    CONVERTS: tl.constexpr,
):
    i_row, i_block, m_b = _block_offsets(num_blocks, blocks_per_row, TILE)
    # [TILE, BLOCK_SIZE]
    o_k = i_block[:, None] * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, :]
    b_bits = tl.load(x_ptr + i_row[:, None] * stride_x + o_k, mask=m_b[:, None], other=0)
    b_code, b_scale = quantized(b_bits, CONVERTS)
    tl.store(scale_ptr + i_row * stride_scale + i_block, b_scale, mask=m_b)
    p_values = values_ptr + i_row[:, None] * stride_values + o_k
    tl.store(p_values, b_code, mask=m_b[:, None])


@triton.jit
def _dequantize_kernel(
    values_ptr,
    scale_ptr,
    out_ptr,
    num_blocks,
    blocks_per_row,
    stride_values,
    stride_scale,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    i_row, i_block, m_b = _block_offsets(num_blocks, blocks_per_row, TILE)
    # [TILE]
    b_scale = tl.load(scale_ptr + i_row * stride_scale + i_block, mask=m_b, other=0).to(tl.int32)
    b_factor = tl.where(b_scale == 0, 1 << 22, b_scale << 23).to(tl.float32, bitcast=True)
    # [TILE, BLOCK_SIZE]
    o_k = i_block[:, None] * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, :]
    p_values = values_ptr + i_row[:, None] * stride_values + o_k
    b_code = tl.load(p_values, mask=m_b[:, None], other=0).to(tl.int32)
    b_magnitude = b_code & 0x7F
    b_normal = ((b_magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    b_value = tl.where(b_magnitude < 8, b_magnitude.to(tl.float32) * 0.001953125, b_normal)
    b_value = tl.where(b_magnitude == 0x7F, float("nan"), b_value)
    b_out = tl.where(b_code >= 0x80, -b_value, b_value) * b_factor[:, None]
    p_out = out_ptr + i_row[:, None] * (blocks_per_row * BLOCK_SIZE) + o_k
    tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=m_b[:, None])


@functools.cache
def converts(device: torch.device) -> bool:
    """Whether `device` has an instruction that rounds to e4m3."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def quantize(x: Tensor, values: Tensor, scale: Tensor) -> None:
    """Write x [..., K] as MXFP8 into matrices in memory, whatever their rows' strides."""
    rows = _dense_rows(x).view(torch.int16)
    codes, scale_rows = _rows_of("values", values).view(torch.uint8), _rows_of("scale", scale)
    num_blocks = scale.numel()
    if num_blocks:
        _quantize_kernel[(triton.cdiv(num_blocks, TILE),)](
            rows,
            codes,
            scale_rows,
            num_blocks,
            scale.shape[-1],
            rows.stride(0),
            codes.stride(0),
            scale_rows.stride(0),
            BLOCK_SIZE=BLOCK_SIZE,
            TILE=TILE,
            CONVERTS=converts(x.device),
        )


def dequantize(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    codes, scale_rows = _dense_rows(values).view(torch.uint8), _dense_rows(scale)
    num_blocks = scale.numel()
    if num_blocks:
        _dequantize_kernel[(triton.cdiv(num_blocks, TILE),)](
            codes,
            scale_rows,
            out,
            num_blocks,
            scale.shape[-1],
            codes.stride(0),
            scale_rows.stride(0),
            BLOCK_SIZE=BLOCK_SIZE,
            TILE=TILE,
        )
    return out


def _dense_rows(tensor: Tensor) -> Tensor:
    """`tensor` as [rows, columns]; a copy where its memory is no matrix."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _rows_of(name: str, out: Tensor) -> Tensor:
    """The memory of `out` as [rows, columns]."""
    if out.stride(-1) != 1 and out.shape[-1] > 1:
        raise ValueError(f"mxfp8: columns of {name} have stride {out.stride(-1)}, need 1")
    try:
        return out.view(-1, out.shape[-1])
    except RuntimeError as error:
        raise ValueError(f"mxfp8: {name} is no matrix in memory: {error}") from None
