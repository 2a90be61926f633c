"""The divergence on CUDA: a program a query and KV head, then key-major for the keys' gradient.

The choices of a block are listed (`msa_varlen.backward_lists_kernel`), and the first kernel leaves
each choice's weights where its list has them: the second reads them in one stretch. Two
gradients are sums over queries, in the order of the lists.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from inference.kernels.index_alignment.kernel import (
    add_units_kernel,
    divergence_kernel,
    key_gradient_kernel,
)
from inference.kernels.msa_attention.block_kernel import padded
from inference.kernels.msa_varlen.backward_lists_kernel import QueryLists, list_queries
from inference.kernels.msa_varlen.forward import msa_varlen_forward
from inference.kernels.packing import Packing

TILE, UNIT = 64, 512
"""Most choices of a product, and of a program, for the keys' gradient."""
ROWS = 16
"""Keys that a program adds the units of."""


class DivergenceLaunch(NamedTuple):
    num_warps: int = 4
    num_stages: int = 2


class Divergence(NamedTuple):
    kl_QK: Tensor
    """FP32, nats."""
    slope_QKD: Tensor
    """FP32: its derivative by the index query."""
    weight_LS: Tensor
    """[L, S]: its derivative by the scaled index logit of each key of a choice, by list row."""
    lists: QueryLists


def divergence(
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
    level: str,
    launch: DivergenceLaunch | None = None,
) -> Divergence:
    """`index_alignment` and what its gradient needs."""
    if launch is None:
        is_wide = q_QHD.dtype == torch.float32
        launch = DivergenceLaunch(num_warps=16, num_stages=1) if is_wide else DivergenceLaunch()
    index_q_QKD, index_k_TD = index_q_QKD.contiguous(), index_k_TD.contiguous()
    q_QHD, k_TKD, blocks_QKB = q_QHD.contiguous(), k_TKD.contiguous(), blocks_QKB.contiguous()
    num_queries, num_kv_heads, topk = blocks_QKB.shape
    (_, num_heads, head_dim), index_dim = q_QHD.shape, index_q_QKD.shape[-1]
    device, group = q_QHD.device, num_heads // num_kv_heads
    # Attention that nobody reads, of keys for values: its log-sum-exps cost least so.
    _, lse_QH = msa_varlen_forward(
        q_QHD, k_TKD, k_TKD, blocks_QKB, packing, scale=scale, block_size=block_size
    )
    lists = list_queries(blocks_QKB, packing, block_size, slab=num_queries, tile=TILE, unit=UNIT)
    weight_LS = torch.empty(
        (lists.tokens_L.shape[0], block_size), dtype=index_q_QKD.dtype, device=device
    )
    kl_QK = torch.empty((num_queries, num_kv_heads), dtype=torch.float32, device=device)
    slope_QKD = torch.empty(index_q_QKD.shape, dtype=torch.float32, device=device)
    divergence_kernel[(num_queries, num_kv_heads)](
        index_q_QKD,
        index_k_TD,
        q_QHD,
        k_TKD,
        lse_QH,
        blocks_QKB,
        lists.row_QKB,
        packing.positions_T,
        kl_QK,
        slope_QKD,
        weight_LS,
        scale,
        index_scale,
        packing.first,
        K=num_kv_heads,
        G=group,
        G_PAD=padded(group, 16),
        D=head_dim,
        D_PAD=padded(head_dim, 16),
        DI=index_dim,
        DI_PAD=padded(index_dim, 16),
        PAGE=block_size,
        PAGE_PAD=padded(block_size, 16),
        B=topk,
        B_PAD=padded(topk),
        BY_BLOCK=level == "block",
        STAGES=launch.num_stages,
        num_warps=launch.num_warps,
    )
    return Divergence(kl_QK, slope_QKD, weight_LS, lists)


def key_gradient(
    index_q_QKD: Tensor,
    grad_QK: Tensor,
    weight_LS: Tensor,
    tokens_L: Tensor,
    units_U8: Tensor,
    unit_start_X1: Tensor,
    packing: Packing,
    *,
    index_scale: float,
    block_size: int,
) -> Tensor:
    """[T, D], the dtype of `index_q_QKD`: gradient of the index keys for that of each divergence.

    Args:
        weight_LS, tokens_L, units_U8, unit_start_X1: of the `Divergence` and its lists.
    """
    _, num_kv_heads, index_dim = index_q_QKD.shape
    # Products take operands of the inputs' dtype.
    query_QKD = (index_q_QKD * (grad_QK[..., None] * index_scale)).to(index_q_QKD.dtype)
    query_QKD = query_QKD.contiguous()
    shape = {"K": num_kv_heads, "DI": index_dim, "DI_PAD": padded(index_dim, 16)}
    device, num_units = query_QKD.device, units_U8.shape[0]
    parts_USD = torch.empty((num_units, block_size, index_dim), dtype=torch.float32, device=device)
    key_gradient_kernel[(num_units,)](
        query_QKD,
        weight_LS,
        tokens_L,
        units_U8,
        unit_start_X1,
        parts_USD,
        unit_start_X1.shape[0] - 1,
        **shape,
        PAGE=block_size,
        PAGE_PAD=padded(block_size, 16),
        TILE=TILE,
        num_warps=16 if query_QKD.dtype == torch.float32 else 4,
    )
    grad_k_TD = torch.empty((packing.num_tokens, index_dim), dtype=index_q_QKD.dtype, device=device)
    pages_N2 = packing.pages(block_size).tokens_P2
    rows = min(ROWS, padded(block_size))
    add_units_kernel[(pages_N2.shape[0], -(-block_size // rows))](
        parts_USD,
        unit_start_X1,
        pages_N2,
        grad_k_TD,
        pages_N2.shape[0],
        **shape,
        PAGE=block_size,
        ROWS=rows,
    )
    return grad_k_TD
