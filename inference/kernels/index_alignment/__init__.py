"""How far the index branch is from the attention that it chooses blocks for, with gradients."""

from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from inference.kernels.dispatch import expect_dtype, expect_shape, use_kernel
from inference.kernels.index_alignment import reference
from inference.kernels.packing import Packing

OP = "index_alignment"
AlignmentLevel = Literal["token", "block"]
ALIGNMENT_LEVELS: tuple[AlignmentLevel, ...] = get_args(AlignmentLevel)


def index_alignment(
    index_q_QKD: Tensor,
    index_k_TD: Tensor,
    q_QHD: Tensor,
    k_TKD: Tensor,
    blocks_QKB: Tensor,
    packing: Packing,
    *,
    scale: float,
    index_scale: float,
    block_size: int,
    level: AlignmentLevel,
) -> Tensor:
    """KL(P ‖ P_index) of each query and KV head, over the visible keys S of its chosen blocks.

        P(s)       = mean over the query heads of the KV head of softmax_S(scale · q · k_s)
        P_index(s) = softmax_S(index_scale · index_q · index_k_s)

    That is level 'token', the loss of MSA (arXiv:2606.13392, and the training code published with
    it). With 'block' both are over the chosen blocks: P sums over a block's visible keys, and the
    index branch's logit of a block is its score, the largest among them (the first of equals).

    FP32 inside. Differentiable, once, in `index_q_QKD` and `index_k_TD` alone: the main branch is
    the target. Work and memory grow with the chosen keys, not with the square of the tokens; on
    CUDA a weight a chosen key is kept for the gradient, in the dtype of `index_q_QKD`, and the same
    inputs give the same bits.

    Args:
        index_q_QKD: [Q, K, index head dim], after norm and RoPE.
        index_k_TD: [T, index head dim] of all packed tokens.
        q_QHD: [Q, H, D], query head h reads KV head `h // (H / K)`.
        k_TKD: [T, K, D].
        blocks_QKB: [Q, K, B] int32 ids without repetition, counted from the first token of the
            query's own sample, -1 for none.

    Returns:
        [Q, K] FP32 (FP64 of FP64), in nats; 0 where nothing is visible.
    """
    is_kernel = use_kernel(OP, index_q_QKD, index_k_TD, q_QHD, k_TKD, blocks_QKB)
    num_queries, num_kv_heads, index_dim = index_q_QKD.shape
    _, num_heads, head_dim = q_QHD.shape
    expect_shape(OP, "index_q_QKD", index_q_QKD, (packing.num_queries, num_kv_heads, index_dim))
    expect_shape(OP, "index_k_TD", index_k_TD, (packing.num_tokens, index_dim))
    expect_shape(OP, "q_QHD", q_QHD, (num_queries, num_heads, head_dim))
    expect_shape(OP, "k_TKD", k_TKD, (packing.num_tokens, num_kv_heads, head_dim))
    expect_shape(OP, "blocks_QKB", blocks_QKB, (num_queries, num_kv_heads, blocks_QKB.shape[-1]))
    expect_dtype(OP, "blocks_QKB", blocks_QKB, torch.int32)
    expect_dtype(OP, "index_k_TD", index_k_TD, index_q_QKD.dtype)
    expect_dtype(OP, "k_TKD", k_TKD, q_QHD.dtype)
    if num_heads % num_kv_heads:
        raise ValueError(f"{OP}: {num_heads} query heads do not share {num_kv_heads} KV heads")
    if level not in ALIGNMENT_LEVELS:
        raise ValueError(f"{OP}: level={level!r} is unknown; use one of {ALIGNMENT_LEVELS}")
    args = (packing, scale, index_scale, block_size, level)
    if is_kernel:
        kl_QK: Tensor = _IndexAlignment.apply(
            index_q_QKD, index_k_TD, q_QHD.detach(), k_TKD.detach(), blocks_QKB, *args
        )
        return kl_QK
    return reference.index_alignment(
        index_q_QKD, index_k_TD, q_QHD.detach(), k_TKD.detach(), blocks_QKB, *args
    )


class _IndexAlignment(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        index_q_QKD: Tensor,
        index_k_TD: Tensor,
        q_QHD: Tensor,
        k_TKD: Tensor,
        blocks_QKB: Tensor,
        packing: Packing,
        scale: float,
        index_scale: float,
        block_size: int,
        level: AlignmentLevel,
    ) -> Tensor:
        from inference.kernels.index_alignment.launch import divergence

        result = divergence(
            index_q_QKD,
            index_k_TD,
            q_QHD,
            k_TKD,
            blocks_QKB,
            packing,
            scale=scale,
            index_scale=index_scale,
            block_size=block_size,
            level=level,
        )
        lists = result.lists
        ctx.save_for_backward(
            index_q_QKD,
            result.slope_QKD,
            result.weight_LS,
            lists.tokens_L,
            lists.units_U8,
            lists.unit_start_X1,
        )
        ctx.packing, ctx.index_scale, ctx.block_size = packing, index_scale, block_size
        return result.kl_QK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_QK: Tensor) -> tuple[Tensor | None, ...]:
        from inference.kernels.index_alignment.launch import key_gradient

        index_q_QKD, slope_QKD, weight_LS, tokens_L, units_U8, unit_start_X1 = ctx.saved_tensors
        grad_q_QKD = (slope_QKD * grad_QK[..., None]).to(index_q_QKD.dtype)
        grad_k_TD = key_gradient(
            index_q_QKD,
            grad_QK,
            weight_LS,
            tokens_L,
            units_U8,
            unit_start_X1,
            ctx.packing,
            index_scale=ctx.index_scale,
            block_size=ctx.block_size,
        )
        return grad_q_QKD, grad_k_TD, *[None] * 8
