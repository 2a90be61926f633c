"""python -m benchmarks.parallel --folder FOLDER [--only exchange tokens agreement decode]

On two GPUs, one rank each; every part in processes of its own, ended when its time is over:
- exchange: dispatch and combine of tokens beside the raw all-to-all of the same bytes, and the
  all-reduce of a decode step beside NCCL's;
- tokens: engines over two ranks generate what one rank does, in FP32;
- agreement: their BF16 logprobs on the model in FOLDER (see `benchmarks.agreement`);
- decode: their throughput on the six-layer slice, in BF16 and with MXFP8 experts.

What is not timed runs side by side at first, a rehearsal of the decodes too, which compiles their
kernels; then the timed parts, one after the other.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.multiprocessing.spawn import ProcessContext, ProcessException

from benchmarks.kernels.harness import Bench, Timing, relative_error
from benchmarks.parallel_engine import EngineBench
from benchmarks.record import RESULTS
from inference.parallel.config import ParallelConfig
from inference.parallel.exchange import ExpertExchange
from inference.parallel.groups import ParallelGroups

NUM_RANKS = 2
PARTS = ("exchange", "tokens", "agreement", "decode")
QUANTIZATIONS = ("none", "mxfp8")
SIDE_BY_SIDE_S, ALONE_S = 110.0, 75.0
"""Limits of the untimed parts together and of each timed one; whoever hangs shows where."""
HIDDEN, NUM_EXPERTS, TOPK = 6144, 128, 4
TOKENS = (128, 1024, 8192)
"""Of each rank."""
MAX_GRAPH_TOKENS = 1024
"""Decode sizes are timed in a CUDA graph, as an engine runs them; larger ones without."""
SUM_TOKENS = (1, 64, 128)
"""Rows of a decode step's all-reduces."""
REPS, CALLS = 20, 8
TOLERANCE = {"sums": 2**-8}
"""Each rank's sum is rounded to BF16, and so is the result."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """One rank's tokens and where they go."""

    x_TC: Tensor
    ids_TA: Tensor
    weights_TA: Tensor

    @classmethod
    def random(cls, count: int, rank: int, device: torch.device) -> Tokens:
        generator = torch.Generator(device=device).manual_seed(1000 * rank + count)
        x = torch.randn(count, HIDDEN, generator=generator, device=device).bfloat16()
        order = torch.rand(count, NUM_EXPERTS, generator=generator, device=device).argsort(1)
        ids = order[:, :TOPK].int().contiguous()
        return cls(x, ids, torch.rand(ids.shape, generator=generator, device=device))


def round_trip(exchange: ExpertExchange, tokens: Tokens, y_TC: Tensor, rows: int | None) -> None:
    """Dispatch and combine alone: each rank sends back what it received."""
    flight = exchange.dispatch(tokens.x_TC, tokens.ids_TA, tokens.weights_TA, num_rows=rows)
    flight.combine(flight.received().x_RC.contiguous(), y_TC)


def error_of(exchange: ExpertExchange, tokens: Tokens, rows: int | None) -> float:
    """With experts that multiply by 1 + id / 64, so that every id and weight matters."""
    flight = exchange.dispatch(tokens.x_TC, tokens.ids_TA, tokens.weights_TA, num_rows=rows)
    arrived = flight.received()
    ids_RA = arrived.ids_RA + exchange.held.start
    factor_RA = arrived.weights_RA * (1 + ids_RA / 64) * (arrived.ids_RA >= 0)
    partial_RC = (arrived.x_RC.float() * factor_RA.sum(1, keepdim=True)).bfloat16()
    y_TC = torch.ones_like(tokens.x_TC)
    flight.combine(partial_RC, y_TC)
    factor_TA = tokens.weights_TA * (1 + tokens.ids_TA / 64)
    return relative_error(y_TC, tokens.x_TC.double() * factor_TA.double().sum(1, keepdim=True) + 1)


def raw_trip(rows: list[int], device: torch.device) -> Callable[[], None]:
    """Two all-to-alls of `rows[r]` tokens to and from each rank r, there and back."""
    source = torch.randn(sum(rows), HIDDEN, device=device).bfloat16()
    middle, back = torch.empty_like(source), torch.empty_like(source)

    def run() -> None:
        dist.all_to_all_single(middle, source, rows, rows)
        dist.all_to_all_single(back, middle, rows, rows)

    return run


def time_together(run: Callable[[], None], *, in_graph: bool) -> Timing:
    """One call's time on the slowest rank, of several in a row; all ranks begin together."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()

    def several() -> None:
        for _ in range(CALLS):
            run()

    call = several
    if in_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            several()
        call = graph.replay
    times = []
    for _ in range(REPS):
        dist.barrier()
        torch.cuda.synchronize()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # The first call absorbs how far apart the ranks left the barrier.
        call()
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / CALLS)
    slowest = torch.tensor(times, device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    cuts = statistics.quantiles(slowest.tolist(), n=10, method="inclusive")
    return Timing(statistics.median(slowest.tolist()), cuts[0], cuts[-1])


class ExchangeBench:
    """The cases of one rank; rank 0 writes the records."""

    def __init__(self, groups: ParallelGroups, bench: Bench) -> None:
        self._groups, self._bench = groups, bench
        self._exchange = ExpertExchange(groups, NUM_EXPERTS)
        self._device = torch.device("cuda", torch.cuda.current_device())

    def case(self, count: int) -> None:
        groups, world = self._groups, self._groups.config.world
        tokens = Tokens.random(count, groups.rank, self._device)
        counts = self._exchange.prefers_counted(count, TOPK, 2 * HIDDEN)
        form, rows = ("counted", None) if counts else ("fixed", count)
        error = torch.tensor(error_of(self._exchange, tokens, rows), device=self._device)
        dist.all_reduce(error, op=dist.ReduceOp.MAX)
        y_TC = torch.zeros_like(tokens.x_TC)
        in_graph = count <= MAX_GRAPH_TOKENS
        ours = time_together(
            lambda: round_trip(self._exchange, tokens, y_TC, rows), in_graph=in_graph
        )
        sent = [count] * world if rows is not None else self._mean_rows(tokens)
        raw = time_together(raw_trip(sent, self._device), in_graph=in_graph)
        # The same without what stays on the rank, which travels nowhere.
        sent[groups.rank] = 0
        raw_away = time_together(raw_trip(sent, self._device), in_graph=in_graph)
        if groups.rank:
            return
        num_bytes = 2 * sum(sent) * HIDDEN * 2
        self._bench.record(
            "parallel",
            f"dispatch+combine, {form}, ep {world}, {count} tokens a rank",
            ours,
            correct={"sums": float(error)},
            tolerance=TOLERANCE,
            peer=("raw all-to-all", min(raw.us, raw_away.us)),
            value={
                "sent_gb_s": num_bytes / ours.us / 1e3,
                "raw_us": raw.us,
                "raw_without_own_us": raw_away.us,
            },
        )

    def sums(self, groups: ParallelGroups, count: int) -> None:
        """The all-reduce of `count` rows, through what an engine's groups choose and by NCCL."""
        generator = torch.Generator(device=self._device).manual_seed(count)
        parts = torch.randn(NUM_RANKS, count, HIDDEN, generator=generator, device=self._device)
        x_TC, wanted_TC = parts[groups.rank].bfloat16(), parts.bfloat16().double().sum(0)
        groups.all_reduce(x_TC).wait()
        error = torch.tensor(relative_error(x_TC, wanted_TC), device=self._device)
        dist.all_reduce(error, op=dist.ReduceOp.MAX)
        x_TC.zero_()
        ours = time_together(lambda: groups.all_reduce(x_TC).wait(), in_graph=True)
        raw = time_together(lambda: dist.all_reduce(x_TC, group=groups.tp_group), in_graph=True)
        if not groups.rank:
            self._bench.record(
                "parallel",
                f"all-reduce, tp {NUM_RANKS}, {count} rows",
                ours,
                correct={"sums": float(error)},
                tolerance=TOLERANCE,
                peer=("nccl", raw.us),
            )

    def _mean_rows(self, tokens: Tokens) -> list[int]:
        """Tokens that go to each rank in the counted form, the mean over all pairs of ranks."""
        config = self._groups.config
        owner_TA = tokens.ids_TA // len(self._exchange.held)
        goes = [(owner_TA == r).any(1).sum() for r in range(config.world)]
        mean = torch.stack(goes).float().mean()
        dist.all_reduce(mean)
        return [round(float(mean) / config.world)] * config.world


@dataclass(frozen=True, slots=True)
class Job:
    """One part, and what it needs."""

    part: str
    seconds: float
    """Limit."""
    results: Path
    folder: Path | None = None
    quantizations: tuple[str, ...] = QUANTIZATIONS
    is_rehearsal: bool = False
    """Everything but the clock and the records."""

    @property
    def name(self) -> str:
        return f"rehearsal {' '.join(self.quantizations)}" if self.is_rehearsal else self.part


def run_rank(rank: int, port: int, job: Job) -> None:
    """One rank's part of `job`."""
    faulthandler.dump_traceback_later(max(1.0, job.seconds - 5))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", rank=rank, world_size=NUM_RANKS, device_id=device)
    bench = Bench(job.seconds, job.results)
    if job.part == "exchange":
        run_exchange(bench)
    else:
        engines = EngineBench(bench, job.results, job.name)
        if job.part == "tokens":
            engines.tokens()
        elif job.part == "agreement":
            assert job.folder is not None, "checked with the arguments"
            engines.agreement(job.folder)
        else:
            for quantization in job.quantizations:
                engines.decode(quantization, is_rehearsal=job.is_rehearsal)
        engines.close()
    if not rank and (summary := bench.summary()):
        print(summary, flush=True)
    dist.destroy_process_group()


def run_exchange(bench: Bench) -> None:
    groups = ParallelGroups.create(ParallelConfig(dp=NUM_RANKS), timeout_s=60)
    exchange = ExchangeBench(groups, bench)
    for count in TOKENS:
        exchange.case(count)
    sum_groups = ParallelGroups.create(ParallelConfig(tp=NUM_RANKS), timeout_s=60)
    if not groups.rank:
        print(f"{groups.describe()}; {sum_groups.describe()}", flush=True)
    for count in SUM_TOKENS:
        exchange.sums(sum_groups, count)
    sum_groups.close()
    groups.close()


def start(job: Job) -> ProcessContext:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # A rank that fails alone would leave the others in a collective: `join` ends them.
    context = mp.start_processes(
        run_rank, (port, job), nprocs=NUM_RANKS, join=False, start_method="spawn"
    )
    assert context is not None, "not joined"
    return context


def run_jobs(jobs: list[Job]) -> list[str]:
    """Run them side by side; what went wrong, a line each."""
    begin, failures = time.monotonic(), []
    for job, context in [(job, start(job)) for job in jobs]:
        try:
            while not context.join(timeout=0.5):
                if time.monotonic() - begin > job.seconds:
                    failures.append(f"{job.name}: stopped after {job.seconds:.0f} s")
                    for process in context.processes:
                        process.kill()
                    break
        except ProcessException as error:
            failures.append(f"{job.name}: {error}")
        print(f"{job.name}: over after {time.monotonic() - begin:.0f} s", flush=True)
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--folder", type=Path, help="a small model, for the agreement")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args: Any = parser.parse_args()
    if "agreement" in args.only and args.folder is None:
        parser.error("agreement needs --folder; or name the other parts with --only")
    if torch.cuda.device_count() < NUM_RANKS:
        parser.error(f"needs {NUM_RANKS} CUDA devices, there are {torch.cuda.device_count()}")
    together = [
        Job(part, SIDE_BY_SIDE_S, args.results, args.folder)
        for part in ("tokens", "agreement")
        if part in args.only
    ]
    if "decode" in args.only:
        together += [
            Job("decode", SIDE_BY_SIDE_S, args.results, None, (quantization,), is_rehearsal=True)
            for quantization in QUANTIZATIONS
        ]
    failures = run_jobs(together)
    for part in ("exchange", "decode"):
        if part in args.only:
            failures += run_jobs([Job(part, ALONE_S, args.results)])
    for failure in failures:
        print(f"FAILED {failure}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
