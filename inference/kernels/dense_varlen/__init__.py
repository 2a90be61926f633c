"""Dense causal GQA over packed samples, with gradients: the layers without an indexer."""

import torch
from torch import Tensor

from inference.kernels.dense_varlen import reference
from inference.kernels.dispatch import expect_dtype, expect_shape, use_kernel
from inference.kernels.packing import Packing

OP = "dense_varlen"


def dense_varlen(
    q_QHD: Tensor, k_TKD: Tensor, v_TKD: Tensor, packing: Packing, *, scale: float
) -> Tensor:
    """Softmax attention of each query over its sample's keys up to its own position.

    Query head h reads KV head `h // (H / K)`. FP32 inside, one cast to the dtype of `q_QHD`. Once
    differentiable on CUDA. Gradients for q are added there in a free order, unless
    `torch.use_deterministic_algorithms` is set, with which the same inputs give the same bits.

    Args:
        q_QHD: [Q, H, D]; on CUDA float16 or bfloat16, D a multiple of 8 up to 128.
        k_TKD, v_TKD: [T, K, D] of all packed tokens, the queries' dtype.
        scale: factor on the query-key products.

    Returns:
        [Q, H, D].

    Raises:
        TypeError: another dtype on CUDA.
    """
    on_cuda = use_kernel(OP, q_QHD, k_TKD, v_TKD, packing.positions_T)
    _, num_heads, head_dim = q_QHD.shape
    num_kv_heads = k_TKD.shape[1]
    expect_shape(OP, "q_QHD", q_QHD, (packing.num_queries, num_heads, head_dim))
    for name, tensor in (("k_TKD", k_TKD), ("v_TKD", v_TKD)):
        expect_shape(OP, name, tensor, (packing.num_tokens, num_kv_heads, head_dim))
        expect_dtype(OP, name, tensor, q_QHD.dtype)
    if num_heads % num_kv_heads:
        raise ValueError(f"{OP}: {num_heads} query heads do not share {num_kv_heads} KV heads")
    if on_cuda:
        expect_dtype(OP, "q_QHD", q_QHD, torch.bfloat16, torch.float16)
        from inference.kernels.dense_varlen import kernel

        return kernel.dense_varlen(q_QHD, k_TKD, v_TKD, packing, scale)
    return reference.dense_varlen(q_QHD, k_TKD, v_TKD, packing, scale).to(q_QHD.dtype)
