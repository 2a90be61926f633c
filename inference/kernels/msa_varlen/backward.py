"""Gradients of sparse attention over packed samples, pass by pass.

A choice of a query gives a row of dQ, 16 times as much as dQ itself, so rows are kept for one pass:
a slab of queries and some KV heads. dK and dV are summed over passes in FP32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from inference.kernels.msa_attention.block_kernel import padded
from inference.kernels.msa_varlen.backward_kernel import (
    add_rows_kernel,
    add_units_kernel,
    list_stats_kernel,
    row_stats_kernel,
    unit_kernel,
)
from inference.kernels.msa_varlen.backward_lists_kernel import list_queries
from inference.kernels.packing import Packing

PASS_BYTES = 1 << 30
"""Rows of dQ of a pass."""


class BackwardLaunch(NamedTuple):
    """How the work is cut. What is summed in which order depends on `slab`, `unit`, `rows`."""

    slab: int
    """Queries of a pass."""
    heads: int
    """KV heads of a pass, a divisor of their number."""
    unit: int = 256
    """Most queries of a unit."""
    rows: int = 64
    """Rows (queries x query heads of a KV head) of a tile."""
    num_warps: int = 8
    num_stages: int = 3


def choose_launch(q_QHD: Tensor, blocks_QKB: Tensor) -> BackwardLaunch:
    num_queries, num_kv_heads, topk = blocks_QKB.shape
    _, num_heads, head_dim = q_QHD.shape
    row = padded(num_heads // num_kv_heads) * padded(head_dim, 16) * q_QHD.element_size()
    most = max(1, PASS_BYTES // (topk * row))
    slab = -(-num_queries // -(-num_queries // most))
    heads = max(n for n in range(1, num_kv_heads + 1) if num_kv_heads % n == 0 and n * slab <= most)
    # About a thousand units a pass, so that few multiprocessors wait for the last.
    unit = min(256, max(32, padded(slab * heads * topk // 1024)))
    if q_QHD.dtype == torch.float32:
        return BackwardLaunch(slab, heads, unit, rows=16, num_warps=16, num_stages=1)
    return BackwardLaunch(slab, heads, unit)


def msa_varlen_backward(
    q_QHD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    out_QHD: Tensor,
    lse_QH: Tensor,
    grad_out_QHD: Tensor,
    blocks_QKB: Tensor,
    packing: Packing,
    *,
    scale: float,
    block_size: int,
    launch: BackwardLaunch | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dQ [Q, H, D], dK [T, K, D], dV [T, K, D]) of `msa_varlen`, the same bits on every call.

    Products take operands of the inputs' dtype and are summed in FP32; a block's part of dQ is
    rounded to that dtype once, before the parts are added in FP32.

    Args:
        out_QHD, lse_QH: what the forward pass gave; `lse_QH` FP32, natural, -inf where a query sees
            nothing.
        blocks_QKB: blocks that the sample does not have, or that lie in the future, are ignored.
    """
    launch = launch or choose_launch(q_QHD, blocks_QKB)
    call = _Call(
        *(_with_side_by_side_heads(x) for x in (q_QHD, k_TKD, v_TKD, grad_out_QHD)),
        blocks_QKB=blocks_QKB,
        packing=packing,
        scale=scale,
        block_size=block_size,
        launch=launch,
    )
    call.read_rows(_with_side_by_side_heads(out_QHD), lse_QH.contiguous())
    for index in range(call.num_passes):
        call.take_units(index)
        call.add_units(index)
        call.add_rows(index)
    dk_TKD, dv_TKD = call.gradients_2TKD.to(k_TKD.dtype)
    return call.dq_QHD, dk_TKD, dv_TKD


def _with_side_by_side_heads(x_THD: Tensor) -> Tensor:
    return x_THD if x_THD.stride()[1:] == (x_THD.shape[2], 1) else x_THD.contiguous()


class _Call:
    """What the passes of one call share, and the scratch that each pass writes anew."""

    def __init__(
        self,
        q_QHD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        grad_QHD: Tensor,
        *,
        blocks_QKB: Tensor,
        packing: Packing,
        scale: float,
        block_size: int,
        launch: BackwardLaunch,
    ) -> None:
        num_queries, num_heads, head_dim = q_QHD.shape
        _, num_kv_heads, topk = blocks_QKB.shape
        group = num_heads // num_kv_heads
        self.operands = (q_QHD, k_TKD, v_TKD, grad_QHD)
        self.packing, self.scale, self.launch = packing, scale, launch
        self.block_size, self.num_kv_heads, self.topk = block_size, num_kv_heads, topk
        self.shape = {
            "G": group,
            "G_PAD": padded(group),
            "D": head_dim,
            "D_PAD": padded(head_dim, 16),
        }
        self.tile = max(1, launch.rows // padded(group))
        self.slab = min(launch.slab, num_queries)
        self.num_passes = -(-num_queries // self.slab) * num_kv_heads // launch.heads
        unit = -(-launch.unit // self.tile) * self.tile
        self.lists = list_queries(
            blocks_QKB, packing, block_size, slab=self.slab, tile=self.tile, unit=unit
        )
        self.num_lists = launch.heads * self.lists.num_pages
        num_rows = self._most_rows(launch.heads)
        num_choices = self.slab * launch.heads * topk
        num_units = num_choices // unit + min(self.num_lists, num_choices)

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=q_QHD.device)

        self.stats_2QH = empty(2, num_queries, num_heads)
        self.dq_QHD = empty(*q_QHD.shape, dtype=q_QHD.dtype)
        self.gradients_2TKD = empty(2, *k_TKD.shape).zero_()
        self.list_stats_2LG = empty(2, num_rows, padded(group))
        self.dkv_U2SD = empty(num_units, 2, block_size, head_dim)
        self.dq_LGD = empty(num_rows, padded(group), padded(head_dim, 16), dtype=q_QHD.dtype)

    def _most_rows(self, heads: int) -> int:
        """Rows of the lists of a slab and `heads` heads, at most."""
        num_choices = self.slab * heads * self.topk
        return num_choices + min(heads * self.lists.num_pages, num_choices) * (self.tile - 1)

    def _place(self, index: int) -> tuple[int, int]:
        """(first query, first KV head) of a pass."""
        i_slab, i_head = divmod(index * self.launch.heads, self.num_kv_heads)
        return i_slab * self.slab, i_head

    def read_rows(self, out_QHD: Tensor, lse_QH: Tensor) -> None:
        _, num_heads, head_dim = out_QHD.shape
        grad_QHD = self.operands[3]
        row_stats_kernel[(out_QHD.shape[0],)](
            out_QHD,
            grad_QHD,
            lse_QH,
            self.stats_2QH,
            out_QHD.stride(0),
            grad_QHD.stride(0),
            self.stats_2QH.stride(0),
            H=num_heads,
            H_PAD=padded(num_heads),
            D=head_dim,
            D_PAD=padded(head_dim),
        )

    def take_units(self, index: int) -> None:
        """Write the pass's rows of dQ, and dK and dV of its units."""
        q_QHD, k_TKD, v_TKD, grad_QHD = self.operands
        lists, first_list = self.lists, index * self.num_lists
        list_stats_kernel[(-(-self._most_rows(1) // 128), self.launch.heads)](
            self.stats_2QH,
            lists.tokens_L,
            lists.row_start_X1,
            self.list_stats_2LG,
            self.stats_2QH.stride(0),
            self.list_stats_2LG.stride(0),
            first_list,
            lists.num_pages,
            self._place(index)[1],
            H=q_QHD.shape[1],
            G=self.shape["G"],
            G_PAD=self.shape["G_PAD"],
            BLOCK=128,
        )
        unit_kernel[(self.dkv_U2SD.shape[0],)](
            q_QHD,
            k_TKD,
            v_TKD,
            grad_QHD,
            self.list_stats_2LG,
            lists.tokens_L,
            lists.units_U8,
            lists.row_start_X1,
            lists.unit_start_X1,
            self.dq_LGD,
            self.dkv_U2SD,
            self.scale,
            q_QHD.stride(0),
            grad_QHD.stride(0),
            k_TKD.stride(0),
            v_TKD.stride(0),
            self.list_stats_2LG.stride(0),
            first_list,
            self.num_lists,
            self.packing.first,
            **self.shape,
            PAGE=self.block_size,
            PAGE_PAD=padded(self.block_size, 16),
            TILE=self.tile,
            STAGES=self.launch.num_stages,
            num_warps=self.launch.num_warps,
        )

    def add_units(self, index: int) -> None:
        """Add the pass's units to dK and dV."""
        keys = min(16, padded(self.block_size))
        add_units_kernel[(self.num_lists, -(-self.block_size // keys), 2)](
            self.dkv_U2SD,
            self.lists.units_U8,
            self.lists.unit_start_X1,
            self.gradients_2TKD,
            index * self.num_lists,
            self.gradients_2TKD.stride(0),
            K=self.num_kv_heads,
            D=self.shape["D"],
            D_PAD=self.shape["D_PAD"],
            PAGE=self.block_size,
            ROWS=keys,
        )

    def add_rows(self, index: int) -> None:
        """Write dQ of the pass's queries and heads."""
        first_query, first_head = self._place(index)
        num_queries = min(self.slab, self.dq_QHD.shape[0] - first_query)
        add_rows_kernel[(num_queries, self.launch.heads)](
            self.dq_LGD,
            self.lists.row_QKB,
            self.lists.row_start_X1,
            self.dq_QHD,
            index * self.num_lists,
            first_query,
            first_head,
            **self.shape,
            K=self.num_kv_heads,
            B=self.topk,
            B_PAD=padded(self.topk),
            num_warps=8,
        )
