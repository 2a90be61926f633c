"""RMSNorm in one pass: a program holds a whole row, adds the residual, norms and writes both."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from inference.kernels.hardware import USE_PDL

MANY_ROWS = 256
"""More rows than that fill the GPU: launches need not overlap, and loads under way count."""


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    stream_ptr,
    stride_x,
    stride_residual,
    num_columns,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    # [BLOCK]
    o_c = tl.arange(0, BLOCK)
    m_c = o_c < num_columns
    b_gain = 1.0 + tl.load(weight_ptr + o_c, mask=m_c, other=0.0).to(tl.float32)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b_x = tl.load(x_ptr + i_row * stride_x + o_c, mask=m_c, other=0.0)
    if HAS_RESIDUAL:
        b_residual = tl.load(residual_ptr + i_row * stride_residual + o_c, mask=m_c, other=0.0)
        b_sum = b_x.to(tl.float32) + b_residual.to(tl.float32)
        b_x = b_sum.to(x_ptr.dtype.element_ty)
        tl.store(stream_ptr + i_row * num_columns + o_c, b_x, mask=m_c)
    b_x = b_x.to(tl.float32)
    b_rstd = tl.rsqrt(tl.sum(b_x * b_x, 0) / num_columns + eps)
    b_out = b_x * b_rstd * b_gain
    tl.store(out_ptr + i_row * num_columns + o_c, b_out.to(out_ptr.dtype.element_ty), mask=m_c)


def rms_norm(
    x_TC: Tensor,
    weight_C: Tensor,
    eps: float,
    residual_TC: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    num_columns = x_TC.shape[-1]
    x = x_TC.reshape(-1, num_columns)
    out = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
    stream = residual = None
    if residual_TC is not None:
        residual = residual_TC.reshape(-1, num_columns)
        stream = torch.empty_like(out)
    if x.numel():
        block = triton.next_power_of_2(num_columns)
        is_many = x.shape[0] > MANY_ROWS
        use_pdl = USE_PDL and not is_many
        _rms_norm_kernel[(x.shape[0],)](
            _with_dense_rows(x),
            residual if residual is None else _with_dense_rows(residual),
            weight_C.contiguous(),
            out,
            stream,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            num_columns,
            eps,
            HAS_RESIDUAL=residual is not None,
            BLOCK=block,
            USE_PDL=use_pdl,
            num_warps=min(16 if is_many else 4, max(1, block // 512)),
            launch_pdl=use_pdl,
        )
    return out if stream is None else (out, stream)


def _with_dense_rows(x_TC: Tensor) -> Tensor:
    if x_TC.stride(1) != 1:
        raise ValueError(f"rms_norm: columns have stride {x_TC.stride(1)}, need 1")
    return x_TC
