"""FP32 routing logits on tensor cores, then sigmoid, bias, choice and weights of each token.

A BF16 token is exact in BF16 and an FP32 weight is the exact sum of three BF16 numbers, so three
BF16 products accumulated in FP32 are an FP32 product. The tensor cores truncate what they
accumulate, so sums stay short there and are added up outside. Few tokens are split over experts
and hidden size into about as many programs as there are multiprocessors; the second kernel adds
the parts in a fixed order.

Programmatic dependent launch: both kernels let the next one start at once, and read only the
router's own weight and bias before they wait for the kernel in front. So must the kernel behind:
before its wait nothing but weights may be read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from inference.kernels.hardware import USE_PDL

MAX_FEW = 32
"""Up to so many tokens the weight is cut into pieces that a program holds in registers."""
FEW_EXPERTS, FEW_GROUPS, FEW_COLUMNS = 16, 8, 64
"""Of such a piece: experts, groups of columns (a warp each) and columns of a group."""
NUM_PROGRAMS = 128
"""About how many programs share the logits of a few hundred tokens: one a multiprocessor."""


@triton.jit
def _three(b_w):
    """FP32 as the sum of three BF16 numbers, largest first."""
    b_w0 = b_w.to(tl.bfloat16)
    b_rest = b_w - b_w0.to(tl.float32)
    b_w1 = b_rest.to(tl.bfloat16)
    return b_w0, b_w1, (b_rest - b_w1.to(tl.float32)).to(tl.bfloat16)


@triton.jit(do_not_specialize=["num_tokens"])
def _few_logits_kernel(
    x_ptr,
    weight_ptr,
    logits_ptr,
    num_tokens,
    hidden,
    num_experts,
    NUM_GROUPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ALL_E: tl.constexpr,
    EVEN: tl.constexpr,
    IS_BF16: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """logits[split, token] over NUM_GROUPS * BLOCK_K columns, a group a warp, BLOCK_E experts."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    i_e, i_s, i_t = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # [NUM_GROUPS, BLOCK_K]
    o_c = (i_s * NUM_GROUPS + tl.arange(0, NUM_GROUPS)[:, None]) * BLOCK_K
    o_c += tl.arange(0, BLOCK_K)[None, :]
    # [BLOCK_T], [BLOCK_E]
    o_t = i_t * BLOCK_T + tl.arange(0, BLOCK_T)
    o_e = i_e * BLOCK_E + tl.arange(0, BLOCK_E)
    # [NUM_GROUPS, BLOCK_E, BLOCK_K]
    p_w = weight_ptr + o_e[None, :, None] * hidden + o_c[:, None, :]
    m_w = (o_e < num_experts)[None, :, None]
    # [NUM_GROUPS, BLOCK_T, BLOCK_K]
    p_x = x_ptr + o_t.to(tl.int64)[None, :, None] * hidden + o_c[:, None, :]
    m_x = (o_t < num_tokens)[None, :, None]
    if not EVEN:
        m_w = m_w & (o_c < hidden)[:, None, :]
        m_x = m_x & (o_c < hidden)[:, None, :]
    b_w = tl.load(p_w, mask=m_w, other=0.0)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    b_x = tl.load(p_x, mask=m_x, other=0.0)
    if IS_BF16:
        b_w0, b_w1, b_w2 = _three(b_w)
        b_part = tl.dot(b_x, tl.permute(b_w2, (0, 2, 1)))
        b_part = tl.dot(b_x, tl.permute(b_w1, (0, 2, 1)), b_part)
        b_part = tl.dot(b_x, tl.permute(b_w0, (0, 2, 1)), b_part)
    else:
        b_w = tl.permute(b_w, (0, 2, 1))
        b_part = tl.dot(b_x.to(tl.float32), b_w, input_precision="ieee")
    # [BLOCK_T, BLOCK_E]
    b_logits = tl.sum(b_part, 0)
    p_logits = logits_ptr + (i_s * num_tokens + o_t).to(tl.int64)[:, None] * ALL_E + o_e[None, :]
    tl.store(p_logits, b_logits, mask=(o_t < num_tokens)[:, None])


@triton.jit(do_not_specialize=["num_tokens"])
def _logits_kernel(
    x_ptr,
    weight_ptr,
    logits_ptr,
    num_tokens,
    hidden,
    num_experts,
    split_size,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_BF16: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """logits[split, token] = weight x over `split_size` columns, all experts."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i_s = tl.program_id(1)
    # [BLOCK_T]
    o_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    m_t = o_t < num_tokens
    # [BLOCK_E]
    o_e = tl.arange(0, BLOCK_E)
    m_e = o_e < num_experts
    o_k = tl.arange(0, BLOCK_K)
    p_x = x_ptr + o_t.to(tl.int64)[:, None] * hidden
    p_w = weight_ptr + o_e[:, None] * hidden
    # [BLOCK_E, BLOCK_T]: the weights stand in registers, the tokens in shared memory.
    b_logits = tl.zeros([BLOCK_E, BLOCK_T], tl.float32)
    b_small = tl.zeros([BLOCK_E, BLOCK_T], tl.float32)
    end = tl.minimum((i_s + 1) * split_size, hidden)
    for first in range(i_s * split_size, end, BLOCK_K):
        o_c = first + o_k[None, :]
        b_x = tl.load(p_x + o_c, mask=m_t[:, None] & (o_c < end), other=0.0)
        b_w = tl.load(p_w + o_c, mask=m_e[:, None] & (o_c < end), other=0.0)
        if IS_BF16:
            # The small parts may be truncated all the way: their last bits do not count.
            b_w0, b_w1, b_w2 = _three(b_w)
            b_small = tl.dot(b_w2, b_x.T, b_small)
            b_small = tl.dot(b_w1, b_x.T, b_small)
            b_logits += tl.dot(b_w0, b_x.T)
        else:
            b_logits = tl.dot(b_w, b_x.to(tl.float32).T, b_logits, input_precision="ieee")
    p_logits = logits_ptr + i_s.to(tl.int64) * num_tokens * BLOCK_E
    p_logits += o_t.to(tl.int64)[None, :] * BLOCK_E + o_e[:, None]
    tl.store(p_logits, b_logits + b_small, mask=m_t[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _choose_kernel(
    logits_ptr,
    bias_ptr,
    replay_ptr,
    weights_ptr,
    ids_ptr,
    num_tokens,
    num_experts,
    num_splits,
    scale,
    TOPK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HAS_REPLAY: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Sum the splits of a token in order, choose TOPK experts and weigh them: one warp."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    i_t = tl.program_id(0).to(tl.int64)
    # [BLOCK_E]
    o_e = tl.arange(0, BLOCK_E)
    m_e = o_e < num_experts
    b_bias = tl.load(bias_ptr + o_e, mask=m_e, other=0.0)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    # [BLOCK_S, BLOCK_E]
    o_s = tl.arange(0, BLOCK_S)[:, None]
    p_logits = logits_ptr + (o_s * num_tokens + i_t) * BLOCK_E + o_e[None, :]
    b_logits = tl.sum(tl.load(p_logits, mask=o_s < num_splits, other=0.0), 0)
    b_scores = 1.0 / (1.0 + tl.exp(-b_logits))
    # [BLOCK_A]
    o_a = tl.arange(0, BLOCK_A)
    m_a = o_a < TOPK
    if HAS_REPLAY:
        b_ids = tl.load(replay_ptr + i_t * TOPK + o_a, mask=m_a, other=0).to(tl.int32)
    else:
        # An integer that orders as (score + bias, lower id first); NaN stands above all.
        b_bits = (b_scores + b_bias).to(tl.int32, bitcast=True)
        b_key = (b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)).to(tl.int64) * BLOCK_E
        b_key = tl.where(m_e, b_key + (BLOCK_E - 1 - o_e), -(1 << 62))
        b_ids = tl.zeros([BLOCK_A], tl.int32)
        for i in tl.static_range(TOPK):
            best = tl.max(b_key, 0)
            b_key = tl.where(b_key == best, -(1 << 62), b_key)
            chosen = (BLOCK_E - 1 - (best & (BLOCK_E - 1))).to(tl.int32)
            b_ids = tl.where(o_a == i, chosen, b_ids)
    b_own = tl.where(o_e[None, :] == b_ids[:, None], b_scores[None, :], 0.0)
    b_chosen = tl.where(m_a, tl.sum(b_own, 1), 0.0)
    b_weights = scale * (b_chosen / tl.sum(b_chosen, 0))
    tl.store(weights_ptr + i_t * TOPK + o_a, b_weights, mask=m_a)
    tl.store(ids_ptr + i_t * TOPK + o_a, b_ids, mask=m_a)


def router(
    x_TC: Tensor,
    weight_EC: Tensor,
    bias_E: Tensor,
    topk: int,
    scale: float,
    replay_ids_TA: Tensor | None,
) -> tuple[Tensor, Tensor]:
    num_tokens, num_experts = x_TC.shape[0], weight_EC.shape[0]
    x, weight, bias = x_TC.contiguous(), weight_EC.contiguous(), bias_E.contiguous()
    weights_TA = torch.empty(num_tokens, topk, dtype=torch.float32, device=x.device)
    ids_TA = torch.empty(num_tokens, topk, dtype=torch.int32, device=x.device)
    if not num_tokens:
        return weights_TA, ids_TA
    logits_STE = _few_logits(x, weight) if num_tokens <= MAX_FEW else _logits(x, weight)
    num_splits, _, block_e = logits_STE.shape
    _choose_kernel[(num_tokens,)](
        logits_STE,
        bias,
        bias if replay_ids_TA is None else replay_ids_TA.contiguous(),
        weights_TA,
        ids_TA,
        num_tokens,
        num_experts,
        num_splits,
        scale,
        TOPK=topk,
        BLOCK_E=block_e,
        BLOCK_A=triton.next_power_of_2(topk),
        BLOCK_S=triton.next_power_of_2(num_splits),
        HAS_REPLAY=replay_ids_TA is not None,
        USE_PDL=USE_PDL,
        launch_pdl=USE_PDL,
        num_warps=1,
    )
    return weights_TA, ids_TA


def _few_logits(x_TC: Tensor, weight_EC: Tensor) -> Tensor:
    """[S, T, E] parts of the logits, E rounded up to a power of two of 16 or more."""
    (num_tokens, hidden), num_experts = x_TC.shape, weight_EC.shape[0]
    split_size = FEW_GROUPS * FEW_COLUMNS
    # FP32 products take more registers; there time does not count.
    block_t = 16 if num_tokens <= 16 or x_TC.dtype != torch.bfloat16 else 32
    logits_STE = _empty(triton.cdiv(hidden, split_size), num_tokens, num_experts, x_TC)
    num_splits, _, all_e = logits_STE.shape
    _few_logits_kernel[(all_e // FEW_EXPERTS, num_splits, triton.cdiv(num_tokens, block_t))](
        x_TC,
        weight_EC,
        logits_STE,
        num_tokens,
        hidden,
        num_experts,
        NUM_GROUPS=FEW_GROUPS,
        BLOCK_T=block_t,
        BLOCK_E=FEW_EXPERTS,
        BLOCK_K=FEW_COLUMNS,
        ALL_E=all_e,
        EVEN=hidden % split_size == 0,
        IS_BF16=x_TC.dtype == torch.bfloat16,
        USE_PDL=USE_PDL,
        launch_pdl=USE_PDL,
        num_warps=8,
    )
    return logits_STE


def _logits(x_TC: Tensor, weight_EC: Tensor) -> Tensor:
    """As `_few_logits`, the weight read by every program."""
    (num_tokens, hidden), num_experts = x_TC.shape, weight_EC.shape[0]
    is_bf16 = x_TC.dtype == torch.bfloat16
    block_k = 64 if is_bf16 else 32
    block_t = 64 if num_tokens <= 2048 else 128
    num_blocks = triton.cdiv(hidden, block_k)
    tiles = triton.cdiv(num_tokens, block_t)
    num_splits = max(1, min(NUM_PROGRAMS // tiles, num_blocks, 32))
    split_size = triton.cdiv(num_blocks, num_splits) * block_k
    logits_STE = _empty(triton.cdiv(hidden, split_size), num_tokens, num_experts, x_TC)
    num_splits, _, all_e = logits_STE.shape
    _logits_kernel[(tiles, num_splits)](
        x_TC,
        weight_EC,
        logits_STE,
        num_tokens,
        hidden,
        num_experts,
        split_size,
        BLOCK_T=block_t,
        BLOCK_E=all_e,
        BLOCK_K=block_k,
        IS_BF16=is_bf16,
        USE_PDL=USE_PDL,
        launch_pdl=USE_PDL,
        num_warps=8,
        num_stages=3,
    )
    return logits_STE


def _empty(num_splits: int, num_tokens: int, num_experts: int, like: Tensor) -> Tensor:
    shape = num_splits, num_tokens, max(16, triton.next_power_of_2(num_experts))
    return torch.empty(shape, dtype=torch.float32, device=like.device)
