"""Dense attention of an 8,192-token chunk after a long context, beside FlashAttention 3."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from benchmarks.kernels.harness import Bench, K, Pool, floor_us, relative_error, time_eager
from inference.kernels.paged_attention.prefill_kernel import paged_attention_prefill
from inference.kernels.paging import LayerPages, PagedBatch

HEADS, KV_HEADS, HEAD_DIM, PAGE = 64, 4, 128, 128
CHUNK = 8192
CONTEXTS = (8 * K, 32 * K, 128 * K)
SCALE = HEAD_DIM**-0.5
TOLERANCE = {"error": 5e-3}
"""BF16 rounds the weights and the result, each by 2^-9 at most: 3e-3 together if they added up."""


def make_chunk(num_keys: int, chunk: int = CHUNK) -> tuple[Tensor, LayerPages, PagedBatch]:
    """The last `chunk` queries of one request of `num_keys` keys over shuffled pages."""
    num_pages = num_keys // PAGE
    pool = Pool(num_pages + 64)
    pages = LayerPages(
        pool.normal(pool.num_pages, KV_HEADS, PAGE, HEAD_DIM),
        pool.normal(pool.num_pages, KV_HEADS, PAGE, HEAD_DIM),
        None,
    )
    table = pool.tables(1, num_pages)
    positions = torch.arange(num_keys - chunk, num_keys, device="cuda")
    batch = PagedBatch(
        positions_T=positions,
        slots_T=table[0, positions // PAGE].long() * PAGE + positions % PAGE,
        query_start_R1=torch.tensor([0, chunk], device="cuda").int(),
        seq_len_R=torch.tensor([num_keys], device="cuda").int(),
        page_table_RN=table,
        page_size=PAGE,
        num_decodes=0,
        max_query_len=chunk,
        max_seq_len=num_keys,
        query_len_host_R=np.array([chunk]),
        seq_len_host_R=np.array([num_keys]),
    )
    return pool.normal(chunk, HEADS, HEAD_DIM), pages, batch


def sampled_error(out_THD: Tensor, q_THD: Tensor, pages: LayerPages, batch: PagedBatch) -> float:
    """Relative error on tokens spread over the chunk, against attention in FP32."""
    table = batch.page_table_RN[0].long()
    keys, values = (
        t[table].transpose(1, 2).flatten(0, 1).transpose(0, 1).float()
        for t in (pages.k_pages, pages.v_pages)
    )
    tokens = [0, 1, 63, 64, 127, 128, 1000, 4095, 5001, len(q_THD) - 128, len(q_THD) - 1]
    wanted = []
    for token in tokens:
        stop = int(batch.positions_T[token]) + 1
        q_KGD = q_THD[token].float().unflatten(0, (KV_HEADS, -1))
        logits_KGS = q_KGD @ keys[:, :stop].mT * SCALE
        wanted.append((logits_KGS.softmax(-1) @ values[:, :stop]).flatten(0, 1))
    return relative_error(out_THD[tokens], torch.stack(wanted))


def flop(num_keys: int, chunk: int = CHUNK) -> float:
    return 4.0 * chunk * HEADS * (num_keys - chunk / 2) * HEAD_DIM


def run(bench: Bench) -> None:
    for num_keys in CONTEXTS:
        name = f"{CHUNK}@{num_keys // K}K"
        bench.case(name, lambda n=num_keys, case=name: _case(bench, case, n))


def _case(bench: Bench, name: str, num_keys: int) -> None:
    q, pages, batch = make_chunk(num_keys)
    out = torch.full_like(q, math.nan)
    paged_attention_prefill(q, pages, batch, SCALE, out)
    error = sampled_error(out, q, pages, batch)
    timing = time_eager(lambda: paged_attention_prefill(q, pages, batch, SCALE, out))
    peer = None
    if "vllm" in bench.peers:
        with bench.peer_part(name):
            peer = ("FA3", time_eager(_flash_attention_3(q, num_keys)).us)
    bench.record(
        "dense_prefill",
        name,
        timing,
        correct={"error": error},
        tolerance=TOLERANCE,
        floor=floor_us(num_keys * KV_HEADS * HEAD_DIM * 4 + q.numel() * 4, flop(num_keys)),
        peer=peer,
        value={"tflops": flop(num_keys) / timing.us / 1e6},
    )


def _flash_attention_3(q: Tensor, num_keys: int) -> Callable[[], object]:
    """vLLM's build over its own page layout, tokens before heads."""
    from vllm.vllm_flash_attn import (
        flash_attn_varlen_func,
        get_scheduler_metadata,
    )

    pool = Pool(num_keys // PAGE + 64)
    k_pages, v_pages = pool.normal(pool.num_pages, PAGE, KV_HEADS, 2 * HEAD_DIM).split(128, -1)
    table, out = pool.tables(1, num_keys // PAGE), torch.empty_like(q)
    starts = torch.tensor([0, len(q)], device="cuda").int()
    seq_len = torch.tensor([num_keys], device="cuda").int()
    metadata = get_scheduler_metadata(
        batch_size=1,
        max_seqlen_q=len(q),
        max_seqlen_k=num_keys,
        num_heads_q=HEADS,
        num_heads_kv=KV_HEADS,
        headdim=HEAD_DIM,
        cache_seqlens=seq_len,
        qkv_dtype=torch.bfloat16,
        cu_seqlens_q=starts,
        page_size=PAGE,
        causal=True,
        window_size=(-1, -1),
        num_splits=0,
    )
    return lambda: flash_attn_varlen_func(
        q=q,
        k=k_pages,
        v=v_pages,
        out=out,
        cu_seqlens_q=starts,
        max_seqlen_q=len(q),
        seqused_k=seq_len,
        max_seqlen_k=num_keys,
        softmax_scale=SCALE,
        causal=True,
        block_table=table,
        scheduler_metadata=metadata,
        fa_version=3,
        num_splits=0,
    )
