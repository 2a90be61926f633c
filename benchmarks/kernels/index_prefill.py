"""Index score + selection of one prefill chunk of 8,192 queries, contexts from 8K to 1M."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.kernels.harness import Bench, K, Pool, floor_us, time_eager
from inference.kernels.index_select import index_select, reference
from inference.kernels.paging import PagedBatch

PAGE, DIM, TOPK, LOCAL, QUERIES = 128, 128, 16, 1, 8192
POOL_PAGES = 16_384
SAMPLED = 64
"""Query tokens of each case whose choice is compared with FP32 scores."""
VLLM = "vllm 0.26.0 + PR 49149"


@dataclass(slots=True)
class Shape:
    """One chunk that ends its request: `queries` tokens, `context` keys."""

    name: str
    context: int
    heads: int = 4
    queries: int = QUERIES
    fp8: bool = False

    @property
    def floor(self) -> float:
        keys = self.context - self.queries / 2
        num_bytes = self.context * DIM * (1 if self.fp8 else 2)
        num_bytes += self.queries * self.heads * (DIM * 2 + TOPK * 4)
        return floor_us(num_bytes, 2.0 * self.heads * self.queries * keys * DIM)


SHAPES = (
    Shape("8192@8K", 8 * K),
    Shape("8192@32K", 32 * K),
    Shape("8192@128K", 128 * K),
    Shape("8192@512K", 512 * K),
    Shape("8192@1M", K * K),
    Shape("8192@128K 1 head", 128 * K, heads=1),
    Shape("8192@128K fp8", 128 * K, fp8=True),
)


def make_batch(table_RN: Tensor, queries: list[int], contexts: list[int]) -> PagedBatch:
    """A step of prefill chunks alone."""
    positions = [torch.arange(c - q, c) for q, c in zip(queries, contexts, strict=True)]
    return PagedBatch(
        positions_T=torch.cat(positions).cuda(),
        slots_T=torch.full((sum(queries),), -1, device="cuda"),
        query_start_R1=torch.tensor([0, *queries]).cumsum(0).int().cuda(),
        seq_len_R=torch.tensor(contexts).int().cuda(),
        page_table_RN=table_RN,
        page_size=PAGE,
        num_decodes=0,
        max_query_len=max(queries),
        max_seq_len=max(contexts),
        query_len_host_R=np.array(queries),
        seq_len_host_R=np.array(contexts),
    )


def disagreement(
    index_q_TKD: Tensor, pages: Tensor, batch: PagedBatch, blocks_TKB: Tensor
) -> tuple[float, float]:
    """(sampled rows that choose otherwise, largest relative gap of a chosen score), against FP32.

    Of a batch with one request; NaN where the choice is none (an invisible block, ids unordered).
    """
    generator = torch.Generator().manual_seed(1)
    token_Q = torch.randperm(len(index_q_TKD), generator=generator)[:SAMPLED]
    token_Q = torch.cat([token_Q, torch.tensor([0, len(index_q_TKD) - 1])]).cuda()
    num_keys_Q = batch.positions_T[token_Q] + 1
    ids_N = batch.page_table_RN[0].long()
    q_XD = index_q_TKD[token_Q].float().flatten(0, 1)
    best = []
    for first in range(0, len(ids_N), 1024):
        keys = pages[ids_N[first : first + 1024]].float().flatten(0, 1)
        scores_QKS = (q_XD @ keys.T).unflatten(0, (len(token_Q), -1))
        key_S = first * PAGE + torch.arange(len(keys), device="cuda")
        is_seen = key_S < num_keys_Q[:, None, None]
        best.append(scores_QKS.where(is_seen, -torch.inf).unflatten(-1, (-1, PAGE)).amax(-1))
    scores_QKN = torch.cat(best, -1)
    num_blocks_Q1 = -(-num_keys_Q // PAGE)[:, None].expand(scores_QKN.shape[:2])
    wanted = reference.choose_blocks(scores_QKN, num_blocks_Q1, TOPK, LOCAL)
    found = blocks_TKB[token_Q]
    is_sorted = (found.diff(dim=-1) > 0) | (found[..., 1:] < 0)
    if bool(((found < 0) != (wanted < 0)).any() | (found >= num_blocks_Q1[..., None]).any()):
        return float("nan"), float("nan")
    if not bool(is_sorted.all()):
        return float("nan"), float("nan")
    one, two = (
        scores_QKN.gather(-1, ids.clamp(min=0).long()).sort(-1).values for ids in (found, wanted)
    )
    gap = float(((one - two).abs() / two.abs().clamp(min=1e-3)).max())
    return float((found != wanted).any(-1).sum()), gap


def ours(q: Tensor, pages: Tensor, batch: PagedBatch) -> Tensor:
    return index_select(q, pages, batch, topk_blocks=TOPK, local_blocks=LOCAL)


def vllm_us(shape: Shape, q: Tensor, pages: Tensor, batch: PagedBatch) -> float:
    """Score and top-k apart, as the peer runs them; the score is one FP32 tensor."""
    ops = importlib.import_module("vllm.models.minimax_m3.common.ops.index_topk")
    tuned = ops._topk_index_kernel
    while not hasattr(tuned, "cache"):
        tuned = tuned.fn
    tuned.cache.clear()  # let it tune itself anew at each context
    before = batch.seq_len_R - shape.queries

    def score() -> Tensor:
        return ops.minimax_m3_index_score(
            q,
            pages,
            batch.page_table_RN,
            batch.query_start_R1,
            batch.seq_len_R,
            before,
            shape.queries,
            shape.context,
            shape.heads,
        )

    def topk(scores: Tensor) -> Tensor:
        return ops.minimax_m3_index_topk(
            scores, batch.query_start_R1, before, shape.queries, TOPK, 0, LOCAL
        )

    scores = score()
    return time_eager(lambda: topk(scores)).us + time_eager(score).us


def run(bench: Bench) -> None:
    pool = Pool(POOL_PAGES)
    pages_bf16 = pool.normal(POOL_PAGES, PAGE, DIM)
    pages_fp8 = pages_bf16.to(torch.float8_e4m3fn)
    for shape in SHAPES:
        pages = pages_fp8 if shape.fp8 else pages_bf16
        bench.case(shape.name, lambda shape=shape, pages=pages: _case(bench, shape, pages, pool))


def _case(bench: Bench, shape: Shape, pages: Tensor, pool: Pool) -> None:
    batch = make_batch(pool.tables(1, shape.context // PAGE), [shape.queries], [shape.context])
    q = pool.normal(shape.queries, shape.heads, DIM)
    different, gap = disagreement(q, pages, batch, ours(q, pages, batch))
    timing = time_eager(lambda: ours(q, pages, batch))
    peer = None
    if "vllm" in bench.peers and not shape.fp8:
        with bench.peer_part(shape.name):
            peer = (VLLM, vllm_us(shape, q, pages, batch))
    bench.record(
        "index_prefill",
        shape.name,
        timing,
        correct={"chosen_score": gap},
        tolerance={"chosen_score": 1e-3},
        floor=shape.floor,
        peer=peer,
        value={"rows_that_differ": different},
    )
