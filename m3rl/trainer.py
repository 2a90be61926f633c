"""THE LOOP: the one file that composes rollout, grpo and weight_sync.

    restore ─▶ sync(v) ─▶ ┌ prompts ─▶ groups ─▶ batch ─▶ update: v+1 ─▶ sync(v+1) ┐
                          └◀ metrics line ◀ checkpoint ◀ rollouts file ◀ evaluation ┘

A step is done when its line stands in metrics.jsonl. The checkpoint of a step is written just
before that line and carries it, so a kill at any moment costs the work since the last checkpoint
and nothing else. Weights reach the replicas before the first rollout of every process, resumed or
not: an engine without a verified version serves nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from contextlib import ExitStack
from typing import Any

from m3rl import assemble, checkpoint
from m3rl.assemble_sync import weight_sync
from m3rl.completion_metrics import completion_metrics, throughput
from m3rl.config import Config, ConfigError
from m3rl.data import PromptStream, load_data
from m3rl.errors import M3rlError
from m3rl.launch import TrainerRanks
from m3rl.metrics import MetricsWriter, Progress
from m3rl.report import accuracy_table, choose_samples, sample_table
from m3rl.rollout.chat import ChatFormat
from m3rl.rollout.heal import GivenUpError, Healer
from m3rl.rollout.placement import node_address, ray_cluster
from m3rl.rollout.records import write_completions
from m3rl.run_dir import RunDirectory, check_same_model
from m3rl.stopwatch import Stopwatch
from m3rl.training_batch import BatchMaker
from m3rl.types import Group
from m3rl.weight_sync.errors import SyncError
from m3rl.weight_sync.report import is_trainers_fault

logger = logging.getLogger(__name__)


class TrainingError(M3rlError):
    """The run cannot go on; the message says what to look at."""


def train(config: Config) -> int:
    """Train from the beginning or from the newest checkpoint in run.dir, to train.steps.

    Raises:
        ConfigError: what cannot be trained, or resumed, and how to mend it.
    """
    assemble.check_trainable(config)
    with ExitStack() as stack:
        run = stack.enter_context(RunDirectory(config, "train"))
        Trainer(config, run, stack).run()
    return 0


class Trainer:
    """One process's part of a training run, from restoring to the final table."""

    def __init__(self, config: Config, run: RunDirectory, stack: ExitStack) -> None:
        self._config = config
        self._run = run
        self._model_path = str(config.find(config.model.path))
        found = checkpoint.find_latest(run.path)
        if found is not None and config.checkpoint.resume == "never":
            raise ConfigError(
                f"run.dir={run.path} holds a checkpoint of step {found.step} and "
                "checkpoint.resume is 'never'; set checkpoint.resume=auto to go on from it, or "
                "choose another run.dir"
            )
        if found is not None:
            check_same_model(found.path, self._model_path)
        self._found = found
        chat = ChatFormat.load(self._model_path)
        self._think_end_id = chat.think_end_id
        data = load_data(config, chat)
        self._eval_set = data.eval.environment if data.eval is not None else ""
        self._data_counts = data.counts
        self._stream = PromptStream(data.train, seed=config.run.seed, shuffle=config.data.shuffle)
        self._start_processes(chat, data, stack)
        self._sampling = assemble.rollout_sampling(config)
        self._batches = BatchMaker(
            config, lambda batch: self._ranks.all("reference_logprobs", batch)[0]
        )
        self._step = self._version = self._skipped = 0
        self._earlier_s = 0.0
        self._began = time.monotonic()

    def _start_processes(self, chat: ChatFormat, data: Any, stack: ExitStack) -> None:
        config = self._config
        stack.enter_context(ray_cluster(config.train.num_ranks + assemble.num_workers(config)))
        self._rollouts = assemble.RolloutSide(config, chat, data)
        stack.callback(self._rollouts.close)
        self._ranks = TrainerRanks(
            assemble.rank_settings(config),
            config.train.num_ranks,
            num_threads=config.train.num_threads,
            num_replicas=config.rollout.backend.num_replicas,
        )
        stack.callback(self._ranks.close)
        self._rollouts.wait_started()
        self._backend = self._rollouts.backend
        self._heal = Healer(
            self._backend,
            bring=self._bring,
            forget=self._forget,
            max_restarts=config.rollout.backend.max_restarts,
            lose=self._lose,
            poisoned=lambda: self._sync.poisoned(),
        )
        self._collector = self._rollouts.collector(
            self._heal, serving=lambda: self._sync.require_ready(self._version)
        )
        self._sync = weight_sync(
            config, self._ranks, self._backend, data.train, host=node_address()
        )

    def run(self) -> None:
        """Restore, train to the last step, evaluate, report."""
        resume_line = self._restore()
        writer = MetricsWriter(
            self._run.path,
            self._config.to_dict(),
            self._config.logging.wandb,
            resume_step=self._step,
            resume_line=resume_line,
        )
        progress = Progress(self._config.train.steps, self._step)
        exit_code = 1
        try:
            if resume_line is not None:  # a run that was stopped stays so
                self._check_health(resume_line)
            self._ranks.make_senders()
            self._connect()
            self._sync_weights()
            if self._config.eval.at_start and self._step == 0:
                writer.log_apart(0, self._evaluate(0))
            while self._step < self._config.train.steps:
                self._train_step(writer, progress)
            self._finish(writer)
            exit_code = 0
        finally:
            progress.close()
            writer.finish(exit_code)

    def _connect(self) -> None:
        """Join every replica; one that is lost by then is restarted or dropped."""
        for replica in range(self._backend.num_replicas):
            try:
                if replica in self._backend.alive:  # not dropped while another one was healed
                    self._sync.connect(replica)
            except M3rlError as error:
                logger.error("replica %d could not be joined: %s", replica, error)
                self._heal(replica)

    def _restore(self) -> dict[str, Any] | None:
        """Bring ranks and stream to the checkpoint, or to the initial weights; the checkpoint's
        metrics line."""
        self._run.cut_evaluations(0 if self._found is None else self._found.step)
        if self._found is None:
            self._ranks.all("load_initial", self._model_path)
            self._initial_hash = self._ranks.all("master_hash")[0]
            logger.info("starting from %s; run directory %s", self._model_path, self._run.path)
            return None
        state = self._found.state
        self._initial_hash = state["initial_hash"]
        self._load_reference()
        self._ranks.all("load", str(self._found.path))
        self._stream.restore(state["stream"])
        self._step, self._version = state["step"], state["version"]
        self._skipped, self._earlier_s = state["skipped_updates"], state["seconds"]
        self._heal.num_restarts = state["restarts"]
        self._batches.kl.coef = state["kl_coef"]
        logger.info("resumed from step %d (%s)", self._step, self._found.path)
        return dict(state["metrics"])

    def _load_reference(self) -> None:
        """Ranks begin with the run's initial weights where a KL term or adapters need them, else
        anywhere."""
        assert self._found is not None, "only a resumed run has a reference to find again"
        if self._config.grpo.kl.coef == 0 and self._config.policy.lora is None:
            self._ranks.all("load_initial", str(self._found.path))
            return
        self._ranks.all("load_initial", self._model_path)
        if self._ranks.all("master_hash")[0] != self._initial_hash:
            raise ConfigError(
                f"model.path={self._model_path}: the weights there are not those that the run "
                "began with, and grpo.kl.coef > 0 needs them as its reference, policy.lora as the "
                "base of its adapters; restore them"
            )

    def _train_step(self, writer: MetricsWriter, progress: Progress) -> None:
        config, step, watch = self._config, self._step + 1, Stopwatch()
        restarts_before = self._heal.num_restarts
        with watch("time/data"):
            prompts = self._stream.take(config.rollout.prompts_per_step)
        with watch("time/generate"):
            groups, faults = self._collector.collect_refilled(
                prompts,
                config.rollout.group_size,
                self._sampling,
                take=self._stream.take,
                has_signal=self._batches.has_signal,
                max_rounds=config.grpo.refill_rounds,
            )
        watch.move("time/generate", "time/reward", faults.reward_s)
        record: dict[str, Any] = completion_metrics(
            groups, version=self._version, think_end_id=self._think_end_id
        )
        with watch("time/advantage"):
            batch, about_batch = self._batches.make(groups)
        if self._batches.reference_s > 0:
            watch.move("time/advantage", "time/ref_logprob", self._batches.reference_s)
        record |= about_batch
        record |= faults.metrics() | self._data_counts | {"data/epoch": self._stream.epoch}
        with watch("time/train"):
            record |= self._ranks.all("update", batch)[0]
            record["weights_hash"] = self._ranks.all("master_hash")[0]
        self._batches.kl.update(record.get("policy/kl_ref_k3"))
        self._skipped += int(record.get("optim/update_skipped", 0))
        self._version = int(record["policy/version"])
        with watch("time/refit"):
            record |= self._sync_weights()
        record |= self._backend.stats()
        if self._is_eval_step(step):
            with watch("time/validate"):
                record |= self._evaluate(step)
        completions = [c for group in groups for c in group.completions]
        write_completions(self._run.rollouts(step), completions)
        self._show_samples(step, groups, writer)
        record |= throughput(groups, batch, watch)
        record["fault/worker_restarts"] = float(self._heal.num_restarts - restarts_before)
        record["data/consumed_prompts"] = float(self._stream.num_taken)
        self._step = step
        if self._is_save_step(step):
            with watch("time/checkpoint"):
                self._save(record | watch.record())
        writer.log(step, record | watch.record())
        self._check_health(record)
        progress.update(
            {
                "reward": record.get("reward/mean", float("nan")),
                "solved": record.get("reward/solved_frac", float("nan")),
                "step_s": watch.total_s(),
            }
        )

    def _sync_weights(self) -> dict[str, Any]:
        """Bring every replica to the ranks' version; those that fail are restarted or dropped.

        Also when an update was skipped: a sync drops what the engines cached, so that a step begins
        alike in a resumed process and in one that never stopped.

        Returns:
            `refit/*` and `fault/sync_failures`.

        Raises:
            SyncError: fewer than weight_sync.min_replicas hold the version in the end, or the
                trainer is at fault.
            RankError: a trainer rank is gone or silent.
            TrainingError: every replica fails the probe.
        """
        chosen = self._backend.alive
        report, options = self._sync.sync(self._version, chosen), self._config.weight_sync
        self._stop_if_condemned()
        for replica, reason in report.failed.items():
            logger.error("replica %d failed in the weight sync: %s", replica, reason)
        if report.failed:
            self._ranks.require_answers(options.timeout_s)
            if len(report.failed) == len(chosen) and is_trainers_fault(report.failed):
                raise SyncError(f"no restart of a replica mends the trainer: {report.failed}")
            self._heal(*report.failed)
        num_ready = len(self._sync.ready(self._version))
        if num_ready < options.min_replicas:
            raise SyncError(
                f"{num_ready} replicas hold policy version {self._version}; weight_sync."
                f"min_replicas={options.min_replicas} are needed: {report.failed}"
            )
        return report.metrics() | {"fault/sync_failures": float(len(report.failed))}

    def _lose(self, replicas: Collection[int]) -> None:
        """Before a restart, which mends nothing where a trainer rank is at fault."""
        self._ranks.require_answers(self._config.weight_sync.timeout_s)
        self._sync.lose(replicas)

    def _bring(self, replica: int) -> None:
        """Give a fresh replica the current weights; see `WeightSync.bring`."""
        try:
            self._sync.bring(replica, self._version, self._backend.receivers(replica))
        except SyncError as error:
            if reason := self._sync.gives_up(replica):
                raise GivenUpError(reason) from error
            raise

    def _forget(self, replica: int) -> None:
        self._stop_if_condemned()
        self._sync.forget(replica)

    def _stop_if_condemned(self) -> None:
        """A restart mends a worker, not what is wrong with all of them."""
        if reason := self._sync.condemns():
            raise TrainingError(reason)

    def _evaluate(self, step: int) -> dict[str, float]:
        metrics = self._rollouts.evaluate(self._collector)
        prefix = f"eval/{self._eval_set}/"
        figures = {name.removeprefix(prefix): value for name, value in metrics.items()}
        self._run.record_evaluation(
            {"set": self._eval_set, "version": self._version, "step": step, **figures}
        )
        logger.info(
            "policy version %d: held-out accuracy %.1f %% (%d prompts)",
            self._version,
            100 * figures["accuracy"],
            figures["num_prompts"],
        )
        return metrics

    def _is_eval_step(self, step: int) -> bool:
        options = self._config.eval
        is_last = step == self._config.train.steps
        return (options.every > 0 and step % options.every == 0) or (options.at_end and is_last)

    def _is_save_step(self, step: int) -> bool:
        every = self._config.checkpoint.every
        return step == self._config.train.steps or (every > 0 and step % every == 0)

    def _check_health(self, record: dict[str, Any]) -> None:
        """Stop a run whose numbers cannot be trusted; what tells so is in its last line."""
        options, where = self._config.train, self._run.path / "metrics.jsonl"
        if self._skipped > options.max_skipped_updates:
            raise TrainingError(
                f"{self._skipped} updates were skipped for a loss or gradient that is not finite; "
                f"train.max_skipped_updates={options.max_skipped_updates}. Look at optim/grad_norm "
                f"and policy/ratio_max in {where}; a lower optimizer.lr is the usual cure"
            )
        mismatch = record.get("mismatch/logprob_abs_diff_mean", 0.0)
        if options.max_mismatch is not None and not mismatch <= options.max_mismatch:
            raise TrainingError(
                f"trainer and runtime differ by {mismatch:.3g} on average in the log-probability "
                f"of the same tokens at the same weights; train.max_mismatch={options.max_mismatch}"
                f". Look at mismatch/* and m3/router_agreement in {where}"
            )

    def _save(self, record: dict[str, Any]) -> None:
        state = {
            "step": self._step,
            "version": self._version,
            "stream": self._stream.state(),
            "skipped_updates": self._skipped,
            "kl_coef": self._batches.kl.coef,
            "restarts": self._heal.num_restarts,
            "initial_hash": self._initial_hash,
            "seconds": self._seconds(),
            "metrics": record,
        }
        checkpoint.save(
            self._run.path,
            self._step,
            self._ranks.save,
            state,
            keep=self._config.checkpoint.keep,
        )

    def _show_samples(self, step: int, groups: list[Group], writer: MetricsWriter) -> None:
        options = self._config.logging
        if options.sample_table_every and step % options.sample_table_every == 0:
            samples = choose_samples(groups, options.sample_table_rows)
            logger.info("completions of step %d\n%s", step, sample_table(samples))
            writer.log_samples(step, samples)

    def _finish(self, writer: MetricsWriter) -> None:
        """The final table; the last evaluation is made up for when a kill came before it."""
        if self._config.eval.at_end and not self._run.evaluation(self._eval_set, self._version):
            writer.log_apart(self._step, self._evaluate(self._step))
        before = self._run.evaluation(self._eval_set, 0)
        after = self._run.evaluation(self._eval_set, self._version)
        if before is None or after is None:
            print(
                f"{self._step} training steps in {self._seconds():.0f} s; "
                f"run directory: {self._run.path}"
            )
            return
        print(
            accuracy_table(
                before["accuracy"],
                after["accuracy"],
                num_prompts=int(after["num_prompts"]),
                steps=self._step,
                seconds=self._seconds(),
                run_dir=self._run.path,
            )
        )

    def _seconds(self) -> float:
        return self._earlier_s + time.monotonic() - self._began
