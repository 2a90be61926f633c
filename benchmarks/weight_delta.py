"""Bytes of delta syncs at an optimizer's steps: `python -m benchmarks.weight_sync --only delta`.

FP32 masters N(0, 0.02) under AdamW at lr 1e-6, in a small model of M3's proportions (97 % in
experts). A gradient is noise and a direction that stays, of 0.3 of its size: what Adam makes of it
is about 0.3 of the learning rate, once it runs. Its first step is the whole learning rate
everywhere, whatever the gradient; that share is recorded, and no limit put to it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.kernels.harness import Bench
from benchmarks.sync_sides import TrainerSide
from benchmarks.weight_sync import BIT_EQUAL, CALL_S, Pair, bench_config, timing
from m3rl.weight_sync.plan import make_plan

WARM_UP = 16
"""Steps before those that count."""
STEPS = 8
SIGNAL = 0.3
LR, BETAS, WEIGHT_DECAY = 1e-6, (0.9, 0.95), 0.1
LIMITS = {"none": 0.05, "mxfp8": 0.01}
"""Asked of a delta: at most this part of all bytes in the domain that the replica stores."""


def delta_config() -> dict[str, Any]:
    """A dense layer and one of 32 experts; router, attention and embeddings are a few percent."""
    raw = bench_config(is_small=True)
    raw["text_config"] |= {
        "num_local_experts": 32,
        "hidden_size": 128,
        "intermediate_size": 2048,
        "dense_intermediate_size": 256,
        "shared_intermediate_size": 256,
        "vocab_size": 512,
        "num_attention_heads": 4,
    }
    return raw


class MasterSide(TrainerSide):
    """A trainer rank whose weights are rounded from FP32 masters, in place, at every step."""

    def __init__(self, raw: dict[str, Any], device: str, rank: int = 0, world: int = 1) -> None:
        super().__init__(raw, device, rank, world)
        self._generator = torch.Generator(device=self.device).manual_seed(rank)
        trained = [name for name in self.weights if not name.endswith("correction_bias")]
        self._masters = {
            name: self._normal(self.weights[name].shape).mul_(0.02).requires_grad_()
            for name in trained
        }
        self._directions = {name: self._normal(self.weights[name].shape) for name in trained}
        self._optimizer = torch.optim.AdamW(
            self._masters.values(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY
        )
        self._round()

    def step(self) -> None:
        for name, master in self._masters.items():
            master.grad = SIGNAL * self._directions[name] + self._normal(master.shape)
        self._optimizer.step()
        self._round()

    @torch.no_grad()
    def _round(self) -> None:
        for name, master in self._masters.items():
            self.weights[name].copy_(master)

    def _normal(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator, device=self.device)


def measure(bench: Bench, quantization: str, devices: Sequence[str], backend: str) -> None:
    """Record the syncs of some steps.

    Raises:
        AssertionError: a replica's bits are not the trainer's, or a delta has more bytes than
            asked.
    """
    pair = Pair(bench, quantization, devices, backend, raw=delta_config(), trainer=MasterSide)
    try:
        num_syncs = WARM_UP + STEPS
        sync = pair.driver(verify=True, chunk_bytes=256 << 20, delta_full_every=num_syncs + 1)
        sync.sync(0)
        reports = []
        for version in range(1, num_syncs + 1):
            pair.step()
            reports.append(sync.sync(version))
            assert reports[-1].num_deltas == 1, "this sync was a full one"
        layouts = [rank.call("sync_layout").result(CALL_S) for rank in pair.ranks]
        held = pair.replica.call("receive", "layout").result(CALL_S)
        wire = "bf16" if quantization == "none" else "mxfp8"
        dense = make_plan(layouts, [held], 256 << 20, wire).nbytes
        shares = [report.num_bytes / dense for report in reports]
        counted = shares[WARM_UP:]
        bench.record(
            "weight_sync",
            f"{pair.label}, deltas, {dense / 1e6:.3g} MB, AdamW lr {LR:g}, {STEPS} steps",
            timing([1e6 * report.seconds for report in reports[WARM_UP:]]),
            correct={"tensors_differ": pair.num_differing(), "largest_share": max(counted)},
            tolerance=BIT_EQUAL | {"largest_share": LIMITS[quantization]},
            value={
                "median_share": statistics.median(counted),
                "largest_share": max(counted),
                "first_step_share": shares[0],
            },
        )
        sync.close()
    finally:
        pair.end()
