"""SwiGLU with clamps, a tile of a row per program."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from inference.kernels.hardware import USE_PDL


@triton.jit
def clamped(b_gate, b_up, limit):
    """min(gate, limit) and clamp(up, ±limit) in FP32; NaN stays NaN, as in torch."""
    nan: tl.constexpr = tl.PropagateNan.ALL
    b_gate = tl.minimum(b_gate.to(tl.float32), limit, propagate_nan=nan)
    b_up = tl.maximum(b_up.to(tl.float32), -limit, propagate_nan=nan)
    return b_gate, tl.minimum(b_up, limit, propagate_nan=nan)


@triton.jit
def _swiglu_oai_kernel(
    gate_up_ptr,
    out_ptr,
    stride_row,
    width,
    alpha,
    limit,
    beta,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    # [BLOCK]
    o_i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_i = o_i < width
    p_gate = gate_up_ptr + i_row * stride_row + o_i
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    b_gate = tl.load(p_gate, mask=m_i, other=0.0)
    b_up = tl.load(p_gate + width, mask=m_i, other=0.0)
    b_gate, b_up = clamped(b_gate, b_up, limit)
    b_out = b_gate * tl.sigmoid(alpha * b_gate) * (b_up + beta)
    tl.store(out_ptr + i_row * width + o_i, b_out.to(out_ptr.dtype.element_ty), mask=m_i)


def swiglu_oai(
    gate_up_TX: Tensor,
    alpha: float,
    limit: float,
    beta: float,
) -> Tensor:
    width = gate_up_TX.shape[-1] // 2
    gate_up = gate_up_TX.reshape(-1, 2 * width)
    if gate_up.stride(1) != 1:
        raise ValueError(f"swiglu_oai: columns have stride {gate_up.stride(1)}, need 1")
    out = torch.empty(
        (*gate_up_TX.shape[:-1], width), dtype=gate_up_TX.dtype, device=gate_up_TX.device
    )
    num_rows = gate_up.shape[0]
    if out.numel():
        block = min(1024, triton.next_power_of_2(width))
        _swiglu_oai_kernel[(num_rows, triton.cdiv(width, block))](
            gate_up,
            out,
            gate_up.stride(0),
            width,
            alpha,
            limit,
            beta,
            BLOCK=block,
            USE_PDL=USE_PDL,
            num_warps=4,
            launch_pdl=USE_PDL,
        )
    return out
