"""The two grouped products for few tokens on Hopper, with MXFP8 weights that are read once.

A program walks over tiles: some rows of an expert's weight and up to TOKENS of its tokens. A
single token's tiles are its pairs, more tokens have a plan; the shared expert's come first.

Programmatic dependent launch: `down` reads the plan (or ids) and fills its ring before it waits.
That is safe because `gate_up` lets it start only after its own wait.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference.kernels.expert_gemm.align_kernel import Plan
from inference.kernels.expert_gemm.mxfp8_ring_hopper_kernel import (
    DEPTH,
    WORDS,
    fill,
    make_ring,
    product,
    scales_at,
    token_layout,
)
from inference.kernels.hardware import num_multiprocessors
from inference.kernels.mxfp8 import MXFP8Tensor


class Config(NamedTuple):
    """How both products are cut."""

    rows: int
    """Of a weight, a tile: 32 a warp."""
    tokens: int
    """8 or more."""
    stages: int
    """Tiles of the ring."""
    programs: int
    """A multiprocessor."""


@gluon.jit
def _num_tiles(plan_ptr, TOPK: gl.constexpr, IS_SINGLE: gl.constexpr):
    """Of the routed experts."""
    if IS_SINGLE:
        count = 0
        for a in gl.static_range(TOPK):
            count += (gl.load(plan_ptr + a, cache_modifier=".cg") >= 0).to(gl.int32)
    else:
        count = gl.load(plan_ptr, cache_modifier=".cg")
    return count


@gluon.jit
def _find(
    plan_ptr, i_m, num_shared, num_tokens,
    TOPK: gl.constexpr, TOKENS: gl.constexpr, IS_SINGLE: gl.constexpr,
):  # fmt: skip
    """(expert, first, end) of a tile, whose rows are first..end as `_pairs` takes them.

    The first `num_shared` tiles are the shared expert's, and their expert is -1.
    """
    expert, first = -1, i_m * TOKENS
    end = gl.minimum(first + TOKENS, num_tokens)
    i_m -= num_shared
    if IS_SINGLE:
        # The tile is the i_m-th pair that has an expert.
        place = 0
        for a in gl.static_range(TOPK):
            own = gl.load(plan_ptr + a, cache_modifier=".cg")
            is_here = (own >= 0) & (place == i_m)
            expert = gl.where(is_here, own, expert)
            first = gl.where(is_here, a, first)
            end = gl.where(is_here, a + 1, end)
            place += (own >= 0).to(gl.int32)
    elif i_m >= 0:
        expert = gl.load(plan_ptr + 4 + 4 * i_m, cache_modifier=".cg")
        first = gl.load(plan_ptr + 5 + 4 * i_m, cache_modifier=".cg")
        end = gl.load(plan_ptr + 6 + 4 * i_m, cache_modifier=".cg")
    return expert, first, end


@gluon.jit
def _pairs(plan_ptr, order_start, num_pairs, expert, first, end, o_n, IS_SINGLE: gl.constexpr):
    """[TOKENS] rows of h and y: pairs, or behind them tokens of the shared expert; and a mask."""
    b_row = first + o_n
    m_row = b_row < end
    b_pair = b_row + gl.where(expert < 0, num_pairs, 0)
    if not IS_SINGLE:
        m_own = m_row & (expert >= 0)
        b_own = gl.load(plan_ptr + order_start + b_row, mask=m_own, other=0, cache_modifier=".cg")
        b_pair = gl.where(m_own, b_own, b_pair)
    return b_pair, m_row


@gluon.jit(do_not_specialize=["order_start", "num_tokens"])
def gate_up_kernel(
    x_ptr, w_desc, scale_ptr, shared_desc, shared_scale_ptr, plan_ptr, h_ptr, order_start,
    num_tokens, alpha, limit, beta, HIDDEN: gl.constexpr, WIDTH: gl.constexpr,
    TOPK: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, HAS_SHARED: gl.constexpr,
    IS_SINGLE: gl.constexpr,
):  # fmt: skip
    """h[pair] = swiglu_oai(w13[expert] x[token]): half of a tile's rows gates, half their ups."""
    SHARE: gl.constexpr = w_desc.block_type.shape[1]
    NUM_N: gl.constexpr = (WIDTH + SHARE - 1) // SHARE
    STEPS: gl.constexpr = HIDDEN // DEPTH
    OUT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SHARE // 16, 1], [16, 8])
    TOKEN: gl.constexpr = token_layout(TOKENS, 2 * SHARE)
    weights, scales = (w_desc, shared_desc), (scale_ptr, shared_scale_ptr)
    ring = make_ring(w_desc, STAGES)
    pid = gl.program_id(0)
    step_n = gl.num_programs(0)
    num_shared = (num_tokens + TOKENS - 1) // TOKENS if HAS_SHARED else 0
    if HAS_SHARED:
        is_shared = pid < num_shared * NUM_N
        fill(weights, ring, -1, pid % NUM_N * SHARE, is_shared, True)
    # In this order: kernels behind read the ids before they wait.
    gdc_wait()
    gdc_launch_dependents()
    num_tiles = (num_shared + _num_tiles(plan_ptr, TOPK, IS_SINGLE)) * NUM_N
    expert, first, end = _find(
        plan_ptr, pid // NUM_N, num_shared, num_tokens, TOPK, TOKENS, IS_SINGLE
    )
    fill(weights, ring, expert, pid % NUM_N * SHARE, (pid < num_tiles) & (expert >= 0), False)
    i_use = 0
    for tile in range(pid, num_tiles, step_n):
        row = tile % NUM_N * SHARE
        # [TOKENS]
        o_n = gl.arange(0, TOKENS, gl.SliceLayout(1, TOKEN))
        b_pair, m_n = _pairs(
            plan_ptr, order_start, num_tokens * TOPK, expert, first, end, o_n, IS_SINGLE
        )
        b_token = gl.where(expert < 0, b_pair - num_tokens * TOPK, b_pair // TOPK)
        p_x = x_ptr + b_token.to(gl.int64) * (HIDDEN // 2)
        p_x = p_x[:, None] + gl.arange(0, DEPTH // 2, gl.SliceLayout(0, TOKEN))[None, :]
        p_scale = scales_at(scales, expert, row, WIDTH, STEPS, ring[0])
        ahead = gl.minimum(tile + step_n, num_tiles - 1)
        next_expert, next_first, next_end = _find(
            plan_ptr, ahead // NUM_N, num_shared, num_tokens, TOPK, TOKENS, IS_SINGLE
        )
        b_acc, i_use = product(
            weights, ring, i_use, expert, row, next_expert, ahead % NUM_N * SHARE,
            tile + step_n < num_tiles, p_x, m_n[:, None], p_scale, STEPS, HAS_SHARED,
        )  # fmt: skip
        # [SHARE, TOKENS] each
        b_gate, b_up = b_acc.reshape([2, SHARE, TOKENS]).permute((1, 2, 0)).split()
        b_gate = gl.minimum(gl.convert_layout(b_gate, OUT, assert_trivial=True), limit)
        b_up = gl.convert_layout(b_up, OUT, assert_trivial=True)
        b_up = gl.minimum(gl.maximum(b_up, -limit), limit)
        b_h = b_gate / (1.0 + gl.exp(-alpha * b_gate)) * (b_up + beta)
        o_n = gl.arange(0, TOKENS, gl.SliceLayout(0, OUT))
        b_pair, m_n = _pairs(
            plan_ptr, order_start, num_tokens * TOPK, expert, first, end, o_n, IS_SINGLE
        )
        o_row = row + gl.arange(0, SHARE, gl.SliceLayout(1, OUT))
        p_h = h_ptr + b_pair.to(gl.int64)[None, :] * WIDTH + o_row[:, None]
        m_h = m_n[None, :] & (o_row < WIDTH)[:, None]
        gl.store(p_h, b_h.to(gl.bfloat16), mask=m_h)
        expert, first, end = next_expert, next_first, next_end


@gluon.jit(do_not_specialize=["order_start", "num_tokens"])
def down_kernel(
    h_ptr, w_desc, scale_ptr, shared_desc, shared_scale_ptr, plan_ptr, weights_ptr, y_ptr,
    order_start, num_tokens, HIDDEN: gl.constexpr, WIDTH: gl.constexpr, TOPK: gl.constexpr,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, HAS_SHARED: gl.constexpr,
    IS_SINGLE: gl.constexpr,
):  # fmt: skip
    """y[pair] = weight · w2[expert] h[pair]; the shared expert counts 1."""
    ROWS: gl.constexpr = w_desc.block_type.shape[1]
    NUM_N: gl.constexpr = (HIDDEN + ROWS - 1) // ROWS
    STEPS: gl.constexpr = WIDTH // DEPTH
    OUT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [ROWS // 32, 1], [16, 8])
    TOKEN: gl.constexpr = token_layout(TOKENS, ROWS)
    weights, scales = (w_desc, shared_desc), (scale_ptr, shared_scale_ptr)
    ring = make_ring(w_desc, STAGES)
    pid = gl.program_id(0)
    step_n = gl.num_programs(0)
    num_shared = (num_tokens + TOKENS - 1) // TOKENS if HAS_SHARED else 0
    gdc_launch_dependents()
    num_tiles = (num_shared + _num_tiles(plan_ptr, TOPK, IS_SINGLE)) * NUM_N
    expert, first, end = _find(
        plan_ptr, pid // NUM_N, num_shared, num_tokens, TOPK, TOKENS, IS_SINGLE
    )
    fill(weights, ring, expert, pid % NUM_N * ROWS, pid < num_tiles, HAS_SHARED)
    gdc_wait()
    i_use = 0
    for tile in range(pid, num_tiles, step_n):
        row = tile % NUM_N * ROWS
        # [TOKENS]
        o_n = gl.arange(0, TOKENS, gl.SliceLayout(1, TOKEN))
        b_pair, m_n = _pairs(
            plan_ptr, order_start, num_tokens * TOPK, expert, first, end, o_n, IS_SINGLE
        )
        p_h = h_ptr + b_pair.to(gl.int64) * (WIDTH // 2)
        p_h = p_h[:, None] + gl.arange(0, DEPTH // 2, gl.SliceLayout(0, TOKEN))[None, :]
        p_scale = scales_at(scales, expert, row, HIDDEN, STEPS, ring[0])
        ahead = gl.minimum(tile + step_n, num_tiles - 1)
        next_expert, next_first, next_end = _find(
            plan_ptr, ahead // NUM_N, num_shared, num_tokens, TOPK, TOKENS, IS_SINGLE
        )
        b_y, i_use = product(
            weights, ring, i_use, expert, row, next_expert, ahead % NUM_N * ROWS,
            tile + step_n < num_tiles, p_h, m_n[:, None], p_scale, STEPS, HAS_SHARED,
        )  # fmt: skip
        o_n = gl.arange(0, TOKENS, gl.SliceLayout(0, OUT))
        b_pair, m_n = _pairs(
            plan_ptr, order_start, num_tokens * TOPK, expert, first, end, o_n, IS_SINGLE
        )
        m_weight = m_n & (expert >= 0)
        b_y *= gl.load(weights_ptr + b_pair, mask=m_weight, other=1.0)[None, :]
        o_row = row + gl.arange(0, ROWS, gl.SliceLayout(1, OUT))
        p_y = y_ptr + b_pair.to(gl.int64)[None, :] * HIDDEN + o_row[:, None]
        gl.store(p_y, b_y, mask=m_n[None, :] & (o_row < HIDDEN)[:, None])
        expert, first, end = next_expert, next_first, next_end


def config_for(num_tokens: int) -> Config:
    if num_tokens == 1:
        # Hardly more tiles than programs: small ones spread better.
        return Config(rows=32, tokens=8, stages=8, programs=6)
    return Config(rows=64, tokens=8, stages=6, programs=4)


def fits(x_TC: Tensor, w2_ECI: MXFP8Tensor) -> bool:
    """Whether rows are whole tiles of the ring."""
    is_whole = all(size % DEPTH.value == 0 for size in w2_ECI.shape[1:])
    return x_TC.dtype == torch.bfloat16 and is_whole


def _words(weight: Tensor, num_parts: int, rows: int) -> TensorDescriptor:
    """Of [..., num_parts * N, K] e4m3, as [experts * num_parts, N, K / 4] words."""
    num_rows, size = weight.shape[-2] // num_parts, weight.shape[-1] // 4
    matrices = weight.contiguous().view(torch.int32).view(-1, num_rows, size)
    block = [num_parts, rows // num_parts, WORDS.value]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.int32)
    return TensorDescriptor.from_tensor(matrices, block, layout)


def products(
    x_TC: Tensor,
    w13_E2IC: MXFP8Tensor,
    w2_ECI: MXFP8Tensor,
    ids_TA: Tensor,
    weights_TA: Tensor,
    plan: Plan | None,
    alpha: float,
    limit: float,
    beta: float,
    shared: tuple[MXFP8Tensor, MXFP8Tensor] | None,
    config: Config,
) -> Tensor:
    """weight · w2 swiglu_oai(w13 x) of every pair and then of the shared expert.

    Args:
        x_TC: [T, C] BF16, contiguous, as are ids and weights; `fits` has said yes.
        plan: of tiles of `config.tokens` rows; None for a single token.
        shared: of the routed experts' shape.

    Returns:
        [T * A, or T * (A + 1) with a shared expert, C] FP32; rows of pairs without an expert are
        not written.
    """
    (num_tokens, topk), (_, hidden, width) = ids_TA.shape, w2_ECI.shape
    assert (plan is None) == (num_tokens == 1), "a single token has no plan, others have one"
    assert plan is None or (plan.tile_rows, plan.tail_rows) == (config.tokens, 0)
    num_pairs = num_tokens * topk
    num_shared = triton.cdiv(num_tokens, config.tokens) if shared is not None else 0
    num_rows = num_pairs + (num_tokens if shared is not None else 0)
    h_XI = torch.empty(num_rows, width, dtype=torch.bfloat16, device=x_TC.device)
    y_XC = torch.empty(num_rows, hidden, dtype=torch.float32, device=x_TC.device)
    max_tiles = num_shared + (num_pairs if plan is None else plan.max_tiles)
    most = num_multiprocessors(x_TC.device) * config.programs
    found = ids_TA if plan is None else plan.data
    order_start = 0 if plan is None else plan.order_start
    shared_w13, shared_w2 = (w13_E2IC, w2_ECI) if shared is None else shared
    options = {
        "HIDDEN": hidden,
        "WIDTH": width,
        "TOPK": topk,
        "TOKENS": config.tokens,
        # A slot is filled again within the next tile at the latest.
        "STAGES": min(config.stages, hidden // DEPTH.value, width // DEPTH.value),
        "HAS_SHARED": shared is not None,
        "IS_SINGLE": plan is None,
        "num_warps": config.rows // 32,
        "launch_pdl": True,
    }
    gate_up_kernel[(min(most, max_tiles * triton.cdiv(2 * width, config.rows)),)](
        x_TC.view(torch.int32),
        _words(w13_E2IC.values, 2, config.rows),
        w13_E2IC.scale.contiguous().view(torch.int32),
        _words(shared_w13.values, 2, config.rows),
        shared_w13.scale.contiguous().view(torch.int32),
        found,
        h_XI,
        order_start,
        num_tokens,
        alpha,
        limit,
        beta,
        **options,
    )
    down_kernel[(min(most, max_tiles * triton.cdiv(hidden, config.rows)),)](
        h_XI.view(torch.int32),
        _words(w2_ECI.values, 1, config.rows),
        w2_ECI.scale.contiguous().view(torch.int32),
        _words(shared_w2.values, 1, config.rows),
        shared_w2.scale.contiguous().view(torch.int32),
        found,
        weights_TA,
        y_XC,
        order_start,
        num_tokens,
        **options,
    )
    return y_XC
