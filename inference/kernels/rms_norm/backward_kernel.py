"""Gradients of RMSNorm in one pass: few programs take many rows each.

The rows under way lie in shared memory, so that a program reads the next ones while it sums one.
Of the weight's gradient a program holds its rows' part; the parts are added in their order.
"""

# ruff: noqa: RUF005 - Triton knows no starred tuples

import torch
import triton
import triton.language as tl
from torch import Tensor

from inference.kernels.hardware import num_multiprocessors
from inference.kernels.rms_norm.pieces_kernel import (
    load_gains,
    load_pieces,
    norm_gradient,
    store_part,
    store_pieces,
    zeros_like,
)


@triton.jit
def _rms_norm_backward_kernel(
    x_ptr,
    weight_ptr,
    grad_out_ptr,
    grad_stream_ptr,
    grad_x_ptr,
    parts_ptr,
    stride_x,
    num_rows,
    eps,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_STREAM: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
    STAGES: tl.constexpr,
):
    offsets, ends = (), ()
    for first in tl.static_range(0, C, BLOCK):
        offsets, ends = offsets + (first + tl.arange(0, BLOCK)[None, :],), ends + (C,)
    gains, parts = load_gains(weight_ptr, offsets, ends), zeros_like(offsets, 1)
    i_program, num_programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    for row in tl.range(tl.program_id(0), num_rows, num_programs, num_stages=STAGES):
        i_row = tl.cast(row, tl.int64)
        x = load_pieces(x_ptr + i_row * stride_x, offsets, ends, True)
        grads = load_pieces(grad_out_ptr + i_row * C, offsets, ends, True)
        grads_x, parts = norm_gradient(x, grads, gains, parts, C, eps, NEEDS_WEIGHT)
        if HAS_STREAM:
            past, sums = load_pieces(grad_stream_ptr + i_row * C, offsets, ends, True), ()
            for i in tl.static_range(len(past)):
                sums = sums + (grads_x[i] + past[i],)
            grads_x = sums
        store_pieces(grad_x_ptr + i_row * C, grads_x, offsets, ends, True)
    if NEEDS_WEIGHT:
        store_part(parts_ptr + i_program * C, parts, offsets, ends)


PIECES = 3
"""At most, of a row: M3's 6,144 columns are three times a power of two."""
PROGRAMS = 2
"""Of a multiprocessor."""
COLUMNS = 256
"""Of a piece, for one warp."""
REGISTERS = 128
"""Of a thread, so that two programs of eight warps fit on a multiprocessor."""
STAGES = 3


def rms_norm_backward(
    x_TC: Tensor,
    weight_C: Tensor,
    eps: float,
    grad_out_TC: Tensor,
    grad_stream_TC: Tensor | None,
    needs_weight: bool,
) -> tuple[Tensor, Tensor | None]:
    """(gradient of what was normed, of the weight if needed).

    Args:
        x_TC: what was normed, its columns dense.
        grad_stream_TC: a gradient that reaches `x_TC` past the norm, added before the rounding.
    """
    num_columns = weight_C.shape[0]
    x = x_TC.reshape(-1, num_columns)
    num_rows = x.shape[0]
    programs = min(num_rows, PROGRAMS * num_multiprocessors(x.device) if x.is_cuda else 4)
    grad_x = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
    parts = None
    if needs_weight:
        parts = torch.empty((programs, num_columns), dtype=torch.float32, device=x.device)
    if grad_x.numel():
        block = triton.next_power_of_2(triton.cdiv(num_columns, PIECES))
        _rms_norm_backward_kernel[(programs,)](
            x,
            weight_C.contiguous(),
            grad_out_TC.contiguous(),
            None if grad_stream_TC is None else grad_stream_TC.contiguous(),
            grad_x,
            parts,
            x.stride(0),
            num_rows,
            eps,
            C=num_columns,
            BLOCK=block,
            HAS_STREAM=grad_stream_TC is not None,
            NEEDS_WEIGHT=needs_weight,
            STAGES=STAGES,
            num_warps=min(16, max(1, block // COLUMNS)),
            maxnreg=REGISTERS,
        )
    return grad_x, None if parts is None else parts.sum(0).to(weight_C.dtype)
