"""One trainer rank: its part of a policy, the gradients of some rows, the same steps as all others.

Public methods are called on all ranks at the same time with the same arguments, and return the same
metrics on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from m3rl.block_drift import BlockDrift
from m3rl.checkpoint import CheckpointError, read_model_files
from m3rl.grpo.batch import plan_micro_batches, sharding_metrics, split_minibatches
from m3rl.grpo.loss import (
    LossInputs,
    LossOutput,
    LossTotals,
    StepCounts,
    cross_entropy,
    grpo_loss,
    over_steps,
)
from m3rl.grpo.micro import MicroBatch
from m3rl.grpo.replay import ChoiceStats
from m3rl.index_alignment import IndexLoss
from m3rl.observed import Observed
from m3rl.optimizer import Optimizer
from m3rl.parallel.save import shared_model_directory
from m3rl.policy import Policy
from m3rl.policy_any import policy_of
from m3rl.policy_packed import Forward, PackedPolicy
from m3rl.rank_group import RankGroup, deterministic
from m3rl.rank_settings import RankSettings
from m3rl.rank_state import load_rank_state, save_rank_state
from m3rl.types import TrainBatch

LossOf = Callable[[MicroBatch, Tensor, Tensor], LossOutput]
"""(micro-batch, logprobs and entropy of its trained tokens) -> its part of the step's loss."""


class TrainRank:
    """Trains a policy together with the other `world_size` - 1 ranks; owns its process.

    Args:
        init_method: where the ranks meet (`RankGroup`); unused by one rank.
    """

    def __init__(
        self, settings: RankSettings, rank: int, world_size: int, init_method: str | None = None
    ) -> None:
        self.settings = settings
        self.rank = rank
        self._group = RankGroup(
            rank,
            world_size,
            init_method,
            device=settings.device,
            num_threads=settings.num_threads,
            timeout_s=settings.collective_timeout_s,
            ep=settings.ep,
            cp=settings.cp,
        )
        self._num_shares = world_size // self._group.num_sharers
        # Ranks that share rows all have their log-probabilities and so their loss: one counts.
        self._speaks = rank % self._group.num_sharers == 0
        torch.manual_seed(settings.seed)

    @property
    def device(self) -> torch.device:
        return self._group.device

    @property
    def policy_version(self) -> int:
        """Optimizer steps taken since the initial weights."""
        return self._optimizer.num_steps

    def load_initial(self, path: str | Path) -> int:
        """Begin at version 0 with the published checkpoint at `path`; the KL's reference too."""
        return self._begin(Path(path), lambda policy: policy.load(path))

    def init_random(
        self, path: str | Path, std: float, embedding_std: float, bias_std: float
    ) -> int:
        """Begin at version 0 with random weights of the model whose config.json lies at `path`."""
        seed = self.settings.seed
        return self._begin(
            Path(path),
            lambda policy: policy.init_random(
                seed, std=std, embedding_std=embedding_std, bias_std=bias_std
            ),
        )

    def _begin(self, path: Path, fill: Callable[[PackedPolicy], None]) -> int:
        settings = self.settings
        self._model_path = path
        # Read now: if it is a checkpoint of this run, it will be deleted.
        self._model_files = read_model_files(path) if self.rank == 0 else {}
        self.policy = policy_of(settings, path, self._group.mesh)
        if self._group.mesh is None:  # else it is there already
            self.policy.to(self.device)
        fill(self.policy)
        self._optimizer = Optimizer(self.policy, settings.optimizer, self._group)
        self._drift = None
        if settings.index_drift_every > 0:
            assert isinstance(self.policy, Policy), "others have no index branch"
            self._drift = BlockDrift(
                settings.index_drift_every, self.policy, self._group, self._micro_batches
            )
        self._reference = self.policy.frozen_copy() if settings.loss.kl_coef > 0 else None
        return self.policy_version

    def update(self, batch: TrainBatch) -> dict[str, float]:
        """Take up to `updates_per_batch` optimizer steps on `batch` and describe them.

        `mismatch/*` and `m3/*` speak about the rows seen at the weights before the first step: all
        of them, but with several updates and behaviour log-probabilities those of the first step.
        A batch without a trained token changes nothing and counts in `optim/update_empty`. A step
        whose loss or gradient is not finite is skipped on all ranks, leaves the version as it is
        and counts in `optim/update_skipped`.
        """
        minibatches = [
            rows
            for rows in split_minibatches(len(batch.sample_ids), self.settings.updates_per_batch)
            if batch.loss_mask_BS[rows].any()
        ]
        before, version = self.policy.wire_state(), self.policy_version
        with deterministic():
            if self._drift is not None:
                self._drift.begin(batch)
            old_BS, seen = self._old_logprobs(batch, minibatches)
            steps = []
            for rows in minibatches:
                looks = seen is None
                seen = Observed.nothing(batch, rows, self.policy) if seen is None else seen
                loss_of = self._grpo_loss_of(batch, rows, old_BS)
                steps.append(self._step(batch, rows, loss_of, seen if looks else None))
            metrics = over_steps(steps)
            if seen is not None:
                metrics |= seen.metrics(batch, self.policy, self._group, self.settings)
            if self._drift is not None:
                metrics |= self._drift.metrics(version, self.policy_version)
        metrics |= sharding_metrics(
            minibatches, batch.length_B, self._num_shares, self.settings.micro_batch_tokens
        )
        metrics["optim/update_empty"] = float(not minibatches)
        metrics["optim/param_delta_frac"] = self.policy.changed_frac(before)
        metrics["policy/version"] = float(self.policy_version)
        return metrics

    def logprobs(self, batch: TrainBatch) -> np.ndarray:
        """[B, S] float32: log-probability of every trained token at the current weights, else 0."""
        return self._logprobs_of(self.policy, batch)

    def reference_logprobs(self, batch: TrainBatch) -> np.ndarray:
        """`logprobs` under the KL's reference policy."""
        assert self._reference is not None, "a KL coefficient above 0 keeps a reference"
        return self._logprobs_of(self._reference, batch)

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
        if num_tokens == 0:
            raise ValueError("the loss mask of a supervised step is empty")
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

        with deterministic():
            metrics = self._step(batch, np.arange(len(ids_BS)), loss_of, None)
        return metrics | {"sft/tokens": num_tokens, "policy/version": float(self.policy_version)}

    @torch.no_grad()
    def greedy_accuracy(
        self, ids_BS: np.ndarray, length_B: np.ndarray, mask_BS: np.ndarray
    ) -> float:
        """Share of rows whose masked tokens greedy decoding would produce, every one of them."""
        hits_BS = np.zeros(ids_BS.shape, np.float32)
        for micro in self._micro_batches(np.arange(len(ids_BS)), ids_BS, length_B, mask_BS):
            hits_M = self.policy.greedy_hits(micro.ids_T, micro.packing, micro.targets_M)
            if self._speaks:
                micro.put(hits_M.float(), hits_BS)
        is_hit_BS = self._group.sum_array(hits_BS) > 0
        return float((is_hit_BS | ~mask_BS).all(1).mean())

    def master_hash(self) -> str:
        """Hash of the FP32 masters and buffers, 16 hex digits."""
        return self.policy.master_hash()

    def save(self, path: str | Path) -> None:
        """Write this rank's part of a checkpoint into `path`, which becomes a model path too, or
        with LoRA a folder that peft reads.

        Raises:
            CheckpointError: a rank could not write its part, or rank 0 does not see it.
        """
        path = Path(path)
        self._write_model(path, None)
        if self._drift is not None:
            self._drift.save(path)
        save_rank_state(
            path,
            self._group.mesh,
            self._optimizer.tensors(),
            self.policy_version,
            ep=self.settings.ep,
        )

    def load(self, path: str | Path) -> int:
        """Go on from a checkpoint of `save`, after `load_initial`, bit for bit as if never stopped.

        Returns:
            The policy version.

        Raises:
            CheckpointError: the checkpoint is of another model or another number of ranks.
        """
        path = Path(path)
        if not self.policy.has_shape_of(path):
            raise CheckpointError(
                f"{path} is another model than {self._model_path} (their config.json differ); "
                "resume with the model that the run began with"
            )
        self.policy.load_trained(path)
        self._optimizer.num_steps = load_rank_state(
            path, self.rank, self._group.size, self._optimizer.allocate(), ep=self.settings.ep
        )
        if self._drift is not None:
            self._drift.load(path, self.policy_version)
        return self.policy_version

    def save_model(self, path: str | Path, dtype: str = "float32") -> None:
        """Write a directory that can be used as `model.path`, all or nothing, in place of an older.

        Args:
            dtype: 'float32' keeps the masters; 'bfloat16' rounds all but the router's tensors.
        """
        with shared_model_directory(Path(path), self._group.mesh) as folder:
            self._write_model(folder, dtype)

    def _write_model(self, path: Path, dtype: str | None) -> None:
        """All ranks write the weights, or with None what was trained; rank 0 what goes with
        them."""
        if dtype is None:
            self.policy.save_trained(path, self._model_path)
        else:
            self.policy.save(path, dtype)
        for name, content in self._model_files.items():  # of rank 0
            (path / name).write_bytes(content)

    def close(self) -> None:
        """Leave the process group."""
        self._group.close()

    def _old_logprobs(
        self, batch: TrainBatch, minibatches: list[np.ndarray]
    ) -> tuple[np.ndarray | None, Observed | None]:
        """π_old of the batch, and what was seen if that took forward passes of their own.

        None for π_old: the one step's own forward pass is at the old weights.
        """
        if self.settings.old_logprobs == "behaviour":
            return batch.behaviour_logprobs_BS, None
        if len(minibatches) <= 1:
            return None, None
        seen = self._look(self.policy, batch, minibatches)
        return self._group.sum_array(seen.logprobs_BS), seen

    def _grpo_loss_of(
        self, batch: TrainBatch, rows: np.ndarray, old_BS: np.ndarray | None
    ) -> LossOf:
        step = StepCounts.of(batch.loss_mask_BS[rows])

        def loss_of(micro: MicroBatch, logprobs_T: Tensor, entropy_T: Tensor) -> LossOutput:
            inputs = LossInputs(
                logprobs_T=logprobs_T,
                old_logprobs_T=logprobs_T.detach() if old_BS is None else micro.tokens(old_BS),
                behaviour_logprobs_T=micro.tokens(batch.behaviour_logprobs_BS),
                advantages_T=micro.per_token(batch.advantages_B),
                entropy_T=entropy_T,
                ref_logprobs_T=self._reference_logprobs(batch, micro),
                sequence_T=micro.per_token(np.arange(len(batch.sample_ids))),
                num_sequences=len(batch.sample_ids),
            )
            return grpo_loss(inputs, self.settings.loss.with_kl_coef(batch.kl_coef), step)

        return loss_of

    @torch.no_grad()
    def _reference_logprobs(self, batch: TrainBatch, micro: MicroBatch) -> Tensor | None:
        if self._reference is None or self.settings.loss.kl_in_reward:
            return None
        return self._forward(self._reference, batch, micro, None)[0]

    def _step(
        self, batch: TrainBatch, rows: np.ndarray, loss_of: LossOf, seen: Observed | None
    ) -> dict[str, float]:
        """One optimizer step on `rows` by all ranks; notes in `seen` what the forwards showed."""
        totals = LossTotals()
        for micro in self._share_of(batch, rows):
            stats = None if seen is None else seen.stats
            index_loss = self._index_loss(batch, rows, micro)
            logprobs_T, entropy_T = self._forward(self.policy, batch, micro, stats, index_loss)
            output = loss_of(micro, logprobs_T, entropy_T)
            self._group.accelerator.backward(output.loss * float(self._speaks))
            if index_loss is not None:  # each rank has it of its own tokens
                totals.add(LossTotals(sums=index_loss.metrics()))
            if not self._speaks:
                continue
            totals.add_output(output)
            if seen is not None:
                micro.put(logprobs_T, seen.logprobs_BS)
        totals = self._group.total(totals)
        return totals.metrics() | self._optimizer.step(totals.loss)

    def _logprobs_of(self, policy: Forward, batch: TrainBatch) -> np.ndarray:
        rows = np.arange(len(batch.sample_ids))
        with deterministic():
            return self._group.sum_array(self._look(policy, batch, [rows]).logprobs_BS)

    @torch.no_grad()
    def _look(self, policy: Forward, batch: TrainBatch, minibatches: list[np.ndarray]) -> Observed:
        """Forward passes alone, in the micro-batches that the steps will have."""
        seen = Observed.nothing(batch, np.concatenate(minibatches), self.policy)
        for rows in minibatches:
            for micro in self._share_of(batch, rows):
                logprobs_T, _ = self._forward(policy, batch, micro, seen.stats)
                if self._speaks:
                    micro.put(logprobs_T, seen.logprobs_BS)
        return seen

    def _index_loss(
        self, batch: TrainBatch, rows: np.ndarray, micro: MicroBatch
    ) -> IndexLoss | None:
        settings = self.settings.index_loss
        if settings.coef == 0:
            return None
        length_B = batch.length_B
        return IndexLoss(settings, float(length_B[rows].sum()), int(length_B[micro.rows].sum()))

    def _share_of(self, batch: TrainBatch, rows: np.ndarray) -> Iterator[MicroBatch]:
        return self._micro_batches(rows, batch.ids_BS, batch.length_B, batch.loss_mask_BS)

    def _micro_batches(
        self, rows: np.ndarray, ids_BS: np.ndarray, length_B: np.ndarray, mask_BS: np.ndarray
    ) -> Iterator[MicroBatch]:
        """This rank's share of `rows`: as many micro-batches as every other rank has."""
        plan = plan_micro_batches(
            rows, length_B, self._num_shares, self.settings.micro_batch_tokens
        )
        share, place = divmod(self.rank, self._group.num_sharers)
        sharing = {"place": place, "num_sharers": self._group.num_sharers}
        for mine in plan[share]:
            yield MicroBatch.of(mine, ids_BS, length_B, mask_BS, self.device, **sharing)

    def _forward(
        self,
        policy: Forward,
        batch: TrainBatch,
        micro: MicroBatch,
        stats: ChoiceStats | None,
        index_loss: IndexLoss | None = None,
    ) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = policy(
            micro.ids_T,
            micro.packing,
            micro.targets_M,
            temperature=batch.temperature,
            record=self.policy.record_of(batch, micro),
            stats=stats if len(micro.rows) else None,
            index_loss=index_loss,
            entropy_grad=self.settings.loss.entropy_coef > 0,
        )
        return result
