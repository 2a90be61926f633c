"""Sparse GQA of one chunk of 8,192 queries, 64 query and 4 KV heads, beside vLLM and FlashInfer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.kernels.harness import (
    Bench,
    K,
    Pool,
    Timing,
    floor_us,
    relative_error,
    time_eager,
)
from inference.kernels.msa_attention import msa_attention, reference
from inference.kernels.paging import LayerPages, PagedBatch

HEADS, KV_HEADS, HEAD_DIM, PAGE, TOPK = 64, 4, 128, 128, 16
QUERIES = 8 * K
SCALE = HEAD_DIM**-0.5
TOLERANCE = {"error": 1e-2}
NUM_PAGES = 16 * K
SAMPLED = 32
FA3_QUERIES = 2 * K
"""Dense queries that are measured at 1M; their time is scaled to a whole chunk."""


@dataclass(slots=True)
class Chunk:
    """The last `q_THD.shape[0]` tokens of a request of `context` tokens, and what they chose."""

    context: int
    q_THD: Tensor
    blocks_TKB: Tensor
    batch: PagedBatch

    def attend(self, pages: LayerPages) -> Tensor:
        return msa_attention(self.q_THD, pages, self.blocks_TKB, self.batch, scale=SCALE)

    def error(self, pages: LayerPages, out_THD: Tensor) -> float:
        """Relative error of some rows against the reference; NaN if any row has one."""
        if not bool(out_THD.isfinite().all()):
            return float("nan")
        num_tokens = self.q_THD.shape[0]
        rows = torch.linspace(0, num_tokens - 1, SAMPLED, device="cuda").long()
        batch = one_request(self.batch.page_table_RN, self.batch.positions_T[rows], self.context)
        wanted = reference.msa_attention(
            self.q_THD[rows].float(), pages, self.blocks_TKB[rows], batch, SCALE
        )
        return relative_error(out_THD[rows], wanted)

    def floor(self, bytes_per_key: int) -> float:
        """Every key and value once, queries and outputs once; the FLOP of what the chunk sees."""
        num_tokens = self.q_THD.shape[0]
        positions = range(self.context - num_tokens, self.context)
        seen = sum(min(TOPK * PAGE, position + 1) for position in positions)
        num_bytes = 2 * KV_HEADS * self.context * HEAD_DIM * bytes_per_key
        return floor_us(num_bytes + 4 * self.q_THD.numel(), 4.0 * HEADS * HEAD_DIM * seen)


def one_request(table_RN: Tensor, positions_T: Tensor, context: int) -> PagedBatch:
    num_tokens = len(positions_T)
    return PagedBatch(
        positions_T=positions_T,
        slots_T=torch.full((num_tokens,), -1, device="cuda"),
        query_start_R1=torch.tensor([0, num_tokens], device="cuda").int(),
        seq_len_R=torch.tensor([context], device="cuda").int(),
        page_table_RN=table_RN,
        page_size=PAGE,
        num_decodes=0,
        max_query_len=num_tokens,
        max_seq_len=context,
    )


def chosen_blocks(own_T: Tensor, history: int, group: int, generator: torch.Generator) -> Tensor:
    """[T, KV_HEADS, TOPK] int32 ascending: each query's own block and others at random.

    Others are drawn among the first `history` blocks and those before the own one; `group`
    neighbouring queries draw the same.
    """
    draws = own_T[::group]
    parts = []
    for first in range(0, len(draws), 1 << 11):
        last = draws[first : first + (1 << 11), None, None]
        width = min(history, int(last.max()))
        score = torch.rand((len(last), KV_HEADS, width), device="cuda", generator=generator)
        score = score.masked_fill(torch.arange(width, device="cuda") >= last, -1.0)
        value, block = score.topk(min(TOPK - 1, width), -1)
        block = block.masked_fill(value < 0, 1 << 30)
        missing = TOPK - 1 - block.shape[-1]
        parts.append(torch.nn.functional.pad(block, (0, missing), value=1 << 30))
    others = torch.cat(parts).repeat_interleave(group, 0)[: len(own_T)]
    own = own_T[:, None, None].expand(-1, KV_HEADS, 1)
    blocks = torch.cat([others, own], -1).sort(-1).values
    return blocks.masked_fill(blocks == 1 << 30, -1).int().contiguous()


def make_chunk(pool: Pool, context: int, group: int = 1, num_queries: int = QUERIES) -> Chunk:
    positions = torch.arange(context - num_queries, context, device="cuda")
    history = (context - num_queries) // PAGE or context // PAGE
    batch = one_request(pool.tables(1, context // PAGE), positions, context)
    return Chunk(
        context=context,
        q_THD=pool.normal(num_queries, HEADS, HEAD_DIM),
        blocks_TKB=chosen_blocks(positions // PAGE, history, group, pool.generator),
        batch=batch,
    )


def make_pages(pool: Pool, dtype: torch.dtype = torch.bfloat16) -> LayerPages:
    """Keys and values beside each other, as the peers hold them: [pages, heads, tokens, 2 * D]."""
    kv = pool.normal(pool.num_pages, KV_HEADS, PAGE, 2 * HEAD_DIM, dtype=dtype)
    k, v = (part.contiguous() for part in kv.split(HEAD_DIM, -1))
    return LayerPages(k, v, None)


def peer_pages(pages: LayerPages) -> Tensor:
    return torch.cat([pages.k_pages, pages.v_pages], -1)


def run(bench: Bench) -> None:
    _run_bf16(bench)
    torch.cuda.empty_cache()
    _run_fp8(bench)


def _run_bf16(bench: Bench) -> None:
    pool = Pool(NUM_PAGES)
    pages = make_pages(pool)
    kv = peer_pages(pages) if "vllm" in bench.peers else None
    for context, group in ((8, 1), (32, 1), (128, 1), (128, 64), (512, 1), (1024, 1)):
        name = f"8192@{_size(context)}" + (f" group{group}" if group > 1 else "")
        case = functools.partial(_sparse, bench, pool, pages, kv, context, group, name)
        bench.case(name, case)
    bench.case("msa vs FA3", functools.partial(_against_dense, bench, pool, pages))


def _run_fp8(bench: Bench) -> None:
    pool = Pool(2 * K)
    pages = make_pages(pool, torch.float8_e4m3fn)
    for group in (1, 64):
        name = "8192@128K fp8" + (f" group{group}" if group > 1 else "")
        bench.case(name, functools.partial(_sparse_fp8, bench, pool, pages, group, name))


def _size(context: int) -> str:
    return f"{context}K" if context < K else f"{context // K}M"


def _record(
    bench: Bench,
    name: str,
    chunk: Chunk,
    pages: LayerPages,
    peer: tuple[str, Callable[[], Tensor]] | None,
) -> None:
    correct = {"error": chunk.error(pages, chunk.attend(pages))}
    timing, measured = time_eager(lambda: chunk.attend(pages)), None
    if peer is not None:
        correct["peer's error"] = chunk.error(pages, peer[1]())
        measured = (peer[0], time_eager(peer[1]).us)
    bench.record(
        "sparse_prefill",
        name,
        timing,
        correct=correct,
        tolerance=TOLERANCE | {"peer's error": 0.1},
        floor=chunk.floor(pages.k_pages.element_size()),
        peer=measured,
    )


def _sparse(
    bench: Bench,
    pool: Pool,
    pages: LayerPages,
    kv: Tensor | None,
    context: int,
    group: int,
    name: str,
) -> None:
    chunk = make_chunk(pool, context * K, group)
    peer = None if kv is None else ("vLLM", vllm_call(chunk, kv))
    _record(bench, name, chunk, pages, peer)


def vllm_call(chunk: Chunk, kv: Tensor) -> Callable[[], Tensor]:
    from vllm.models.minimax_m3.common.ops import sparse_attn

    blocks_KTB = chunk.blocks_TKB.transpose(0, 1).contiguous()
    num_tokens, out = chunk.q_THD.shape[0], torch.empty_like(chunk.q_THD)
    start, seq_len = chunk.batch.query_start_R1, chunk.batch.seq_len_R
    table, prefix = chunk.batch.page_table_RN, seq_len - num_tokens

    def call() -> Tensor:
        sparse_attn.minimax_m3_sparse_attn(
            chunk.q_THD, kv, blocks_KTB, table, start, seq_len, prefix, num_tokens, KV_HEADS, SCALE,
            out,
        )  # fmt: skip
        return out

    return call


def _sparse_fp8(bench: Bench, pool: Pool, pages: LayerPages, group: int, name: str) -> None:
    chunk, peer = make_chunk(pool, 128 * K, group), None
    if "flashinfer" in bench.peers:
        from flashinfer import msa_ops

        kv = peer_pages(pages)
        k, v = kv[..., :HEAD_DIM], kv[..., HEAD_DIM:]
        blocks_KTB = chunk.blocks_TKB.transpose(0, 1).contiguous()
        out = torch.empty_like(chunk.q_THD)

        def call() -> Tensor:
            msa_ops.msa_sparse_attention(
                chunk.q_THD,
                k,
                v,
                blocks_KTB,
                chunk.batch.query_start_R1,
                causal=True,
                softmax_scale=SCALE,
                page_table=chunk.batch.page_table_RN,
                seqused_k=chunk.batch.seq_len_R,
                out=out,
            )
            return out

        peer = ("FlashInfer", call)
    _record(bench, name, chunk, pages, peer)


def _against_dense(bench: Bench, pool: Pool, pages: LayerPages) -> None:
    """Choosing and attending for a chunk at 1M, beside dense attention of the same chunk."""
    from inference.kernels.index_select import index_select

    chunk = make_chunk(pool, K * K)
    index_q = pool.normal(QUERIES, KV_HEADS, HEAD_DIM)
    index_pages = pool.normal(pool.num_pages, PAGE, HEAD_DIM)

    def msa() -> Tensor:
        chunk.blocks_TKB = index_select(
            index_q, index_pages, chunk.batch, topk_blocks=TOPK, local_blocks=1
        )
        return chunk.attend(pages)

    out = msa()
    error = chunk.error(pages, out)
    timing, dense = time_eager(msa, reps=5, warmup=1), _dense_us(bench, pool, pages)
    bench.record(
        "sparse_prefill",
        f"msa 8192@1M vs FA3 (dense of {FA3_QUERIES} queries x {QUERIES // FA3_QUERIES})",
        timing,
        correct={"error": error},
        tolerance=TOLERANCE,
        peer=None if dense is None else ("FA3", dense),
    )


def _dense_us(bench: Bench, pool: Pool, pages: LayerPages) -> float | None:
    if "vllm" not in bench.peers:
        return None
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    q, context = pool.normal(FA3_QUERIES, HEADS, HEAD_DIM), K * K
    batch = one_request(
        pool.tables(1, context // PAGE),
        torch.arange(context - FA3_QUERIES, context, device="cuda"),
        context,
    )

    def call() -> Tensor:
        return flash_attn_varlen_func(
            q=q,
            k=pages.k_pages.transpose(1, 2),
            v=pages.v_pages.transpose(1, 2),
            cu_seqlens_q=batch.query_start_R1,
            max_seqlen_q=FA3_QUERIES,
            seqused_k=batch.seq_len_R,
            max_seqlen_k=context,
            softmax_scale=SCALE,
            causal=True,
            block_table=batch.page_table_RN,
            fa_version=3,
        )

    timing: Timing = time_eager(call, reps=3, warmup=1)
    return timing.us * QUERIES / FA3_QUERIES
