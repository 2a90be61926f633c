"""Routed experts with MXFP8 weights for many tokens: sorted pairs in tiles, two products, a sum.

As in `kernel.py`, but weights are read as bytes with their scales and widened exactly to the dtype
of the tokens: to BF16 that is exact as long as a scale byte is at most 134. On Hopper the products
are those of `mxfp8_gemm_hopper_kernel.py`; `widened_product_kernel` serves everything else. Both
leave rows in the plan's order: the sum finds them, and multiplies them by their weights.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from inference.kernels.expert_gemm.align_kernel import Plan, align
from inference.kernels.expert_gemm.kernel import combine, shared_mlp
from inference.kernels.expert_gemm.mxfp8_config import config_of
from inference.kernels.hardware import USE_PDL, is_hopper, num_multiprocessors
from inference.kernels.linear.mxfp8_kernel import linear, widened
from inference.kernels.mxfp8 import MXFP8Tensor
from inference.kernels.swiglu_oai.kernel import clamped

TILE_ROWS = 32
"""Tokens of a tile where Hopper's kernel does not run."""


@triton.jit(do_not_specialize=["order_start"])
def widened_product_kernel(
    x_ptr,
    values_ptr,
    scale_ptr,
    plan_ptr,
    out_ptr,
    order_start,
    alpha,
    limit,
    beta,
    NUM_ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_GATE_UP: tl.constexpr,
):
    """out[row] = swiglu_oai(w13 x[token]), or out[row] = w2 x[row]."""
    COLUMNS: tl.constexpr = NUM_ROWS // 2 if IS_GATE_UP else NUM_ROWS
    num_n: tl.constexpr = (COLUMNS + BLOCK_N - 1) // BLOCK_N
    num_tiles = tl.load(plan_ptr) * num_n
    o_k = tl.arange(0, BLOCK_K)[None, :]
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        p_tile = plan_ptr + 4 + tile // num_n * 4
        # [BLOCK_M], [BLOCK_N]
        o_m = tl.load(p_tile + 1) + tl.arange(0, BLOCK_M)
        m_m = o_m < tl.load(p_tile + 2)
        o_n = tile % num_n * BLOCK_N + tl.arange(0, BLOCK_N)
        m_n = o_n < COLUMNS
        o_x = o_m
        if IS_GATE_UP:
            o_x = tl.load(plan_ptr + order_start + o_m, mask=m_m, other=0) // TOPK
        p_x = x_ptr + o_x.to(tl.int64)[:, None] * SIZE + o_k
        o_row = (tl.load(p_tile).to(tl.int64) * NUM_ROWS + o_n)[:, None]
        p_w = values_ptr + o_row * SIZE + o_k
        p_scale = scale_ptr + o_row * (SIZE // 32) + o_k // 32
        # [BLOCK_M, BLOCK_N]
        b_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        b_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, SIZE, BLOCK_K):
            m_k = o_k < SIZE - k
            b_x = tl.load(p_x + k, mask=m_m[:, None] & m_k, other=0.0)
            m_w = m_n[:, None] & m_k
            b_w = widened(p_w + k, p_scale + k // 32, m_w, b_x.dtype)
            b_acc = tl.dot(b_x, b_w.T, b_acc, input_precision="ieee")
            if IS_GATE_UP:
                p_up = p_w + COLUMNS * SIZE + k
                b_w = widened(p_up, p_scale + (COLUMNS * SIZE + k) // 32, m_w, b_x.dtype)
                b_up = tl.dot(b_x, b_w.T, b_up, input_precision="ieee")
        if IS_GATE_UP:
            b_gate, b_up = clamped(b_acc, b_up, limit)
            b_acc = b_gate * tl.sigmoid(alpha * b_gate) * (b_up + beta)
        p_out = out_ptr + o_m.to(tl.int64)[:, None] * COLUMNS + o_n[None, :]
        tl.store(p_out, b_acc.to(out_ptr.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


def grouped(
    x_TC: Tensor,
    w13: MXFP8Tensor,
    w2: MXFP8Tensor,
    ids_TA: Tensor,
    weights_TA: Tensor,
    alpha: float,
    limit: float,
    beta: float,
    shared: tuple[Tensor, Tensor] | tuple[MXFP8Tensor, MXFP8Tensor] | None = None,
    num_routed: int | None = None,
    *,
    use_pdl: bool = USE_PDL,
) -> Tensor:
    """As `expert_gemm`, for weights in MXFP8 and more than a few tokens, [T, C].

    Args:
        x_TC: [T, C], T > 0.
        w13: [E, 2I, C], gate rows and then up rows.
        w2: [E, C, I].
        ids_TA: [T, A] int32, -1 for none.
        weights_TA: [T, A] FP32.
        shared: ([2S, C], [C, S]) of the expert that every token has, wide or MXFP8.
        num_routed: experts that `ids_TA` was chosen among, those held elsewhere included.
    """
    act = alpha, limit, beta
    x_TC, ids_TA, weights_TA = (tensor.contiguous() for tensor in (x_TC, ids_TA, weights_TA))
    add_TC = _shared(x_TC, shared, *act)
    if _on_hopper(x_TC, w13, w2):
        y_XC, plan = _products_on_hopper(x_TC, w13, w2, ids_TA, act, num_routed)
    else:
        plan = align(ids_TA, w13.shape[0], TILE_ROWS, use_pdl=use_pdl)
        h_XI = _product(x_TC, w13, plan, ids_TA, act, x_TC.dtype)
        y_XC = _product(h_XI, w2, plan, ids_TA, None, torch.float32)
    return combine(y_XC, ids_TA, add_TC, x_TC.dtype, plan, weights_TA, use_pdl=use_pdl)


def _on_hopper(x_TC: Tensor, w13: MXFP8Tensor, w2: MXFP8Tensor) -> bool:
    if not x_TC.is_cuda or not is_hopper(x_TC.device):
        return False
    from inference.kernels.expert_gemm.mxfp8_gemm_hopper_kernel import fits

    return fits(x_TC, w13, is_swiglu=True) and fits(x_TC, w2, is_swiglu=False)


def _products_on_hopper(
    x_TC: Tensor,
    w13: MXFP8Tensor,
    w2: MXFP8Tensor,
    ids_TA: Tensor,
    act: tuple[float, float, float],
    num_routed: int | None,
) -> tuple[Tensor, Plan]:
    """w2 swiglu_oai(w13 x) of every pair, [T * A, C] FP32 in the plan's order, and the plan."""
    from inference.kernels.expert_gemm import mxfp8_gemm_hopper_kernel as hopper
    from inference.kernels.expert_gemm.mxfp8_operands_kernel import ordered

    num_experts, hidden, width = w2.shape
    num_pairs = ids_TA.numel()
    config = config_of(num_pairs / (num_routed or num_experts))
    plan = align(ids_TA, num_experts, config.tokens, config.tail_rows, use_pdl=True)
    x_XC = ordered(x_TC, plan, ids_TA, use_pdl=True)
    h_XI = x_TC.new_empty(num_pairs, width)
    hopper.product(x_XC, w13, h_XI, config, plan, act, is_ordered=True)
    y_XC = x_TC.new_empty(num_pairs, hidden, dtype=torch.float32)
    return hopper.product(h_XI, w2, y_XC, config, plan), plan


def _product(
    x_XX: Tensor,
    weight: MXFP8Tensor,
    plan: Plan,
    ids_TA: Tensor,
    act: tuple[float, float, float] | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """With `act` the first product, of tokens; without the second, of rows in the plan's order."""
    num_rows, size = weight.shape[-2:]
    columns = num_rows // 2 if act is not None else num_rows
    out_XY = torch.empty(ids_TA.numel(), columns, dtype=out_dtype, device=x_XX.device)
    block_n = 64
    num_programs = 2 * num_multiprocessors(x_XX.device) if x_XX.is_cuda else 4
    alpha, limit, beta = act or (0.0, 0.0, 0.0)
    widened_product_kernel[(min(num_programs, plan.max_tiles * triton.cdiv(columns, block_n)),)](
        x_XX,
        weight.values.contiguous().view(torch.uint8),
        weight.scale.contiguous(),
        plan.data,
        out_XY,
        plan.order_start,
        alpha,
        limit,
        beta,
        NUM_ROWS=num_rows,
        SIZE=size,
        TOPK=ids_TA.shape[1],
        BLOCK_M=plan.tile_rows,
        BLOCK_N=block_n,
        BLOCK_K=64,
        IS_GATE_UP=act is not None,
        num_warps=4,
    )
    return out_XY


def _shared(
    x_TC: Tensor,
    shared: tuple[Tensor, Tensor] | tuple[MXFP8Tensor, MXFP8Tensor] | None,
    alpha: float,
    limit: float,
    beta: float,
) -> Tensor | None:
    if shared is None or isinstance(shared[0], Tensor):
        return shared_mlp(x_TC, shared, alpha, limit, beta)
    up, down = shared
    return linear(linear(x_TC, up, None, (alpha, limit, beta)), down, None, None)
