"""The two grouped products for few tokens on Hopper, with MXFP8 weights that are read once.

A program walks over tiles: some rows of an expert's weight and up to TOKENS of its tokens. A plan
says which; of a few pairs every program finds them itself. The shared expert's come first.

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
    LINE,
    WORDS,
    fill,
    make_ring,
    product,
    token_layout,
)
from inference.kernels.hardware import num_multiprocessors
from inference.kernels.mxfp8 import MXFP8Tensor
from inference.kernels.swiglu_oai.kernel import clamped

MAX_UNPLANNED = gl.constexpr(32)
"""Pairs, one a lane, of which every program finds the tiles itself."""
ALIGNMENT = 512
"""Of both products' columns."""


class Config(NamedTuple):
    """How both products are cut."""

    rows: int
    """Of a weight, a tile: 32 a warp."""
    splits: int
    """Parts of every 128 columns, which as many warps sum."""
    tokens: int
    """8 or more."""
    stages: int
    """Of the ring, each of 128 * splits columns."""
    programs: int
    """A multiprocessor."""


@gluon.constexpr_function
def _lane_layout(size, num_warps):
    """[MAX_UNPLANNED, size]: a row a lane, all of it, the same in every warp."""
    registers = [[0, 1 << i] for i in range(size.bit_length() - 1)]
    lanes = [[1 << i, 0] for i in range(5)]
    warps = [[0, 0]] * (num_warps.bit_length() - 1)
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [32, size])


@gluon.jit
def _survey(plan_ptr, num_pairs, TOKENS: gl.constexpr, HAS_PLAN: gl.constexpr):
    """(what `_find` and `_pairs` need of the ids, how many tiles the routed experts have).

    Without a plan a pair that is the 0th, TOKENS-th.. of its expert begins a tile.
    """
    if HAS_PLAN:
        count = gl.load(plan_ptr, cache_modifier=".cg")
        found = count, count, count  # not used
    else:
        SIZE: gl.constexpr = MAX_UNPLANNED
        PAIRS: gl.constexpr = _lane_layout(SIZE, gl.num_warps())
        o_p = gl.arange(0, SIZE, gl.SliceLayout(1, PAIRS))
        o_j = gl.arange(0, SIZE, gl.SliceLayout(0, PAIRS))
        b_id = gl.load(plan_ptr + o_p, mask=o_p < num_pairs, other=-1, cache_modifier=".cg")
        b_other = gl.load(plan_ptr + o_j, mask=o_j < num_pairs, other=-1, cache_modifier=".cg")
        m_before = o_j[None, :] < o_p[:, None]
        m_same = m_before & (b_other[None, :] == b_id[:, None])
        b_place = gl.sum(m_same.to(gl.int32), 1)
        b_begins = ((b_id >= 0) & (b_place % TOKENS == 0)).to(gl.int32)
        b_other_begins = gl.convert_layout(b_begins, gl.SliceLayout(0, PAIRS))
        b_tile = gl.sum(gl.where(m_before, b_other_begins[None, :], 0), 1)
        b_tile = gl.where(b_begins > 0, b_tile, -1)
        found, count = (b_id, b_place, b_tile), gl.sum(b_begins, 0)
    return found, count


@gluon.jit
def _find(
    plan_ptr, found, i_m, num_shared, num_tokens, TOKENS: gl.constexpr, HAS_PLAN: gl.constexpr
):  # fmt: skip
    """(expert, first, end) of a tile, whose rows are first..end as `_pairs` takes them.

    The first `num_shared` tiles are the shared expert's, and their expert is -1.
    """
    expert, first = -1, i_m * TOKENS
    end = gl.minimum(first + TOKENS, num_tokens)
    i_m -= num_shared
    if HAS_PLAN:
        if i_m >= 0:
            expert = gl.load(plan_ptr + 4 + 4 * i_m, cache_modifier=".cg")
            first = gl.load(plan_ptr + 5 + 4 * i_m, cache_modifier=".cg")
            end = gl.load(plan_ptr + 6 + 4 * i_m, cache_modifier=".cg")
    else:
        b_id, b_place, b_tile = found
        code = gl.sum(gl.where(b_tile == i_m, b_id * MAX_UNPLANNED + b_place, 0), 0)
        is_routed = i_m >= 0
        expert = gl.where(is_routed, code // MAX_UNPLANNED, expert)
        first = gl.where(is_routed, code % MAX_UNPLANNED, first)
        end = gl.where(is_routed, first + TOKENS, end)
    return expert, first, end


@gluon.jit
def _pairs(
    plan_ptr, found, order_start, num_pairs, expert, first, end, LAYOUT: gl.constexpr,
    TOKENS: gl.constexpr, HAS_PLAN: gl.constexpr,
):  # fmt: skip
    """[TOKENS] rows of h and y: pairs, or behind them tokens of the shared expert; and a mask."""
    b_row = first + gl.arange(0, TOKENS, LAYOUT)
    m_row = b_row < end
    b_pair = b_row + num_pairs
    if HAS_PLAN:
        m_own = m_row & (expert >= 0)
        b_own = gl.load(plan_ptr + order_start + b_row, mask=m_own, other=0, cache_modifier=".cg")
        b_pair = gl.where(m_own, b_own, b_pair)
    elif expert >= 0:
        # [MAX_UNPLANNED, TOKENS]
        MATCH: gl.constexpr = _lane_layout(TOKENS, gl.num_warps())
        o_p = gl.arange(0, MAX_UNPLANNED, gl.SliceLayout(1, MATCH))
        b_id = gl.convert_layout(found[0], gl.SliceLayout(1, MATCH))
        b_place = gl.where(b_id == expert, gl.convert_layout(found[1], b_id.type.layout), -1)
        m_match = (
            b_place[:, None] == first + gl.arange(0, TOKENS, gl.SliceLayout(0, MATCH))[None, :]
        )
        b_own = gl.sum(gl.where(m_match, o_p[:, None] + 1, 0), 0)
        b_pair = gl.convert_layout(b_own, LAYOUT) - 1
        m_row = b_pair >= 0
    return b_pair, m_row


@gluon.jit(do_not_specialize=["order_start", "num_tokens"])
def gate_up_kernel(
    x_ptr, w_desc, scale_desc, shared_desc, shared_scale_desc, plan_ptr, h_ptr, order_start,
    num_tokens, alpha, limit, beta, HIDDEN: gl.constexpr, WIDTH: gl.constexpr,
    TOPK: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, HAS_SHARED: gl.constexpr,
    HAS_PLAN: gl.constexpr,
):  # fmt: skip
    """h[pair] = swiglu_oai(w13[expert] x[token]): half of a tile's rows gates, half their ups."""
    SPLITS: gl.constexpr = w_desc.block_type.shape[0]
    SHARE: gl.constexpr = w_desc.block_type.shape[2]
    NUM_N: gl.constexpr = (WIDTH + SHARE - 1) // SHARE
    STEPS: gl.constexpr = HIDDEN // (LINE * SPLITS)
    TOKEN: gl.constexpr = token_layout(TOKENS, 2 * SHARE, SPLITS)
    weights = (w_desc, scale_desc), (shared_desc, shared_scale_desc)
    ring = make_ring(w_desc, scale_desc, STAGES)
    pid = gl.program_id(0)
    step_n = gl.num_programs(0)
    num_shared = (num_tokens + TOKENS - 1) // TOKENS if HAS_SHARED else 0
    if HAS_SHARED:
        is_shared = pid < num_shared * NUM_N
        fill(weights, ring, -1, pid % NUM_N * SHARE, is_shared, True)
    # In this order: kernels behind read the ids before they wait.
    gdc_wait()
    gdc_launch_dependents()
    found, num_tiles = _survey(plan_ptr, num_tokens * TOPK, TOKENS, HAS_PLAN)
    num_tiles = (num_shared + num_tiles) * NUM_N
    expert, first, end = _find(
        plan_ptr, found, pid // NUM_N, num_shared, num_tokens, TOKENS, HAS_PLAN
    )
    fill(weights, ring, expert, pid % NUM_N * SHARE, (pid < num_tiles) & (expert >= 0), False)
    i_use = 0
    for tile in range(pid, num_tiles, step_n):
        row = tile % NUM_N * SHARE
        # [TOKENS]
        b_pair, m_n = _pairs(
            plan_ptr, found, order_start, num_tokens * TOPK, expert, first, end,
            gl.SliceLayout(1, TOKEN), TOKENS, HAS_PLAN,
        )  # fmt: skip
        b_token = gl.where(expert < 0, b_pair - num_tokens * TOPK, b_pair // TOPK)
        p_x = x_ptr + b_token.to(gl.int64) * (HIDDEN // 2)
        p_x = p_x[:, None] + gl.arange(0, SPLITS * LINE // 2, gl.SliceLayout(0, TOKEN))[None, :]
        ahead = gl.minimum(tile + step_n, num_tiles - 1)
        next_expert, next_first, next_end = _find(
            plan_ptr, found, ahead // NUM_N, num_shared, num_tokens, TOKENS, HAS_PLAN
        )
        b_acc, i_use = product(
            weights, ring, i_use, expert, row, next_expert, ahead % NUM_N * SHARE,
            tile + step_n < num_tiles, p_x, m_n[:, None], STEPS, HAS_SHARED,
        )  # fmt: skip
        # [SHARE, TOKENS] each
        b_gate, b_up = b_acc.reshape([2, SHARE, TOKENS]).permute((1, 2, 0)).split()
        OUT: gl.constexpr = b_gate.type.layout
        b_gate, b_up = clamped(b_gate, b_up, limit)
        b_h = b_gate / (1.0 + gl.exp(-alpha * b_gate)) * (b_up + beta)
        b_pair, m_n = _pairs(
            plan_ptr, found, order_start, num_tokens * TOPK, expert, first, end,
            gl.SliceLayout(0, OUT), TOKENS, HAS_PLAN,
        )  # fmt: skip
        o_row = row + gl.arange(0, SHARE, gl.SliceLayout(1, OUT))
        p_h = h_ptr + b_pair.to(gl.int64)[None, :] * WIDTH + o_row[:, None]
        m_h = m_n[None, :] & (o_row < WIDTH)[:, None]
        gl.store(p_h, b_h.to(gl.bfloat16), mask=m_h)
        expert, first, end = next_expert, next_first, next_end


@gluon.jit(do_not_specialize=["order_start", "num_tokens"])
def down_kernel(
    h_ptr, w_desc, scale_desc, shared_desc, shared_scale_desc, plan_ptr, weights_ptr, y_ptr,
    order_start, num_tokens, HIDDEN: gl.constexpr, WIDTH: gl.constexpr, TOPK: gl.constexpr,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, HAS_SHARED: gl.constexpr,
    HAS_PLAN: gl.constexpr,
):  # fmt: skip
    """y[pair] = weight · w2[expert] h[pair]; the shared expert counts 1."""
    SPLITS: gl.constexpr = w_desc.block_type.shape[0]
    ROWS: gl.constexpr = w_desc.block_type.shape[2]
    NUM_N: gl.constexpr = (HIDDEN + ROWS - 1) // ROWS
    STEPS: gl.constexpr = WIDTH // (LINE * SPLITS)
    TOKEN: gl.constexpr = token_layout(TOKENS, ROWS, SPLITS)
    weights = (w_desc, scale_desc), (shared_desc, shared_scale_desc)
    ring = make_ring(w_desc, scale_desc, STAGES)
    pid = gl.program_id(0)
    step_n = gl.num_programs(0)
    num_shared = (num_tokens + TOKENS - 1) // TOKENS if HAS_SHARED else 0
    gdc_launch_dependents()
    found, num_tiles = _survey(plan_ptr, num_tokens * TOPK, TOKENS, HAS_PLAN)
    num_tiles = (num_shared + num_tiles) * NUM_N
    expert, first, end = _find(
        plan_ptr, found, pid // NUM_N, num_shared, num_tokens, TOKENS, HAS_PLAN
    )
    fill(weights, ring, expert, pid % NUM_N * ROWS, pid < num_tiles, HAS_SHARED)
    gdc_wait()
    i_use = 0
    for tile in range(pid, num_tiles, step_n):
        row = tile % NUM_N * ROWS
        # [TOKENS]
        b_pair, m_n = _pairs(
            plan_ptr, found, order_start, num_tokens * TOPK, expert, first, end,
            gl.SliceLayout(1, TOKEN), TOKENS, HAS_PLAN,
        )  # fmt: skip
        p_h = h_ptr + b_pair.to(gl.int64) * (WIDTH // 2)
        p_h = p_h[:, None] + gl.arange(0, SPLITS * LINE // 2, gl.SliceLayout(0, TOKEN))[None, :]
        ahead = gl.minimum(tile + step_n, num_tiles - 1)
        next_expert, next_first, next_end = _find(
            plan_ptr, found, ahead // NUM_N, num_shared, num_tokens, TOKENS, HAS_PLAN
        )
        b_y, i_use = product(
            weights, ring, i_use, expert, row, next_expert, ahead % NUM_N * ROWS,
            tile + step_n < num_tiles, p_h, m_n[:, None], STEPS, HAS_SHARED,
        )  # fmt: skip
        OUT: gl.constexpr = b_y.type.layout
        b_pair, m_n = _pairs(
            plan_ptr, found, order_start, num_tokens * TOPK, expert, first, end,
            gl.SliceLayout(0, OUT), TOKENS, HAS_PLAN,
        )  # fmt: skip
        m_weight = m_n & (expert >= 0)
        b_y *= gl.load(weights_ptr + b_pair, mask=m_weight, other=1.0)[None, :]
        o_row = row + gl.arange(0, ROWS, gl.SliceLayout(1, OUT))
        p_y = y_ptr + b_pair.to(gl.int64)[None, :] * HIDDEN + o_row[:, None]
        gl.store(p_y, b_y, mask=m_n[None, :] & (o_row < HIDDEN)[:, None])
        expert, first, end = next_expert, next_first, next_end


def config_for(num_tokens: int, topk: int, num_routed: int) -> Config:
    """By the rows an expert gets on average if all pairs were this rank's."""
    if 2 * num_tokens * topk <= num_routed:
        # Small tiles, which spread better over few experts.
        return Config(rows=32, splits=4, tokens=8, stages=4, programs=3)
    return Config(rows=64, splits=4, tokens=8, stages=3, programs=2)


def fits(x_TC: Tensor, w2_ECI: MXFP8Tensor) -> bool:
    """Whether the copy engine takes rows of scales, of 16 bytes, and values come in whole tiles."""
    is_whole = all(size % ALIGNMENT == 0 for size in w2_ECI.shape[1:])
    return x_TC.dtype == torch.bfloat16 and is_whole


def _weight(weight: MXFP8Tensor, num_parts: int, cut: Config) -> tuple[TensorDescriptor, ...]:
    """Of [..., num_parts * N, K]: values as [K / 128, experts * num_parts, N, 32] words, and
    scales as [experts * num_parts, N, K / 128] words.
    """
    num_rows, size = weight.values.shape[-2] // num_parts, weight.values.shape[-1]
    lines = weight.values.contiguous().view(torch.int32)
    lines = lines.view(-1, num_rows, size // LINE.value, WORDS.value).permute(2, 0, 1, 3)
    scales = weight.scale.contiguous().view(torch.int32).view(-1, num_rows, size // LINE.value)
    tile = [num_parts, cut.rows // num_parts]
    # The copy engine takes 16 bytes at least.
    blocks = [cut.splits, *tile, WORDS.value], [*tile, max(4, cut.splits)]
    return tuple(
        TensorDescriptor.from_tensor(
            words, block, gl.NVMMASharedLayout.get_default_for(block, gl.int32)
        )
        for words, block in zip((lines, scales), blocks, strict=True)
    )


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
        plan: of tiles of `config.tokens` rows; None for up to MAX_UNPLANNED pairs.
        shared: of the routed experts' shape.

    Returns:
        [T * A, or T * (A + 1) with a shared expert, C] FP32; rows of pairs without an expert are
        not written.
    """
    (num_tokens, topk), (_, hidden, width) = ids_TA.shape, w2_ECI.shape
    num_pairs = num_tokens * topk
    assert plan is not None or num_pairs <= MAX_UNPLANNED.value
    assert plan is None or (plan.tile_rows, plan.tail_rows) == (config.tokens, 0)
    # A slot is filled again within the next tile at the latest.
    num_steps = min(hidden, width) // (LINE.value * config.splits)
    assert all(size % (LINE.value * config.splits) == 0 for size in (hidden, width))
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
        "STAGES": min(config.stages, num_steps),
        "HAS_SHARED": shared is not None,
        "HAS_PLAN": plan is not None,
        "num_warps": config.rows // 32 * config.splits,
        "launch_pdl": True,
    }
    gate_up_kernel[(min(most, max_tiles * triton.cdiv(2 * width, config.rows)),)](
        x_TC.view(torch.int32),
        *_weight(w13_E2IC, 2, config),
        *_weight(shared_w13, 2, config),
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
        *_weight(w2_ECI, 1, config),
        *_weight(shared_w2, 1, config),
        found,
        weights_TA,
        y_XC,
        order_start,
        num_tokens,
        **options,
    )
    return y_XC
