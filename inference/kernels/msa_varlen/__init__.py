"""Block-sparse GQA over packed samples, with gradients."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from inference.kernels.dispatch import expect_dtype, expect_shape, use_kernel
from inference.kernels.msa_varlen import reference
from inference.kernels.packing import Packing

OP = "msa_varlen"


def msa_varlen(
    q_QHD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    blocks_QKB: Tensor,
    packing: Packing,
    *,
    scale: float,
    block_size: int,
) -> Tensor:
    """Softmax attention over the keys of the chosen blocks that are not in the query's future.

    Query head h reads KV head `h // (H / K)`. FP32 inside, one cast to the dtype of `q_QHD`.
    Differentiable in q, k and v (once on CUDA, where the same inputs give the same bits).

    Args:
        q_QHD: [Q, H, D].
        k_TKD, v_TKD: [T, K, D] of all packed tokens, the queries' dtype.
        blocks_QKB: [Q, K, B] int32 ids without repetition, counted from the first token of the
            query's own sample, -1 for none (from `index_select_varlen`, or replayed).
        scale: factor on the query-key products.

    Returns:
        [Q, H, D]; zeros where nothing is visible.

    Raises:
        ValueError: a block that no sample has (on the CPU; on CUDA such a block is left out, for
            looking would stop the GPU).
    """
    is_kernel = use_kernel(OP, q_QHD, k_TKD, v_TKD, blocks_QKB, packing.positions_T)
    _, num_heads, head_dim = q_QHD.shape
    num_kv_heads = k_TKD.shape[1]
    expect_shape(OP, "q_QHD", q_QHD, (packing.num_queries, num_heads, head_dim))
    for name, tensor in (("k_TKD", k_TKD), ("v_TKD", v_TKD)):
        expect_shape(OP, name, tensor, (packing.num_tokens, num_kv_heads, head_dim))
        expect_dtype(OP, name, tensor, q_QHD.dtype)
    choices = (packing.num_queries, num_kv_heads, blocks_QKB.shape[-1])
    expect_shape(OP, "blocks_QKB", blocks_QKB, choices)
    expect_dtype(OP, "blocks_QKB", blocks_QKB, torch.int32)
    if num_heads % num_kv_heads:
        raise ValueError(f"{OP}: {num_heads} query heads do not share {num_kv_heads} KV heads")
    if is_kernel:
        return _MsaVarlen.apply(q_QHD, k_TKD, v_TKD, blocks_QKB, packing, scale, block_size)
    out_QHD = reference.msa_varlen(q_QHD, k_TKD, v_TKD, blocks_QKB, packing, scale, block_size)
    return out_QHD.to(q_QHD.dtype)


class _MsaVarlen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_QHD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        blocks_QKB: Tensor,
        packing: Packing,
        scale: float,
        block_size: int,
    ) -> Tensor:
        from inference.kernels.msa_varlen.forward import msa_varlen_forward

        out_QHD, lse_QH = msa_varlen_forward(
            q_QHD, k_TKD, v_TKD, blocks_QKB, packing, scale=scale, block_size=block_size
        )
        ctx.save_for_backward(q_QHD, k_TKD, v_TKD, out_QHD, lse_QH, blocks_QKB)
        ctx.packing, ctx.scale, ctx.block_size = packing, scale, block_size
        return out_QHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out_QHD: Tensor) -> tuple[Tensor | None, ...]:
        from inference.kernels.msa_varlen.backward import msa_varlen_backward

        q_QHD, k_TKD, v_TKD, out_QHD, lse_QH, blocks_QKB = ctx.saved_tensors
        gradients = msa_varlen_backward(
            q_QHD,
            k_TKD,
            v_TKD,
            out_QHD,
            lse_QH,
            grad_out_QHD,
            blocks_QKB,
            ctx.packing,
            scale=ctx.scale,
            block_size=ctx.block_size,
        )
        return *gradients, None, None, None, None
