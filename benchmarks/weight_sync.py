"""python -m benchmarks.weight_sync [--cpu] [--backend nccl ipc] [--only PART ...] [--ray]

Trainer ranks (one, unless told) and a replica, each a process on a GPU of its own; 20 GB in M3's
shapes: embeddings, head, a dense layer and one with 128 experts.

- whole syncs, plain and quantised to MXFP8 on receive, with and without verification, beside the
  raw NCCL copy of the same bytes in a few large messages (for ipc also one process's copy between
  the two GPUs); with each, the driver's phases, and when both ends posted their first and last
  round and their devices were done;
- baselines, for one trainer rank: packed broadcast with unpack and load, in turn and overlapped;
  one call a tensor, over pipes and with --ray through Ray;
- receive: the receiving side alone, tensors on the GPU into the runtime's storage;
- wire: where the replica holds MXFP8, syncs that the trainer quantises;
- delta: bytes of what changes at an optimizer's steps (`weight_delta.py`);
- generation: what the requests of a replica feel of syncs (`sync_generation.py`).

With --cpu a small model over gloo.
"""

from __future__ import annotations

import argparse
import importlib.util
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.kernels.harness import Bench, Timing
from benchmarks.record import RESULTS
from benchmarks.remote import RemoteProcess
from benchmarks.slices import slice_config
from benchmarks.sync_handles import Trainers, Worker
from benchmarks.sync_sides import ReplicaSide, TrainerSide
from m3rl.weight_sync.sync import SyncReport, WeightSync

PARTS = ("baselines", "receive", "wire", "delta", "generation")
"""Beside the syncs; the last two alone do without them."""
PHASES_SHOWN = ("prepare", "stream", "verify", "commit")
CLOCKS_SHOWN = (
    "sender_first_post",
    "sender_last_post",
    "sender_done",
    "replica_first_post",
    "replica_last_post",
    "replica_done",
)
"""Of the first trainer rank and the replica, since their part of the stream began."""
CALL_S = 300.0
BIT_EQUAL = {"tensors_differ": 0.0}
"""Every tensor's hash, element by element, is compared: there is no tolerance."""


def bench_config(*, is_small: bool) -> dict[str, Any]:
    """A dense layer and one with MSA and experts, of M3's width or of a small one."""
    raw = slice_config(8 if is_small else 128)
    text = raw["text_config"]
    text |= {"num_hidden_layers": 2, "moe_layer_freq": [0, 1]}
    sparse = text["sparse_attention_config"]
    sparse |= {"sparse_disable_index_value": [0, 1], "sparse_attention_freq": [0, 1]}
    if is_small:
        text |= {
            "vocab_size": 1024,
            "hidden_size": 256,
            "intermediate_size": 128,
            "dense_intermediate_size": 512,
            "shared_intermediate_size": 128,
            "num_attention_heads": 8,
            "head_dim": 32,
            "rotary_dim": 16,
            "max_position_embeddings": 4096,
        }
        sparse |= {"sparse_index_dim": 32, "sparse_block_size": 16}
    return raw


def timing(times: Sequence[float]) -> Timing:
    """Of the median, with its tenths."""
    cuts = statistics.quantiles(times, n=10, method="inclusive")
    return Timing(statistics.median(times), cuts[0], cuts[-1])


@dataclass(slots=True)
class Timed:
    """Whole syncs as the driver sees them."""

    us: Timing
    reports: list[SyncReport]
    clocks: list[dict[str, float]]
    """Of both ends, seconds; see `sync_clock` and `clock`."""

    def clock_us(self, what: str) -> float:
        return 1e6 * statistics.median(clock[what] for clock in self.clocks)

    def phase_us(self, phase: Any) -> float:
        return 1e6 * statistics.median(r.phase_seconds.get(phase, 0.0) for r in self.reports)


class Pair:
    """Both sides of one configuration, and what is measured between them."""

    def __init__(
        self,
        bench: Bench,
        quantization: str,
        devices: Sequence[str],
        backend: str,
        *,
        reps: int = 20,
        is_small: bool = False,
        timeout_s: float = 60.0,
        raw: dict[str, Any] | None = None,
        trainer: type[TrainerSide] = TrainerSide,
        replica: Callable[..., Any] | None = None,
        process: Callable[..., Any] = RemoteProcess,
    ) -> None:
        """
        Args:
            devices: of each trainer rank, and of the replica.
            backend: of the syncs; baselines and raw copies use NCCL, or gloo where it cannot be.
            raw: configuration of the model; None: `bench_config`.
            trainer: what a rank is.
            replica: makes the replica; None: `ReplicaSide`.
            process: makes the process of a side.
        """
        self.bench, self.backend = bench, backend
        self.reps, self.timeout_s = reps, timeout_s
        self.num_ranks = len(devices) - 1
        self.quantization = quantization
        held = "as sent" if quantization == "none" else quantization
        self.label = f"{backend}, {self.num_ranks} to 1, held {held}"
        raw = bench_config(is_small=is_small) if raw is None else raw
        self.raw, self.devices = raw, devices
        self.ranks = [
            process(trainer, raw, devices[rank], rank, self.num_ranks)
            for rank in range(self.num_ranks)
        ]
        self.replica = process(replica or ReplicaSide, raw, devices[-1], quantization)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        is_nccl = backend != "gloo" and len(set(devices)) == len(devices)
        group = "nccl" if is_nccl else "gloo"
        where = len(devices), port
        joining = [side.call("join", group, i, *where) for i, side in enumerate(self.sides)]
        for call in joining:
            call.result(CALL_S)
        self.num_bytes = 0

    @property
    def sides(self) -> list[RemoteProcess]:
        return [*self.ranks, self.replica]

    def on_all(self, method: str, *args: Any) -> list[Any]:
        """A method of every side at once, the replica last."""
        calls = [side.call(method, *args) for side in self.sides]
        return [call.result(CALL_S) for call in calls]

    def end(self) -> None:
        for side in self.sides:
            side.end()

    def driver(self, *, verify: bool, chunk_bytes: int, **options: Any) -> WeightSync:
        options = {"pause": lambda replica: None, "resume": lambda replica: None} | options
        sync = WeightSync(
            Trainers(self.ranks),
            {0: Worker(self.replica)},
            host="127.0.0.1",
            timeout_s=self.timeout_s,
            min_replicas=1,
            verify=verify,
            chunk_bytes=chunk_bytes,
            backend=self.backend,
            **options,
        )
        sync.connect(0)
        return sync

    def step(self) -> None:
        for call in [rank.call("step") for rank in self.ranks]:
            call.result(CALL_S)

    def num_differing(self) -> float:
        """Tensors of which the replica holds other bits than the trainer, by another way than the
        sync's own."""
        quantized = self.replica.call("quantized").result(CALL_S)
        held = self.replica.call("hashes").result(CALL_S)
        parts = [rank.call("hashes", quantized).result(CALL_S) for rank in self.ranks]
        mask = (1 << 64) - 1
        return float(sum(held[name] != sum(p[name] for p in parts) & mask for name in held))

    def timed(self, sync: WeightSync) -> Timed:
        reports, clocks = [], []
        for version in range(2 + self.reps):
            self.step()
            reports.append(sync.sync(version))
            sent = self.ranks[0].call("sync_clock", 0).result(CALL_S)
            received = self.replica.call("receive", "clock").result(CALL_S)
            clocks.append(
                {f"sender_{what}": value for what, value in sent.items()}
                | {f"replica_{what}": value for what, value in received.items()}
            )
        return Timed(timing([1e6 * r.seconds for r in reports[2:]]), reports[2:], clocks[2:])

    def syncs(self, chunk_bytes: int) -> tuple[Timing, float]:
        """Record syncs with and without verification; returns the former, and the raw copy's
        microseconds."""
        self.on_all("mark_memory")
        sync = self.driver(verify=True, chunk_bytes=chunk_bytes)
        verified = self.timed(sync)
        differing, extra = self.num_differing(), self.on_all("extra_bytes")
        plan = sync.plan(0)
        assert plan is not None, "connected"
        self.num_bytes = plan.nbytes
        sync.close()
        floor = self.raw_copy()
        sync = self.driver(verify=False, chunk_bytes=chunk_bytes)
        unverified = self.timed(sync)
        sync.close()
        sent = [sum(op.nbytes for op in plan.sends(rank)) for rank in range(self.num_ranks)]
        values = {
            "tensors": plan.num_tensors,
            "copies": len(plan.ops),
            "busiest_share": max(sent) * len(sent) / sum(sent),
        }
        if self.backend == "ipc":
            asked = self.replica.call("peer_copy", self.devices[0], self.num_bytes, self.reps)
            values["peer_copy_us"] = statistics.median(asked.result(CALL_S))
        exposed = {
            "exposed_share": 1 - unverified.us.us / verified.us.us,
            "extra_gb_sender": extra[0] / 1e9,
            "extra_gb_replica": extra[-1] / 1e9,
        }
        self._record("verified", verified, differing, floor, values | exposed)
        self._record("not verified", unverified, self.num_differing(), floor, values)
        return verified.us, floor

    def _record(
        self, what: str, timed: Timed, differing: float, floor: float, values: dict[str, float]
    ) -> None:
        rates = {
            "gbytes_per_s": self.num_bytes / timed.us.us / 1e3,
            **{f"{phase}_us": timed.phase_us(phase) for phase in PHASES_SHOWN},
            **{f"{what}_us": timed.clock_us(what) for what in CLOCKS_SHOWN},
            "rounds": timed.clocks[0]["replica_rounds"],
            "messages": timed.clocks[0]["replica_messages"],
        }
        self.bench.record(
            "weight_sync",
            f"{self.label}, {self.num_bytes / 1e9:.3g} GB, {what}",
            timed.us,
            correct={"tensors_differ": differing},
            tolerance=BIT_EQUAL,
            floor=floor,
            value=rates | values,
        )

    def quantized_by_sender(self, chunk_bytes: int) -> None:
        """Record verified syncs of half the bytes, beside a raw copy of as many."""
        sync = self.driver(verify=True, chunk_bytes=chunk_bytes, wire="mxfp8")
        timed, plan = self.timed(sync), sync.plan(0)
        assert plan is not None, "connected"
        self.num_bytes = plan.nbytes
        values = {"tensors": plan.num_tensors, "copies": len(plan.ops)}
        differing = self.num_differing()
        sync.close()
        self._record("quantised by the sender", timed, differing, self.raw_copy(), values)

    def raw_copy(self) -> float:
        """The slowest side's median, of the same bytes."""
        times = self.on_all("raw_copy", self.num_bytes, self.reps)
        return max(statistics.median(each) for each in times)

    def baselines(self, ours: Timing, floor: float) -> None:
        """What others do, from the same weights into the same parameters, beside a verified sync.

        Raises:
            AssertionError: the replica did not get the trainer's bits.
        """
        for overlapped in (False, True):
            self.step()  # or the replica would hold the bits already
            times = self.on_all("packed_broadcast", self.reps, overlapped)
            name = f"packed broadcast {'overlapped' if overlapped else 'in turn'}"
            self.compare(name, timing(max(times, key=sum)), ours, floor)
        self.one_call_a_tensor("over pipes", ours, floor)

    def one_call_a_tensor(self, way: str, ours: Timing, floor: float) -> None:
        """Record the simplest baseline, whose calls go that way to both sides."""
        times = []
        self.step()
        for _ in range(3):
            self.replica.call("begin").result(CALL_S)
            begin = time.perf_counter()
            for number in range(self.num_tensors):
                self.on_all("broadcast_one", number)
            times.append((time.perf_counter() - begin) * 1e6)
            self.replica.call("commit").result(CALL_S)
        self.compare(f"one call a tensor {way}", timing(times), ours, floor)

    @property
    def num_tensors(self) -> int:
        return int(self.replica.call("num_tensors").result(CALL_S))

    def compare(self, peer: str, theirs: Timing, ours: Timing, floor: float) -> None:
        self.bench.record(
            "weight_sync",
            f"{self.label}, verified, beside {peer}",
            ours,
            correct={"tensors_differ": self.num_differing()},
            tolerance=BIT_EQUAL,
            floor=floor,
            peer=(peer, theirs.us),
        )

    def receive_alone(self) -> None:
        """The replica's work without a sender."""
        times = self.replica.call("receive_alone", self.reps).result(CALL_S)
        self.bench.record(
            "weight_sync",
            f"{self.label}, receiving side alone",
            timing(times["device"]),
            correct={"tensors_differ": times["differ"][0]},
            tolerance=BIT_EQUAL,
            floor=statistics.median(times["floor"]),
            peer=("a write a tensor", statistics.median(times["writes"])),
            value={"host_us_a_tensor": statistics.median(times["host"]) / self.num_tensors},
        )


def measure(bench: Bench, args: argparse.Namespace) -> None:
    count = args.trainer_ranks + 1
    devices = ["cpu"] * count if args.cpu else [f"cuda:{i}" for i in range(count)]
    chunk_bytes = args.chunk_mib << 20
    for backend in args.backend or (["gloo"] if args.cpu else ["nccl"]):
        for quantization in args.quantization:
            case = quantization, devices, backend
            if set(args.only) - {"delta", "generation"}:
                measure_pair(bench, args, *case)
            if "delta" in args.only:
                from benchmarks import weight_delta  # it is built on this module

                weight_delta.measure(bench, *case)
            if "generation" in args.only:
                from benchmarks import sync_generation  # likewise

                sync_generation.measure(bench, *case, chunk_bytes, is_small=args.cpu)


def measure_pair(
    bench: Bench,
    args: argparse.Namespace,
    quantization: str,
    devices: Sequence[str],
    backend: str,
) -> None:
    chunk_bytes, reps = args.chunk_mib << 20, 5 if args.cpu else 20
    pair = Pair(bench, quantization, devices, backend, reps=reps, is_small=args.cpu)
    # Baselines want whole tensors on one rank.
    has_baselines = "baselines" in args.only and pair.num_ranks == 1
    try:
        ours, floor = pair.syncs(chunk_bytes)
        if has_baselines:
            pair.baselines(ours, floor)
        if "receive" in args.only:
            pair.receive_alone()
        if "wire" in args.only and pair.quantization != "none":
            pair.quantized_by_sender(chunk_bytes)
    finally:
        pair.end()
    if has_baselines and args.ray:
        from benchmarks import sync_ray  # only here: it needs Ray

        sync_ray.measure(bench, quantization, devices, backend, ours, floor, is_small=args.cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="a small model over gloo")
    parser.add_argument("--backend", nargs="+", choices=("nccl", "ipc"))
    parser.add_argument("--ray", action="store_true", help="one call a tensor through Ray, too")
    parser.add_argument("--trainer-ranks", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quantization", nargs="+", default=["none", "mxfp8"])
    parser.add_argument("--chunk-mib", type=int, default=256, help="most of a round")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.cpu and args.backend:
        parser.error("--cpu goes over gloo; --backend is for GPUs")
    if args.ray and importlib.util.find_spec("ray") is None:
        parser.error("--ray measures calls through Ray, which is not installed")
    bench = Bench(args.seconds, args.results)
    measure(bench, args)
    print(bench.summary(), flush=True)


if __name__ == "__main__":
    main()
