"""python -m benchmarks.train_step [--only CASE ...] [--cpu]

Whole optimizer steps of a slice of M3 on one GPU: one dense layer and three with MSA and experts,
whole width and vocabulary, samples packed, all computed again for the backward pass. The peer is
transformers' model of the same weights on right-padded rows. `--cpu` runs a small slice.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.kernels.harness import Bench, Timing
from benchmarks.record import RESULTS
from benchmarks.train_measure import (
    GB,
    TINY,
    free_memory,
    make_deterministic_products,
    published_config,
    wall_timing,
    watched_gradients,
)
from benchmarks.train_peer import TransformersTrainer, fill
from m3rl.grpo.loss import LossSettings
from m3rl.grpo.micro import MicroBatch
from m3rl.rank_settings import OptimizerSettings, RankSettings
from m3rl.train_rank import TrainRank

BENCH = "train_step"
PEER = "transformers-sdpa"
OPTIMIZER = OptimizerSettings(
    # Small enough that every case sees the same weights.
    lr=1e-9,
    betas=(0.9, 0.95),
    eps=1e-8,
    weight_decay=0.1,
    grad_clip=1.0,
    warmup_steps=0,
)
NO_LOSS = LossSettings(
    clip_low=0.2,
    clip_high=0.28,
    dual_clip=None,
    kl_coef=0.0,
    kl_estimator="k3",
    importance_cap=None,
)
"""Of policy gradients; supervised steps have none of it."""


@dataclass(frozen=True, slots=True)
class Samples:
    """A batch: token ids, of which all but each sample's first are trained on."""

    lengths: tuple[int, ...]
    ids_BS: np.ndarray
    mask_BS: np.ndarray

    @classmethod
    def of(cls, lengths: tuple[int, ...], vocab_size: int) -> Samples:
        column_S = np.arange(max(lengths))
        is_token_BS = column_S < np.array(lengths)[:, None]
        drawn_BS = np.random.default_rng(lengths).integers(3, vocab_size, is_token_BS.shape)
        return cls(lengths, drawn_BS * is_token_BS, is_token_BS & (column_S > 0))

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def padded_share(self) -> float:
        """Of right-padded rows."""
        return 1 - self.num_tokens / self.ids_BS.size


@dataclass(frozen=True, slots=True)
class Slice:
    """A model, how it is computed, and the batches that it is trained on."""

    raw: dict[str, Any]
    device: torch.device
    dtype: str
    padded: dict[str, tuple[int, ...]]
    """Lengths of the samples of cases that have a peer."""
    packed: dict[str, tuple[int, ...]]
    """And of those that have none."""

    @classmethod
    def m3(cls) -> Slice:
        # 5.3 billion weights: 85 GB of FP32 masters, gradients and AdamW's moments. The peer's
        # masks and logits take up to 50 more.
        raw = published_config(1, 3, num_local_experts=12)
        return cls(
            raw,
            torch.device("cuda"),
            "bfloat16",
            # Half of the padded rows is padding: lengths of sigma 0.8, as completions have.
            padded={"8K in 4 samples": (4096, 2304, 1216, 576), "8K in one sample": (8192,)},
            packed={
                "16K packed": (8192, 4096, 2048, 1024, 512, 512),
                "64K packed": (32768, 16384, 8192, 4096, 2048, 1024, 512, 512),
            },
        )

    @classmethod
    def tiny(cls) -> Slice:
        return cls(
            published_config(1, 3, **TINY),
            torch.device("cpu"),
            "float32",
            padded={"tiny in 3 samples": (21, 9, 5)},
            packed={"tiny packed": (30, 7, 1, 3)},
        )

    @property
    def vocab_size(self) -> int:
        return int(self.raw["text_config"]["vocab_size"])


WATCHED = ("q_proj.weight", "k_proj.weight", "o_proj.weight", "norm.weight", "gate.weight")
"""Ends of the names of weights whose gradients are compared."""


@dataclass(slots=True)
class Step:
    """What one trainer's steps on a batch showed."""

    logprobs_M: Tensor
    """Of the trained tokens, row by row, on the host like the gradients."""
    loss: float
    grad_norm: float
    grads: dict[str, Tensor]
    """Of the watched weights."""
    timing: Timing
    peak_bytes: int
    """All that was allocated, weights and moments included."""


def measure(trainer: Ours | TransformersTrainer, batch: Samples, reps: int = 3) -> Step:
    """Log-probabilities, one step to compile and to look at, then steps on the clock."""
    args = batch.ids_BS, np.array(batch.lengths), batch.mask_BS
    step, device = partial(trainer.step, *args), trainer.device
    logprobs_M = trainer.logprobs(*args)
    with watched_gradients(trainer.model, WATCHED) as grads:
        loss, norm = step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    timing = wall_timing(step, device, reps)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return Step(logprobs_M, loss, norm, grads, timing, peak)


class Ours:
    """A trainer rank of its own, of random weights drawn on its device."""

    def __init__(self, slice_: Slice, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(slice_.raw))
        most = max(sum(lengths) for lengths in (slice_.padded | slice_.packed).values())
        settings = RankSettings(
            loss=NO_LOSS,
            optimizer=OPTIMIZER,
            dtype=slice_.dtype,
            replay_routing=False,
            micro_batch_tokens=most,
            old_logprobs="behaviour",
            updates_per_batch=1,
            seed=0,
            num_threads=torch.get_num_threads(),
            device="cpu" if slice_.device.type == "cpu" else "cuda",
            activation_checkpointing=True,
        )
        self.rank = TrainRank(settings, rank=0, world_size=1)
        with torch.device(slice_.device):
            self.rank._begin(folder, lambda policy: fill(policy.model.state_dict()))

    @property
    def device(self) -> torch.device:
        return self.rank.device

    @property
    def model(self) -> nn.Module:
        model: nn.Module = self.rank.policy.model
        return model

    def step(
        self, ids_BS: np.ndarray, length_B: np.ndarray, mask_BS: np.ndarray
    ) -> tuple[float, float]:
        metrics = self.rank.sft_step(ids_BS, length_B, mask_BS)
        return metrics["sft/loss"], metrics["optim/grad_norm"]

    @torch.no_grad()
    def logprobs(
        self, ids_BS: np.ndarray, length_B: np.ndarray, mask_BS: np.ndarray, alone: bool = False
    ) -> Tensor:
        """[M] of the trained tokens; `alone`: every sample is a forward pass of its own."""
        rows = np.arange(len(length_B))
        found = []
        for some in np.split(rows, len(rows)) if alone else [rows]:
            micro = MicroBatch.of(some, ids_BS, length_B, mask_BS, self.device)
            if len(micro.targets_M):
                args = micro.ids_T, micro.packing, micro.targets_M
                found.append(self.rank.policy(*args, temperature=1.0)[0].cpu())
        return torch.cat(found)


def run(bench: Bench, slice_: Slice, only: list[str]) -> None:
    batches = {
        name: Samples.of(lengths, slice_.vocab_size)
        for name, lengths in (slice_.padded | slice_.packed).items()
        if not only or name in only
    }
    ours = our_steps(bench, slice_, batches)
    free_memory()
    peers = peers_steps(bench, slice_, {n: batches[n] for n in batches if n in slice_.padded})
    free_memory()
    for name, (step, alone_M) in ours.items():
        args = batches[name], step, alone_M, peers.get(name)
        bench.case(name, partial(_record, bench, name, *args))


def our_steps(
    bench: Bench, slice_: Slice, batches: dict[str, Samples]
) -> dict[str, tuple[Step, Tensor]]:
    """(steps, log-probabilities of every sample alone) of the batches that ran."""
    found: dict[str, tuple[Step, Tensor]] = {}

    def take(trainer: Ours, name: str, batch: Samples) -> None:
        args = batch.ids_BS, np.array(batch.lengths), batch.mask_BS
        alone_M = trainer.logprobs(*args, alone=True)
        found[name] = measure(trainer, batch), alone_M
        print(f"{name}, ours: {found[name][0].timing.us / 1e3:.1f} ms a step", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        trainer = Ours(slice_, Path(folder))
        for name, batch in batches.items():
            bench.case(f"{name}, ours", partial(take, trainer, name, batch))
        trainer.rank.close()
    return found


def peers_steps(bench: Bench, slice_: Slice, batches: dict[str, Samples]) -> dict[str, Step]:
    found: dict[str, Step] = {}
    if not batches:
        return found
    with bench.peer_part(PEER):
        trainer = TransformersTrainer(slice_.raw, slice_.dtype, slice_.device, OPTIMIZER)
        for name, batch in batches.items():
            found[name] = measure(trainer, batch)
            print(f"{name}, {PEER}: {found[name].timing.us / 1e3:.1f} ms a step", flush=True)
    return found


TOLERANCE = {
    "mean |delta logprob|, packed or alone": 0.1,
    "mean |delta logprob|, ours or the peer's": 0.1,
    "loss, ours or the peer's": 5e-3,
    "gradient norm, ours or the peer's": 5e-2,
    "gradients, ours or the peer's": 0.3,
}
"""The last three relative. Routers and indexers decide near ties otherwise where BF16 rounds
otherwise; with the wrong context a logprob is off by 2, and gradients by 1.4."""


def _record(
    bench: Bench, name: str, batch: Samples, ours: Step, alone_M: Tensor, peer: Step | None
) -> None:
    correct = {"mean |delta logprob|, packed or alone": _distance(ours.logprobs_M, alone_M)}
    seconds = ours.timing.us / 1e6
    value = {"tokens_per_s": batch.num_tokens / seconds, "peak_gb": ours.peak_bytes / GB}
    if peer is not None:
        correct |= {
            "mean |delta logprob|, ours or the peer's": _distance(ours.logprobs_M, peer.logprobs_M),
            "loss, ours or the peer's": abs(ours.loss - peer.loss) / peer.loss,
            "gradient norm, ours or the peer's": abs(ours.grad_norm / peer.grad_norm - 1),
            "gradients, ours or the peer's": _error(ours.grads, peer.grads),
        }
        value |= {
            "peer_tokens_per_s": 1e6 * batch.num_tokens / peer.timing.us,
            "peer_peak_gb": peer.peak_bytes / GB,
            "padded_share_of_peers_rows": batch.padded_share,
        }
    bench.record(
        BENCH,
        name,
        ours.timing,
        correct=correct,
        tolerance=TOLERANCE,
        peer=None if peer is None else (PEER, peer.timing.us),
        value=value | {"loss": ours.loss, "grad_norm": ours.grad_norm},
    )


def _distance(a_M: Tensor, b_M: Tensor) -> float:
    return float((a_M - b_M).abs().mean())


def _error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """‖found - wanted‖ / ‖wanted‖ over all of them."""
    assert found.keys() == wanted.keys() != set(), f"{found.keys()} against {wanted.keys()}"
    off = sum(float((found[name] - wanted[name]).double().square().sum()) for name in wanted)
    return math.sqrt(off / sum(float(g.double().square().sum()) for g in wanted.values()))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train_step", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], help="names of cases")
    parser.add_argument("--cpu", action="store_true", help="a small slice, for tests")
    parser.add_argument("--seconds", type=float, default=180.0, help="most of all cases")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    if not args.cpu and not torch.cuda.is_available():
        parser.error("training is timed on a CUDA device, and there is none")
    slice_ = Slice.tiny() if args.cpu else Slice.m3()
    if unknown := set(args.only) - set(slice_.padded | slice_.packed):
        parser.error(
            f"unknown cases {sorted(unknown)}; there are {[*slice_.padded, *slice_.packed]}"
        )
    make_deterministic_products()
    bench = Bench(args.seconds, args.results)
    run(bench, slice_, args.only)
    print(bench.summary(), flush=True)
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
