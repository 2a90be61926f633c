"""One trainer rank: holds a whole policy, computes gradients of its rows, steps like all the others.

accelerate owns the device and the default process group. Gradients are summed by one all-reduce a
parameter after the last micro-batch, not inside DDP's buckets: nothing has to be multiplied back, a
rank may have no rows, and the order of additions is the same in a resumed process (DDP regroups its
buckets after the first step). Public methods are called on all ranks with the same arguments and
return the same metrics on all of them.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor

from inference.config import ModelConfig
from inference.models.weights import write_checkpoint
from m3rl.checkpoint import CheckpointError, load_rank_state, save_rank_state
from m3rl.grpo.batch import micro_batches, shard_rows, sharding_metrics, split_minibatches
from m3rl.grpo.loss import LossInputs, LossOutput, LossSettings, cross_entropy, grpo_loss
from m3rl.grpo.micro import MicroBatch
from m3rl.grpo.mismatch import mismatch_metrics
from m3rl.grpo.replay import RecordedRouting, RoutingStats, recorded_routing
from m3rl.policy import DTYPES, Bounds, Policy
from m3rl.types import TensorSlot, TrainBatch

logger = logging.getLogger(__name__)

MAX_SHARD_BYTES = 5 << 30
_MODEL_FILES = (".json", ".jinja", ".txt", ".model")


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """AdamW with a linear warm-up."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    """Decoupled, on matrices only: norms keep theirs."""
    grad_clip: float | None
    """Largest L2 norm of the whole gradient; None: unbounded."""
    warmup_steps: int

    def lr_at(self, step: int) -> float:
        """Learning rate of optimizer step `step`, counted from 0."""
        return self.lr * min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else self.lr


@dataclass(frozen=True, slots=True)
class RankSettings:
    """What a trainer rank needs to know; the same on all ranks."""

    loss: LossSettings
    optimizer: OptimizerSettings
    dtype: str
    """'float32' | 'bfloat16': of the weights in the forward pass and on the wire."""
    attention: str
    replay_routing: bool
    micro_batch_tokens: int
    """Most tokens of one forward pass, padding included."""
    old_logprobs: Literal["behaviour", "recompute"]
    """π_old: the engine's log-probabilities, or the trainer's own before the first update."""
    updates_per_batch: int
    seed: int
    num_threads: int
    timeout_s: float = 600.0
    """How long a collective waits for the other ranks."""

    def __post_init__(self) -> None:
        if self.old_logprobs not in ("behaviour", "recompute"):
            raise ValueError(
                f"grpo.old_logprobs={self.old_logprobs!r}; use 'behaviour' or 'recompute'"
            )
        if self.updates_per_batch < 1:
            raise ValueError(f"grpo.updates_per_batch={self.updates_per_batch} must be at least 1")


@dataclass(slots=True)
class _Totals:
    """What micro-batches add up to."""

    loss: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def add(self, other: _Totals) -> None:
        self.loss += other.loss
        for name, value in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        for name, value in other.maxima.items():
            self.maxima[name] = max(self.maxima.get(name, value), value)

    def add_output(self, output: LossOutput) -> None:
        sums = {name: float(value) for name, value in output.sums.items()}
        maxima = {name: float(value) for name, value in output.maxima.items()}
        self.add(_Totals(float(output.loss.detach()), sums, maxima))


@dataclass(slots=True)
class _Observed:
    """What forward passes at the weights before the first step of an update showed."""

    logprobs_BS: np.ndarray
    stats: RoutingStats


LossOf = Callable[[MicroBatch, Tensor, Tensor], LossOutput]


class TrainRank:
    """Trains a policy together with the other `world_size` - 1 ranks; owns its process.

    Args:
        init_method: where the ranks meet, 'tcp://host:port' or 'file://path'; unused by one rank.
    """

    def __init__(
        self, settings: RankSettings, rank: int, world_size: int, init_method: str | None = None
    ) -> None:
        self.settings = settings
        self.rank = rank
        self.world_size = world_size
        self.accelerator = _join(settings, rank, world_size, init_method)
        torch.set_num_threads(settings.num_threads)
        torch.manual_seed(settings.seed)
        self.policy_version = 0
        """Optimizer steps taken since the initial weights."""

    def load_initial(self, path: str | Path) -> int:
        """Start at version 0 from the published checkpoint at `path`, the reference of the KL too."""
        return self._start(Path(path), lambda policy: policy.load(path))

    def init_random(self, path: str | Path) -> int:
        """Start at version 0 from random weights of the model whose config.json lies at `path`."""
        return self._start(Path(path), lambda policy: policy.init_random(self.settings.seed))

    def _start(self, path: Path, fill: Callable[[Policy], None]) -> int:
        settings, options = self.settings, self.settings.optimizer
        self._model_path = path
        self.policy = Policy(
            ModelConfig.from_pretrained(path),
            dtype=settings.dtype,
            attention=settings.attention,
            replay_routing=settings.replay_routing,
        ).to(self.accelerator.device)
        fill(self.policy)
        self._trained = {n: p for n, p in self.policy.named_parameters() if p.requires_grad}
        matrices = [p for p in self._trained.values() if p.ndim > 1]
        vectors = [p for p in self._trained.values() if p.ndim <= 1]
        self._optimizer = torch.optim.AdamW(
            [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
            lr=options.lr,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
        )
        self._reference = self.policy.frozen_copy() if settings.loss.kl_coef > 0 else None
        self.policy_version = 0
        return self.policy_version

    def update(self, batch: TrainBatch) -> dict[str, float]:
        """Take up to `updates_per_batch` optimizer steps on `batch` and describe them.

        `mismatch/*` and `m3/*` speak about the rows seen at the weights before the first step: all
        of them, but with several updates and behaviour log-probabilities those of the first step.
        A batch without a trained token changes nothing. A step whose loss or gradient is not finite
        is skipped on all ranks, leaves the version as it is and counts in `optim/update_skipped`.
        """
        minibatches = [
            rows
            for rows in split_minibatches(len(batch.sample_ids), self.settings.updates_per_batch)
            if batch.loss_mask_BS[rows].any()
        ]
        before = self.policy.wire_state()
        seen = self._nothing_observed(batch)
        with _deterministic():
            old_BS, seen_rows = self._old_logprobs(batch, minibatches, seen)
            steps = []
            for i, rows in enumerate(minibatches):
                is_first_look = i == 0 and not len(seen_rows)
                loss_of = self._grpo_loss_of(batch, rows, old_BS)
                steps.append(self._step(batch, rows, loss_of, seen if is_first_look else None))
                seen_rows = rows if is_first_look else seen_rows
            metrics = self._over_steps(steps) | self._observed_metrics(batch, seen, seen_rows)
        metrics |= sharding_metrics(
            minibatches, batch.length_B, self.world_size, self.settings.micro_batch_tokens
        )
        metrics["optim/param_delta_frac"] = self.policy.changed_share(before)
        metrics["policy/version"] = float(self.policy_version)
        return metrics

    def logprobs(self, batch: TrainBatch) -> np.ndarray:
        """[B, S] float32: log-probability of every trained token at the current weights, else 0."""
        seen = self._nothing_observed(batch)
        with _deterministic():
            self._observe(batch, np.arange(len(batch.sample_ids)), seen)
            return self._merged(seen.logprobs_BS)

    def sft_step(
        self, ids_BS: np.ndarray, length_B: np.ndarray, loss_mask_BS: np.ndarray
    ) -> dict[str, float]:
        """One optimizer step on the mean cross-entropy of the masked tokens (`sft/*`, `optim/*`).

        Args:
            ids_BS: int64, padded on the right with 0.
            length_B: int64.
            loss_mask_BS: bool, at the tokens to be learned; False at position 0.
        """
        num_tokens = float(loss_mask_BS.sum())
        batch = TrainBatch(
            sample_ids=[(row, 0) for row in range(len(ids_BS))],
            ids_BS=ids_BS,
            length_B=length_B,
            loss_mask_BS=loss_mask_BS,
            behaviour_logprobs_BS=np.zeros(ids_BS.shape, np.float32),
            advantages_B=np.zeros(len(ids_BS), np.float32),
            temperature=1.0,
            denominator=num_tokens,
        )

        def loss_of(_: MicroBatch, logprobs_T: Tensor, entropy_T: Tensor) -> LossOutput:
            loss = cross_entropy(logprobs_T, num_tokens)
            entropy = entropy_T.sum() / num_tokens
            return LossOutput(loss, {"sft/loss": loss.detach(), "sft/entropy": entropy}, {})

        with _deterministic():
            metrics = self._step(batch, np.arange(len(ids_BS)), loss_of, None)
        return metrics | {"sft/tokens": num_tokens, "policy/version": float(self.policy_version)}

    def weight_layout(self) -> list[TensorSlot]:
        """What this rank holds: every published tensor, whole."""
        return self.policy.layout()

    def wire_tensor(self, name: str, bounds: Bounds | None = None) -> Tensor:
        """A published tensor, or a rectangle of it, as it goes over the wire: a contiguous copy."""
        return self.policy.wire_tensor(name, bounds)

    def master_hash(self) -> str:
        """Hash of the FP32 masters and buffers, 16 hex digits."""
        return self.policy.master_hash()

    def save(self, path: str | Path) -> None:
        """Write this rank's part of a checkpoint into `path`; rank 0 writes the model too."""
        path = Path(path)
        if self.rank == 0:
            self.save_model(path / "model")
        tensors = self._optimizer_tensors() if self.policy_version else {}
        save_rank_state(path, self.rank, self.world_size, tensors, self.policy_version)

    def load(self, path: str | Path) -> int:
        """Go on from a checkpoint of `save`, after `load_initial`: bit for bit as if never stopped.

        Returns:
            The policy version.

        Raises:
            CheckpointError: the checkpoint is of another model or another number of ranks.
        """
        path = Path(path)
        config = ModelConfig.from_pretrained(path / "model")
        if config != self.policy.config:
            raise CheckpointError(
                f"{path / 'model'} is another model than {self._model_path}: their config.json "
                "differ; resume with the model the run began with"
            )
        self.policy.load(path / "model")
        for parameter in self._trained.values():
            self._optimizer.state[parameter] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        tensors = self._optimizer_tensors()
        self.policy_version = load_rank_state(path, self.rank, self.world_size, tensors)
        return self.policy_version

    def save_model(self, path: str | Path, dtype: str = "float32") -> None:
        """Write a directory that can be used as `model.path`: weights, config.json, tokenizer.

        Args:
            dtype: 'float32' keeps the masters; 'bfloat16' rounds all but the FP32 router tensors.
        """
        path = Path(path)
        tensors = self.policy.export_masters(DTYPES[dtype])
        write_checkpoint(path, tensors, max_shard_bytes=MAX_SHARD_BYTES)
        for file in sorted(self._model_path.iterdir()):
            if file.suffix in _MODEL_FILES and not file.name.endswith(".safetensors.index.json"):
                shutil.copyfile(file, path / file.name)

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        """AdamW's own tensors by parameter name; they share its memory."""
        return {
            f"{name}.{kind}": tensor
            for name, parameter in self._trained.items()
            for kind, tensor in self._optimizer.state[parameter].items()
        }

    def _old_logprobs(
        self, batch: TrainBatch, minibatches: list[np.ndarray], seen: _Observed
    ) -> tuple[np.ndarray | None, np.ndarray]:
        """π_old (None: the current forward pass is at the old weights), and the rows seen for it."""
        if self.settings.old_logprobs == "behaviour":
            return batch.behaviour_logprobs_BS, np.zeros(0, np.int64)
        if len(minibatches) <= 1:
            return None, np.zeros(0, np.int64)
        for rows in minibatches:
            self._observe(batch, rows, seen)
        return self._merged(seen.logprobs_BS), np.concatenate(minibatches)

    def _grpo_loss_of(
        self, batch: TrainBatch, rows: np.ndarray, old_BS: np.ndarray | None
    ) -> LossOf:
        denominator = float(batch.loss_mask_BS[rows].sum())

        def loss_of(micro: MicroBatch, logprobs_T: Tensor, entropy_T: Tensor) -> LossOutput:
            inputs = LossInputs(
                logprobs_T=logprobs_T,
                old_logprobs_T=logprobs_T.detach() if old_BS is None else micro.tokens(old_BS),
                behaviour_logprobs_T=micro.tokens(batch.behaviour_logprobs_BS),
                advantages_T=micro.per_token(batch.advantages_B),
                entropy_T=entropy_T,
                ref_logprobs_T=self._reference_logprobs(batch, micro),
            )
            return grpo_loss(inputs, self.settings.loss, denominator)

        return loss_of

    @torch.no_grad()
    def _reference_logprobs(self, batch: TrainBatch, micro: MicroBatch) -> Tensor | None:
        if self._reference is None:
            return None
        return self._forward(self._reference, batch, micro, None)[0]

    def _step(
        self, batch: TrainBatch, rows: np.ndarray, loss_of: LossOf, seen: _Observed | None
    ) -> dict[str, float]:
        """One optimizer step on `rows` of all ranks; notes in `seen` what the forward passes show."""
        totals = _Totals()
        for micro in self._micro_batches(batch, rows):
            stats = seen.stats if seen else None
            logprobs_T, entropy_T = self._forward(self.policy, batch, micro, stats)
            output = loss_of(micro, logprobs_T, entropy_T)
            self.accelerator.backward(output.loss)
            totals.add_output(output)
            if seen:
                micro.put(logprobs_T, seen.logprobs_BS)
        totals = self._over_ranks(totals)
        return totals.sums | totals.maxima | self._apply_gradients(totals.loss)

    @torch.no_grad()
    def _observe(self, batch: TrainBatch, rows: np.ndarray, seen: _Observed) -> None:
        for micro in self._micro_batches(batch, rows):
            logprobs_T, _ = self._forward(self.policy, batch, micro, seen.stats)
            micro.put(logprobs_T, seen.logprobs_BS)
