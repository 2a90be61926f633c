"""Dense GQA of decodes at M3's shapes, alone and in groups on a shared prompt. Peer: FA3."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from benchmarks.kernels.decode_peers import (
    KV,
    PAGE,
    SCALE,
    D,
    H,
    Peer,
    decode_batch,
    fa3,
    find_peer,
    measure_peer,
)
from benchmarks.kernels.harness import Bench, K, Pool, floor_us, relative_error, time_graph
from inference.kernels.decode_plan import DecodePlan, plan_units
from inference.kernels.paged_attention import paged_attention, reference
from inference.kernels.paged_attention.decode_kernel import num_shared_workers, num_workers
from inference.kernels.paging import LayerPages, PagedBatch

NUM_PAGES = 65536
"""Of the pool: 8.6 GB of keys, as many of values: 8 requests of 1M tokens."""
GROUP = 16
OWN_TOKENS = 128
"""Of each completion of a group; what comes before is shared."""


def run(bench: Bench) -> None:
    pool = Pool(NUM_PAGES)
    shape = (NUM_PAGES, KV, PAGE, D)
    pages = LayerPages(pool.normal(*shape), pool.normal(*shape), None)
    peer = find_peer(bench, fa3, pages)
    for rows, length, label in (
        (1, 4, "4K"),
        (1, 32, "32K"),
        (1, 128, "128K"),
        (8, 4, "4K"),
        (8, 32, "32K"),
        (32, 4, "4K"),
        (32, 32, "32K"),
        (8, 1024, "1M"),
    ):
        name = f"b{rows}@{label}"
        batches = functools.partial(_alone, pool, rows, length * K)
        bench.case(name, functools.partial(_case, bench, name, pool, pages, peer, batches))
    for groups, length, label in (
        (1, 32, "32K"),
        (8, 32, "32K"),
        (1, 128, "128K"),
        (4, 128, "128K"),
    ):
        name = f"{GROUP}x{groups}@{label} groups"
        batches = functools.partial(_grouped, pool, groups, length * K)
        bench.case(name, functools.partial(_case, bench, name, pool, pages, peer, batches))


def dense_plan(
    num_pages_R: np.ndarray, groups: tuple[np.ndarray, np.ndarray] | None = None
) -> DecodePlan:
    """The plan an engine makes; groups are (bounds, pages shared by each)."""
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    bounds, shared_pages = (None, None) if groups is None else groups
    units = plan_units(
        num_pages_R,
        bounds,
        shared_pages,
        num_workers(num_sms, KV),
        num_shared_workers=num_shared_workers(num_sms, KV),
    ).to("cuda")
    return DecodePlan(index=units, dense=units)


def _alone(pool: Pool, num_rows: int, context: int) -> list[tuple[PagedBatch, float]]:
    """(batch, bytes of keys and values) of enough calls that the data is cold in L2."""
    num_bytes = num_rows * context * KV * D * 4
    plan = dense_plan(np.full(num_rows, context // PAGE))
    return [
        (decode_batch(pool.tables(num_rows, context // PAGE), context, plan=plan), num_bytes)
        for _ in range(max(1, min(12, int(3e8 // num_bytes) + 1)))
    ]


def _grouped(pool: Pool, num_groups: int, context: int) -> list[tuple[PagedBatch, float]]:
    """Groups whose members share all but the newest `OWN_TOKENS` of `context`."""
    num_rows, num_pages = GROUP * num_groups, context // PAGE
    num_shared = (context - OWN_TOKENS) // PAGE
    plan = dense_plan(
        np.full(num_rows, num_pages),
        (np.arange(0, num_rows + 1, GROUP), np.full(num_groups, num_shared)),
    )
    num_bytes = (num_groups * num_shared + num_rows * (num_pages - num_shared)) * PAGE * KV * D * 4
    batches = []
    for _ in range(max(1, min(6, int(3e8 // num_bytes) + 1))):
        count = num_groups * num_shared + num_rows * (num_pages - num_shared)
        drawn = pool.tables(1, count)[0]
        shared_GN = drawn[: num_groups * num_shared].view(num_groups, num_shared)
        own_RN = drawn[num_groups * num_shared :].view(num_rows, -1)
        table_RN = torch.cat([shared_GN.repeat_interleave(GROUP, 0), own_RN], 1).contiguous()
        batches.append((decode_batch(table_RN, context, plan=plan), num_bytes))
    return batches


def _case(
    bench: Bench,
    name: str,
    pool: Pool,
    pages: LayerPages,
    peer: Peer | None,
    make_batches: Any,
) -> None:
    batches = make_batches()
    num_rows, context = batches[0][0].num_decodes, batches[0][0].max_seq_len
    queries = [pool.normal(num_rows, H, D) for _ in batches]
    calls = [
        lambda q=q, batch=batch: paged_attention(q, pages, batch, scale=SCALE)
        for q, (batch, _) in zip(queries, batches, strict=True)
    ]
    found = calls[0]()
    # A few rows are enough, in FP32.
    rows = [0, num_rows - 1]
    few = decode_batch(batches[0][0].page_table_RN[rows], context)
    expected = reference.paged_attention(queries[0][rows].float(), pages, few, SCALE)
    errors = {"vs reference": relative_error(found[rows], expected)}
    timing = time_graph(calls)
    arguments = [(q, batch) for q, (batch, _) in zip(queries, batches, strict=True)]
    peer_us, peer_errors = measure_peer(bench, name, peer, found, arguments, reps=9)
    flop = 4.0 * num_rows * H * context * D
    bench.record(
        "dense_group_decode",
        name,
        timing,
        correct=errors | peer_errors,
        tolerance={"vs reference": 6e-3, "vs peer": 1e-2},
        floor=floor_us(batches[0][1] + num_rows * H * D * 4, flop),
        peer=peer_us,
        value={"tflops": flop / timing.us / 1e6},
    )
