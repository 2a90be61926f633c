"""Sparse GQA of decodes at M3's shapes (64 query heads, 4 KV heads), and MSA whole against FA3.

Peers: vLLM's Triton kernel for BF16, FlashInfer's Hopper kernel for FP8 KV, FA3 at 1M tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.kernels.decode_peers import (
    KV,
    PAGE,
    SCALE,
    TOPK,
    D,
    H,
    Peer,
    decode_batch,
    fa3,
    find_peer,
    measure_peer,
)
from benchmarks.kernels.harness import Bench, K, Pool, Timing, floor_us, relative_error, time_graph
from inference.kernels.decode_plan import DecodePlan, plan_units
from inference.kernels.msa_attention import msa_attention, reference
from inference.kernels.paging import LayerPages, PagedBatch

NUM_PAGES = 32768
"""Of the pool: 4.3 GB of keys in BF16, as many of values."""


@dataclass(slots=True)
class Inputs:
    """One call's arguments."""

    q_THD: Tensor
    blocks_TKB: Tensor
    batch: PagedBatch


def random_choice(num_tokens: int, num_blocks: int, generator: torch.Generator) -> Tensor:
    """[T, K, 16] ascending ids, the newest block among them, each (token, head) its own."""
    score = torch.rand(
        (num_tokens, KV, num_blocks), device="cuda", generator=generator, dtype=torch.float32
    )
    score[..., -1] = 2.0
    return score.topk(TOPK, dim=-1).indices.sort(dim=-1).values.int()


def make_inputs(pool: Pool, num_rows: int, context: int, query_len: int) -> list[Inputs]:
    """Enough calls on different pages that the data is cold in L2."""
    num_bytes = num_rows * query_len * KV * TOPK * PAGE * D * 4
    count = max(3, min(24, int(3e8 // num_bytes) + 1))
    return [
        Inputs(
            pool.normal(num_rows * query_len, H, D),
            random_choice(num_rows * query_len, context // PAGE, pool.generator),
            decode_batch(pool.tables(num_rows, context // PAGE), context, query_len),
        )
        for _ in range(count)
    ]


def run(bench: Bench) -> None:
    bench.case("msa b8@1M vs FA3", functools.partial(_whole_msa, bench))
    torch.cuda.empty_cache()
    pool = Pool(NUM_PAGES)
    shape = (NUM_PAGES, KV, PAGE, D)
    for dtype, suffix in ((torch.bfloat16, ""), (torch.float8_e4m3fn, " fp8")):
        pages = LayerPages(pool.normal(*shape, dtype=dtype), pool.normal(*shape, dtype=dtype), None)
        peer = find_peer(bench, _flashinfer if suffix else _vllm, pages)
        for rows in (1, 8, 32, 64):
            name = f"b{rows}@32K{suffix}"
            bench.case(name, functools.partial(_case, bench, name, pool, pages, peer, rows, 1))
        for rows in (8, 32, 64) if suffix else (8, 32):
            name = f"b{rows}@32K q4{suffix}"
            bench.case(name, functools.partial(_case, bench, name, pool, pages, peer, rows, 4))
        del pages, peer
        torch.cuda.empty_cache()


def _case(
    bench: Bench,
    name: str,
    pool: Pool,
    pages: LayerPages,
    peer: Peer | None,
    num_rows: int,
    query_len: int,
) -> None:
    inputs = make_inputs(pool, num_rows, 32 * K, query_len)
    found = msa_attention(
        inputs[0].q_THD, pages, inputs[0].blocks_TKB, inputs[0].batch, scale=SCALE
    )
    few = slice(0, 8)  # The reference of a few tokens is enough and fits in memory.
    rows = decode_batch(inputs[0].batch.page_table_RN[: -(-8 // query_len)], 32 * K, query_len)
    wide = inputs[0].q_THD[few].float()
    rows.positions_T = rows.positions_T[: wide.shape[0]]
    expected = _reference(wide, pages, inputs[0].blocks_TKB[few], rows)
    errors = {"vs reference": relative_error(found[few], expected)}
    timing = time_graph(
        [
            lambda x=x: msa_attention(x.q_THD, pages, x.blocks_TKB, x.batch, scale=SCALE)
            for x in inputs
        ]
    )
    peer_us, peer_errors = measure_peer(bench, name, peer, found, [(x,) for x in inputs])
    tokens = num_rows * query_len
    num_bytes = tokens * KV * TOPK * PAGE * D * 2 * pages.k_pages.element_size()
    bench.record(
        "sparse_decode",
        name,
        timing,
        correct=errors | peer_errors,
        tolerance={"vs reference": 6e-3, "vs peer": 5e-2},
        floor=floor_us(num_bytes + tokens * H * D * 4, 4.0 * tokens * H * TOPK * PAGE * D),
        peer=peer_us,
    )


def _reference(q_THD: Tensor, pages: LayerPages, blocks_TKB: Tensor, batch: PagedBatch) -> Tensor:
    """The reference in FP32; FP8 pages are widened first, for not all of torch indexes them."""
    if pages.k_pages.dtype == torch.float8_e4m3fn:
        ids_RN = batch.page_table_RN
        k, v = (
            part.view(torch.uint8)[ids_RN.flatten().long()].view(part.dtype).float()
            for part in (pages.k_pages, pages.v_pages)
        )
        pages = LayerPages(k, v, None)
        places_RN = torch.arange(ids_RN.numel(), dtype=torch.int32, device=ids_RN.device)
        batch = replace(batch, page_table_RN=places_RN.view(ids_RN.shape))
    return reference.msa_attention(q_THD, pages, blocks_TKB, batch, SCALE)


def _vllm(bench: Bench, pages: LayerPages) -> Peer | None:
    if "vllm" not in bench.peers:
        return None
    from vllm.models.minimax_m3.common.ops import sparse_attn

    # Its default layout: [page, token, head, K then V].
    kv = torch.empty((NUM_PAGES, PAGE, KV, 2 * D), dtype=torch.bfloat16, device="cuda")
    kv[..., :D] = pages.k_pages.transpose(1, 2)
    kv[..., D:] = pages.v_pages.transpose(1, 2)
    kv = kv.permute(0, 2, 1, 3)

    def make(x: Inputs) -> Callable[[], Tensor]:
        out, batch = torch.empty_like(x.q_THD), x.batch
        blocks_KTB = x.blocks_TKB.transpose(0, 1).contiguous()

        def call() -> Tensor:
            sparse_attn.minimax_m3_sparse_attn_decode(
                x.q_THD,
                kv,
                blocks_KTB,
                batch.page_table_RN,
                batch.seq_len_R,
                KV,
                SCALE,
                out,
                batch.decode_query_len,
            )
            return out

        return call

    return "vllm 0.26.0 + PR 49149", make


def _flashinfer(bench: Bench, pages: LayerPages) -> Peer | None:
    if "flashinfer" not in bench.peers:
        return None
    import flashinfer.msa_ops

    # Its layout: [page, head, token, K then V].
    kv = torch.cat([pages.k_pages.view(torch.uint8), pages.v_pages.view(torch.uint8)], dim=-1)
    kv = kv.view(torch.float8_e4m3fn)
    k, v = kv[..., :D], kv[..., D:]

    def make(x: Inputs) -> Callable[[], Tensor]:
        out, batch = torch.empty_like(x.q_THD), x.batch
        blocks_KTB = x.blocks_TKB.transpose(0, 1).contiguous()

        def call() -> Tensor:
            flashinfer.msa_ops.msa_sparse_decode_attention(
                x.q_THD,
                k,
                v,
                blocks_KTB,
                page_table=batch.page_table_RN,
                seqused_k=batch.seq_len_R,
                seqlen_q=batch.decode_query_len,
                softmax_scale=SCALE,
                out=out,
            )
            return out

        return call

    return "flashinfer 0.7.4", make


def _whole_msa(bench: Bench) -> None:
    """Index selection and sparse attention of 8 requests at 1M tokens, against dense FA3."""
    from inference.kernels.index_select import decode_kernel, index_select

    num_rows, context = 8, 1024 * K
    num_blocks = context // PAGE
    pool = Pool(num_rows * num_blocks)
    shape = (pool.num_pages, KV, PAGE, D)
    pages = LayerPages(pool.normal(*shape), pool.normal(*shape), None)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    units = plan_units(
        np.full(num_rows, num_blocks), None, None, decode_kernel.num_workers(num_sms)
    ).to("cuda")
    batch = decode_batch(
        pool.tables(num_rows, num_blocks), context, plan=DecodePlan(index=units, dense=units)
    )
    q_THD, index_q_TKD = pool.normal(num_rows, H, D), pool.normal(num_rows, KV, D)
    name = "msa b8@1M vs FA3"
    dense = find_peer(bench, fa3, pages)
    peer, _ = measure_peer(bench, name, dense, None, [(q_THD, batch)], reps=9)
    for dtype, suffix in ((torch.bfloat16, ""), (torch.float8_e4m3fn, " fp8 index")):
        index_pages = pool.normal(pool.num_pages, PAGE, D, dtype=dtype)

        def choose(index_pages: Tensor = index_pages) -> Tensor:
            return index_select(index_q_TKD, index_pages, batch, topk_blocks=TOPK, local_blocks=1)

        def attend(index_pages: Tensor = index_pages) -> Tensor:
            return msa_attention(q_THD, pages, choose(index_pages), batch, scale=SCALE)

        blocks_TKB = choose()
        expected = _reference(q_THD.float(), pages, blocks_TKB, batch)
        error = relative_error(attend(), expected)
        timing: Timing = time_graph([attend], inner=3)
        num_bytes = num_rows * (
            context * D * index_pages.element_size() + KV * TOPK * PAGE * D * 4 + H * D * 4
        )
        bench.record(
            "sparse_decode",
            name + suffix,
            timing,
            correct={"vs reference": error},
            tolerance={"vs reference": 6e-3},
            floor=floor_us(num_bytes),
            peer=peer,
        )
        del index_pages
