"""What the decode benches of sparse and dense attention have in common: batches, and peers.

A peer that cannot be had or fails is a failure of the bench, but costs no record of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.harness import Bench, relative_error, time_graph
from inference.kernels.decode_plan import DecodePlan
from inference.kernels.paging import LayerPages, PagedBatch

H, KV, D, PAGE, TOPK = 64, 4, 128, 128, 16
SCALE = D**-0.5

Peer = tuple[str, Callable[..., Callable[[], Tensor]]]
"""Name, and what makes a call of some arguments."""


def decode_batch(
    table_RN: Tensor, context: int, query_len: int = 1, plan: DecodePlan | None = None
) -> PagedBatch:
    """Decodes that all have `context` keys."""
    num_rows, device = table_RN.shape[0], table_RN.device
    first = context - query_len
    positions_Q = torch.arange(first, context, device=device)
    return PagedBatch(
        positions_T=positions_Q.repeat(num_rows),
        slots_T=torch.full((num_rows * query_len,), -1, dtype=torch.int64, device=device),
        query_start_R1=torch.arange(
            0, num_rows * query_len + 1, query_len, dtype=torch.int32, device=device
        ),
        seq_len_R=torch.full((num_rows,), context, dtype=torch.int32, device=device),
        page_table_RN=table_RN,
        page_size=PAGE,
        num_decodes=num_rows,
        max_query_len=query_len,
        max_seq_len=context,
        decode_query_len=query_len,
        plan=plan,
    )


def find_peer(
    bench: Bench, make: Callable[[Bench, LayerPages], Peer | None], pages: LayerPages
) -> Peer | None:
    """A peer that cannot be had is a failure of the bench, but costs no record of ours."""
    with bench.peer_part(make.__name__):
        return make(bench, pages)
    return None


def measure_peer(
    bench: Bench,
    case: str,
    peer: Peer | None,
    found: Tensor | None,
    arguments: Sequence[tuple[Any, ...]],
    reps: int = 15,
) -> tuple[tuple[str, float] | None, dict[str, float]]:
    """(name and time, error of `found` against it); as `find_peer` where the peer fails."""
    if peer is None:
        return None, {}
    with bench.peer_part(case):
        calls = [peer[1](*some) for some in arguments]
        errors = {} if found is None else {"vs peer": relative_error(found, calls[0]())}
        return (peer[0], time_graph(calls, reps=reps).us), errors
    return None, {}


def fa3(bench: Bench, pages: LayerPages) -> Peer | None:
    """FA3 as vLLM calls it in a decode graph, on a copy of `pages` in its layout."""
    if "vllm" not in bench.peers:
        return None
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    num_pages = pages.k_pages.shape[0]
    kv = torch.empty((num_pages, PAGE, KV, 2 * D), dtype=torch.bfloat16, device="cuda")
    kv[..., :D] = pages.k_pages.transpose(1, 2)
    kv[..., D:] = pages.v_pages.transpose(1, 2)
    k, v = kv[..., :D], kv[..., D:]

    def make(q_THD: Tensor, batch: PagedBatch) -> Callable[[], Tensor]:
        out, starts = torch.empty_like(q_THD), batch.query_start_R1
        metadata = get_scheduler_metadata(
            batch_size=batch.num_decodes,
            max_seqlen_q=batch.decode_query_len,
            max_seqlen_k=batch.max_seq_len,
            num_heads_q=H,
            num_heads_kv=KV,
            headdim=D,
            cache_seqlens=batch.seq_len_R,
            qkv_dtype=torch.bfloat16,
            cu_seqlens_q=starts,
            page_size=PAGE,
            causal=True,
            window_size=(-1, -1),
            num_splits=32,
        )

        def call() -> Tensor:
            return flash_attn_varlen_func(
                q=q_THD,
                k=k,
                v=v,
                out=out,
                cu_seqlens_q=starts,
                max_seqlen_q=batch.decode_query_len,
                seqused_k=batch.seq_len_R,
                max_seqlen_k=batch.max_seq_len,
                softmax_scale=SCALE,
                causal=True,
                block_table=batch.page_table_RN,
                scheduler_metadata=metadata,
                fa_version=3,
                num_splits=32,
            )

        return call

    return "vllm 0.26.0 FA3", make
