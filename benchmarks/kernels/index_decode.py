"""Index score + selection of decodes: one batch, ragged, with query length 4, in groups, in FP8.

Calls follow each other in one graph, and programs of each of ours start as those of the one before
it end: they fetch the first pages of their units while others still score and while that one
selects. In an engine step that happens while the queries are normed and rotated (1 to 2 us).
`alone_us` is the time behind a kernel that nothing overlaps.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.kernels.harness import Bench, K, Pool, Timing, floor_us, time_graph
from inference.kernels.decode_plan import DecodePlan, plan_units
from inference.kernels.index_select import index_select, reference
from inference.kernels.index_select.decode_kernel import num_shared_workers, num_workers
from inference.kernels.paging import PagedBatch

PAGE, DIM, HEADS, TOPK, LOCAL = 128, 128, 4, 16, 1
POOL_PAGES = 73_728
"""2.4 GB of BF16 keys: eight decodes at 1M, each with pages of its own."""
OWN_PAGES = 2
"""Pages that each completion of a group has for itself."""
VLLM = "vllm 0.26.0 + PR 49149"
FLASHINFER_CASES = ("b1@32K", "b8@128K", "b32@128K", "b1@1M")
FLASHINFER_NEEDS = {"b1@1M": "cutlass"}
"""Packages that FlashInfer loads for a case: at 1M its choice is made by another kernel."""


@dataclass(slots=True)
class Shape:
    """Decodes of one step: `groups` groups of `size` completions with prompts in common."""

    name: str
    rows: int
    context: int
    queries: int = 1
    size: int = 1
    fp8: bool = False
    ragged: bool = False

    @property
    def num_pages(self) -> int:
        """Pages that must be read at least once."""
        pages = self.context // PAGE
        if self.size == 1:
            return self.rows * pages
        return self.rows // self.size * (pages - OWN_PAGES) + self.rows * OWN_PAGES

    @property
    def floor(self) -> float:
        return floor_us(self.num_pages * PAGE * DIM * (1 if self.fp8 else 2))


def _shapes() -> list[Shape]:
    plain = [
        Shape(f"b{rows}@{_size(context)}", rows, context)
        for context, many in (
            (4 * K, (1, 8, 32, 64)),
            (32 * K, (1, 8, 32, 64)),
            (128 * K, (1, 8, 32)),
            (K * K, (1, 8)),
        )
        for rows in many
    ]
    queries = [Shape("b32@32K q4", 32, 32 * K, queries=4)]
    fp8 = [Shape(f"b32@{_size(c)} fp8", 32, c, fp8=True) for c in (32 * K, 128 * K)]
    groups = [
        Shape(f"{count}x16@{_size(context)} groups", 16 * count, context, size=16)
        for count, context in ((1, 32 * K), (8, 32 * K), (1, 128 * K), (4, 128 * K), (1, K * K))
    ]
    return [*plain, *queries, *fp8, *groups]


def _size(context: int) -> str:
    return f"{context // K}K" if context < K * K else "1M"


def make_batch(shape: Shape, pool: Pool) -> PagedBatch:
    """A step of decodes over pages drawn from the pool; groups share all but `OWN_PAGES`."""
    rows, pages, queries = shape.rows, shape.context // PAGE, shape.queries
    table_RN = pool.tables(rows, pages)
    lens_R = np.full(rows, shape.context)
    if shape.ragged:
        lens_R = np.linspace(queries, shape.context, rows).astype(np.int64)
    groups: tuple[np.ndarray | None, np.ndarray | None] = (None, None)
    if shape.size > 1:
        shared = pages - OWN_PAGES
        first_R = torch.arange(rows, device="cuda") // shape.size * shape.size
        table_RN[:, :shared] = table_RN[first_R, :shared]
        bounds = np.arange(0, rows + 1, shape.size)
        groups = (bounds, np.full(len(bounds) - 1, shared))
        # What each has for itself ends somewhere in its last page.
        lens_R = lens_R - np.arange(rows) % (PAGE - queries)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    units = plan_units(
        -(-lens_R // PAGE),
        *groups,
        num_workers(num_sms),
        num_shared_workers=num_shared_workers(num_sms),
    ).to("cuda")
    seq_len_R = torch.from_numpy(lens_R).int().cuda()
    position_RQ = seq_len_R.long()[:, None] - queries + torch.arange(queries, device="cuda")
    return PagedBatch(
        positions_T=position_RQ.flatten(),
        slots_T=torch.full((rows * queries,), -1, device="cuda"),
        query_start_R1=torch.arange(rows + 1, device="cuda", dtype=torch.int32) * queries,
        seq_len_R=seq_len_R,
        page_table_RN=table_RN,
        page_size=PAGE,
        num_decodes=rows,
        max_query_len=queries,
        max_seq_len=int(lens_R.max()),
        decode_query_len=queries,
        plan=DecodePlan(index=units, dense=units),
    )


def disagreement(
    index_q_TKD: Tensor, pages: Tensor, batch: PagedBatch, blocks_TKB: Tensor
) -> tuple[float, float]:
    """(rows that choose otherwise, largest relative gap of a chosen score), against FP32."""
    different, worst = 0.0, 0.0
    queries = batch.decode_query_len
    for row in range(batch.num_decodes):
        tokens = slice(row * queries, (row + 1) * queries)
        num_keys_Q = batch.positions_T[tokens] + 1
        count = int(batch.seq_len_R[row])
        ids_N = batch.page_table_RN[row, : -(-count // PAGE)].long()
        # [N, S, Q * K] in slices, so that FP32 keys of 1M fit easily
        best = []
        for first in range(0, len(ids_N), 2048):
            keys = pages[ids_N[first : first + 2048]].float().flatten(0, 1)
            scores_SQK = (keys @ index_q_TKD[tokens].float().flatten(0, 1).T).view(
                -1, queries, HEADS
            )
            key_S = first * PAGE + torch.arange(len(keys), device="cuda")
            is_visible = (key_S[:, None] < num_keys_Q)[..., None]
            scores_SQK = torch.where(is_visible, scores_SQK, -torch.inf)
            best.append(scores_SQK.view(-1, PAGE, queries, HEADS).amax(1))
        scores_QKN = torch.cat(best).permute(1, 2, 0).contiguous()
        num_blocks_Q1 = -(-num_keys_Q // PAGE)[:, None].expand(-1, HEADS)
        wanted = reference.choose_blocks(scores_QKN, num_blocks_Q1, TOPK, LOCAL)
        found = blocks_TKB[tokens]
        if bool(((found < 0) != (wanted < 0)).any()) or int(found.max()) >= len(ids_N):
            return float("nan"), float("nan")
        different += float((found != wanted).any(-1).sum())
        one, two = (
            scores_QKN.gather(-1, ids.clamp(min=0).long()).sort(-1).values
            for ids in (found, wanted)
        )
        worst = max(worst, float(((one - two).abs() / two.abs().clamp(min=1e-3)).max()))
        if not bool((found.diff(dim=-1)[found[..., 1:] >= 0] > 0).all()):
            return float("nan"), float("nan")
    return different, worst


def _ours(q: Tensor, pages: Tensor, batch: PagedBatch) -> Tensor:
    return index_select(q, pages, batch, topk_blocks=TOPK, local_blocks=LOCAL)


def _alone_us(sets: list[tuple[Tensor, PagedBatch]], pages: Tensor) -> float:
    """One call's time where the kernel before it ends before the call begins."""
    before = torch.empty(64, device="cuda")

    def behind(one: tuple[Tensor, PagedBatch]) -> Tensor:
        before.zero_()
        return _ours(*_args(one, pages))

    both = time_graph([partial(behind, one) for one in sets])
    return both.us - time_graph([before.zero_ for _ in sets]).us


def _vllm_call(shape: Shape, pages: Tensor) -> Callable[[Tensor, PagedBatch], Any]:
    ops = importlib.import_module("vllm.models.minimax_m3.common.ops.index_topk")
    tuned = ops._topk_index_partial_kernel
    while not hasattr(tuned, "cache"):
        tuned = tuned.fn
    tuned.cache.clear()  # let it tune itself anew at each context
    queries = shape.queries
    return lambda q, batch: ops.minimax_m3_index_decode(
        q,
        pages,
        batch.page_table_RN,
        batch.seq_len_R,
        shape.context,
        TOPK,
        0,
        LOCAL,
        HEADS,
        queries,
        queries,
    )


def _flashinfer_can_run(case: str) -> bool:
    """Whether it is asked and has what it needs; says what it lacks."""
    needs = FLASHINFER_NEEDS.get(case)
    if needs is not None and importlib.util.find_spec(needs) is None:
        print(f"{case}: no time of FlashInfer, which needs the package {needs} here", flush=True)
        return False
    return case in FLASHINFER_CASES


def _flashinfer_us(shape: Shape, pages: Tensor, sets: list[tuple[Tensor, PagedBatch]]) -> float:
    msa = importlib.import_module("flashinfer.msa_ops")
    num_blocks = shape.context // PAGE
    score_calls, topk_calls = [], []
    for q, batch in sets:
        scores = torch.empty(HEADS, num_blocks, len(q), dtype=torch.float32, device="cuda")
        visible = (batch.positions_T // PAGE + 1).int()
        chosen = torch.empty(len(q), HEADS, TOPK, dtype=torch.int32, device="cuda")

        def score(q: Tensor = q, batch: PagedBatch = batch, scores: Tensor = scores) -> Any:
            return msa.msa_proxy_score(
                q,
                pages[:, None],
                batch.query_start_R1,
                page_table=batch.page_table_RN,
                seqused_k=batch.seq_len_R,
                causal=True,
                max_seqlen_q=shape.queries,
                max_k_tiles=num_blocks,
                output=scores,
            )

        def topk(scores: Tensor = scores, visible: Tensor = visible, out: Tensor = chosen) -> Any:
            return msa.msa_topk_select(
                scores, TOPK, num_valid_pages=visible, output=out, force_end_blocks=LOCAL
            )

        score_calls.append(score)
        topk_calls.append(topk)
    return time_graph(score_calls).us + time_graph(topk_calls).us


def run(bench: Bench) -> None:
    pool = Pool(POOL_PAGES)
    pages_bf16 = pool.normal(POOL_PAGES, PAGE, DIM)
    pages_fp8 = pages_bf16.to(torch.float8_e4m3fn)
    checked = [
        Shape("b8@32K ragged", 8, 32 * K, ragged=True),
        Shape("b8@4K ragged q4", 8, 4 * K, queries=4, ragged=True),
    ]
    times: dict[str, float] = {}
    for shape in [*checked, *_shapes()]:
        pages = pages_fp8 if shape.fp8 else pages_bf16
        bench.case(
            shape.name, lambda shape=shape, pages=pages: _case(bench, shape, pages, pool, times)
        )


def _case(bench: Bench, shape: Shape, pages: Tensor, pool: Pool, times: dict[str, float]) -> None:
    num_bytes = shape.num_pages * PAGE * DIM * pages.element_size()
    sets = []
    for _ in range(max(3, min(24, int(3e8 // num_bytes) + 1))):
        batch = make_batch(shape, pool)
        q = pool.normal(shape.rows * shape.queries, HEADS, DIM)
        sets.append((q, batch))
    different, gap = disagreement(sets[0][0], pages, sets[0][1], _ours(*_args(sets[0], pages)))
    timing = time_graph([lambda s=s: _ours(*_args(s, pages)) for s in sets])
    times[shape.name] = timing.us
    value = {"rows_that_differ": different, "alone_us": _alone_us(sets, pages)}
    if shape.fp8:
        value["x_bf16"] = times.get(shape.name.removesuffix(" fp8"), float("nan")) / timing.us
    peer = None
    if not shape.fp8 and not shape.ragged:
        if "vllm" in bench.peers:
            with bench.peer_part(shape.name):
                call = _vllm_call(shape, pages)
                peer_timing: Timing = time_graph([lambda s=s: call(*s) for s in sets])
                peer = (VLLM, peer_timing.us)
        if "flashinfer" in bench.peers and _flashinfer_can_run(shape.name):
            with bench.peer_part(shape.name):
                value["flashinfer_us"] = _flashinfer_us(shape, pages, sets)
    bench.record(
        "index_decode",
        shape.name,
        timing,
        correct={"chosen_score": gap},
        tolerance={"chosen_score": 1e-3},
        floor=shape.floor if not shape.ragged else None,
        peer=peer,
        value=value,
    )


def _args(one: tuple[Tensor, PagedBatch], pages: Tensor) -> tuple[Tensor, Tensor, PagedBatch]:
    return one[0], pages, one[1]
