"""FP32 routing logits on tensor cores, then sigmoid, bias, choice and weights of each token.

A BF16 token is exact in BF16 and an FP32 weight is the exact sum of three BF16 numbers, so three
BF16 products accumulated in FP32 are an FP32 product. Few tokens are split over the hidden size
into many programs; the second kernel adds the parts in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

USE_PDL = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9
"""Programmatic dependent launch: the launch itself overlaps the end of the kernel before."""
NUM_PROGRAMS = 128
"""About how many programs share the logits of few tokens: one a multiprocessor."""


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
    """logits[split, token] = weight x over `split_size` columns."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
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
    end = tl.minimum((i_s + 1) * split_size, hidden)
    for first in range(i_s * split_size, end, BLOCK_K):
        o_c = first + o_k[None, :]
        b_x = tl.load(p_x + o_c, mask=m_t[:, None] & (o_c < end), other=0.0)
        b_w = tl.load(p_w + o_c, mask=m_e[:, None] & (o_c < end), other=0.0)
        if IS_BF16:
            b_w0 = b_w.to(tl.bfloat16)
            b_rest = b_w - b_w0.to(tl.float32)
            b_w1 = b_rest.to(tl.bfloat16)
            b_w2 = (b_rest - b_w1.to(tl.float32)).to(tl.bfloat16)
            b_logits = tl.dot(b_w2, b_x.T, b_logits)
            b_logits = tl.dot(b_w1, b_x.T, b_logits)
            b_logits = tl.dot(b_w0, b_x.T, b_logits)
        else:
            b_logits = tl.dot(b_w, b_x.to(tl.float32).T, b_logits, input_precision="ieee")
    p_logits = logits_ptr + i_s.to(tl.int64) * num_tokens * BLOCK_E
    p_logits += o_t.to(tl.int64)[None, :] * BLOCK_E + o_e[:, None]
    tl.store(p_logits, b_logits, mask=m_t[None, :])


@triton.jit(do_not_specialize=["num_tokens", "num_splits"])
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
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HAS_REPLAY: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Sum the splits of BLOCK_T tokens in order, choose TOPK experts and weigh them."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # [BLOCK_T]
    o_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    m_t = o_t < num_tokens
    # [BLOCK_E]
    o_e = tl.arange(0, BLOCK_E)
    m_e = o_e < num_experts
    # [BLOCK_S, BLOCK_T, BLOCK_E]
    o_s = tl.arange(0, BLOCK_S)[:, None, None]
    p_logits = logits_ptr + o_t.to(tl.int64)[None, :, None] * BLOCK_E + o_e[None, None, :]
    p_logits += o_s.to(tl.int64) * num_tokens * BLOCK_E
    # [BLOCK_T, BLOCK_E]
    b_logits = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    for first in range(0, num_splits, BLOCK_S):
        m_s = m_t[None, :, None] & (first + o_s < num_splits)
        b_part = tl.load(p_logits, mask=m_s, other=0.0)
        b_logits += tl.sum(b_part, 0)
        p_logits += BLOCK_S * num_tokens.to(tl.int64) * BLOCK_E
    b_scores = 1.0 / (1.0 + tl.exp(-b_logits))
    b_bias = tl.load(bias_ptr + o_e, mask=m_e, other=0.0)
    b_ranked = tl.where(m_e[None, :], b_scores + b_bias[None, :], float("-inf"))
    # [BLOCK_T, BLOCK_A]
    o_a = tl.arange(0, BLOCK_A)[None, :]
    b_ids = tl.zeros([BLOCK_T, BLOCK_A], tl.int32)
    b_chosen = tl.zeros([BLOCK_T, BLOCK_A], tl.float32)
    b_sum = tl.zeros([BLOCK_T], tl.float32)
    for i in tl.static_range(TOPK):
        # [BLOCK_T]
        if HAS_REPLAY:
            b_id = tl.load(replay_ptr + o_t.to(tl.int64) * TOPK + i, mask=m_t, other=0)
            b_id = b_id.to(tl.int32)
        else:
            b_best = tl.max(b_ranked, 1)
            b_id = tl.min(tl.where(b_ranked == b_best[:, None], o_e[None, :], BLOCK_E), 1)
            # A row of NaN has no best one; its ids must be experts all the same.
            b_id = tl.minimum(b_id, num_experts - 1)
        m_own = o_e[None, :] == b_id[:, None]
        b_score = tl.sum(tl.where(m_own, b_scores, 0.0), 1)
        b_ranked = tl.where(m_own, float("-inf"), b_ranked)
        b_sum += b_score
        b_ids = tl.where(o_a == i, b_id[:, None], b_ids)
        b_chosen = tl.where(o_a == i, b_score[:, None], b_chosen)
    o_out = o_t.to(tl.int64)[:, None] * TOPK + o_a
    m_out = m_t[:, None] & (o_a < TOPK)
    tl.store(weights_ptr + o_out, scale * (b_chosen / b_sum[:, None]), mask=m_out)
    tl.store(ids_ptr + o_out, b_ids, mask=m_out)


def router(
    x_TC: Tensor,
    weight_EC: Tensor,
    bias_E: Tensor,
    topk: int,
    scale: float,
    replay_ids_TA: Tensor | None,
    *,
    block_t: int | None = None,
    num_splits: int | None = None,
    num_warps: int = 8,
) -> tuple[Tensor, Tensor]:
    num_tokens, hidden = x_TC.shape
    num_experts = weight_EC.shape[0]
    x, weight, bias = x_TC.contiguous(), weight_EC.contiguous(), bias_E.contiguous()
    weights_TA = torch.empty(num_tokens, topk, dtype=torch.float32, device=x.device)
    ids_TA = torch.empty(num_tokens, topk, dtype=torch.int32, device=x.device)
    if not num_tokens:
        return weights_TA, ids_TA
    block_t = block_t or (16 if num_tokens <= 16 else 32 if num_tokens <= 64 else 64)
    block_e = max(16, triton.next_power_of_2(num_experts))
    is_bf16 = x.dtype == torch.bfloat16
    block_k = 64 if is_bf16 else 32
    num_blocks = triton.cdiv(hidden, block_k)
    tiles = triton.cdiv(num_tokens, block_t)
    num_splits = num_splits or max(1, min(NUM_PROGRAMS // tiles, num_blocks))
    split_size = triton.cdiv(num_blocks, num_splits) * block_k
    num_splits = triton.cdiv(hidden, split_size)
    logits_STE = torch.empty(num_splits, num_tokens, block_e, dtype=torch.float32, device=x.device)
    _logits_kernel[(tiles, num_splits)](
        x,
        weight,
        logits_STE,
        num_tokens,
        hidden,
        num_experts,
        split_size,
        BLOCK_T=block_t,
        BLOCK_E=block_e,
        BLOCK_K=block_k,
        IS_BF16=is_bf16,
        USE_PDL=USE_PDL,
        launch_pdl=USE_PDL,
        num_warps=num_warps,
        num_stages=3,
    )
    choose_t = 1 if num_splits > 1 else 8
    _choose_kernel[(triton.cdiv(num_tokens, choose_t),)](
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
        BLOCK_T=choose_t,
        BLOCK_E=block_e,
        BLOCK_A=triton.next_power_of_2(topk),
        BLOCK_S=min(32, triton.next_power_of_2(num_splits)),
        HAS_REPLAY=replay_ids_TA is not None,
        USE_PDL=USE_PDL,
        launch_pdl=USE_PDL,
        num_warps=4,
    )
    return weights_TA, ids_TA
