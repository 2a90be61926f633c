"""The loop with fakes for its parts: what comes first after a resume, when a run stops itself."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from m3rl.checkpoint import Checkpoint
from m3rl.config import Config, ConfigError
from m3rl.launch import RankError
from m3rl.rollout.heal import GivenUpError
from m3rl.run_dir import RunDirectory
from m3rl.trainer import Trainer, TrainingError, train
from m3rl.training_batch import BatchMaker
from m3rl.weight_sync.errors import SyncError

QUIET = ["eval.at_start=false", "eval.at_end=false", "logging.wandb.mode=disabled"]


class FirstRollout(Exception):
    """The loop has come to its first rollout."""


class FakeParts:
    """Ranks, stream, sync, backend and collector in one; notes what it is asked, in order."""

    num_replicas = 1
    alive = (0,)
    num_restarts = 0

    def __init__(self, ready: list[int], master_hash: str = "aa") -> None:
        self.events: list[Any] = []
        self._ready = ready
        self._hash = master_hash

    def all(self, method: str, *args: Any) -> list[str | None]:
        if method == "master_hash":
            return [self._hash]
        self.events.append((method, *args))
        return [None]

    def make_senders(self) -> None:
        self.events.append("make_senders")

    def restore(self, state: dict) -> None:
        self.events.append(("stream", state["next_ordinal"]))

    def connect(self, replica: int) -> None:
        self.events.append(("connect", replica))

    def sync(self, version: int, replicas: Any) -> SimpleNamespace:
        self.events.append(("sync", version))
        failed = {} if self._ready else {0: "it is late"}
        return SimpleNamespace(failed=failed, metrics=dict)

    def ready(self, version: int) -> list[int]:
        return self._ready

    def require_answers(self, timeout_s: float) -> None:
        self.events.append(("answers", timeout_s))

    def lose(self, replicas: Any) -> None:
        self.events.append(("lose", *replicas))

    def condemns(self) -> str | None:
        return None

    def take(self, count: int) -> list:
        return []

    def collect_refilled(self, *args: Any, **options: Any) -> None:
        self.events.append("rollout")
        raise FirstRollout

    def __call__(self, *replicas: int) -> bool:
        self.events.append(("heal", *replicas))
        return False


def resumed_trainer(run: RunDirectory, config: Config, parts: FakeParts) -> Trainer:
    trainer = Trainer.__new__(Trainer)
    state = {
        "step": 5,
        "version": 4,
        "stream": {"next_ordinal": 160},
        "skipped_updates": 1,
        "restarts": 0,
        "kl_coef": 0.07,
        "initial_hash": "aa",
        "seconds": 1.0,
        "metrics": {"reward/mean": 0.5},
    }
    values = {
        "_config": config,
        "_run": run,
        "_model_path": "the model",
        "_found": Checkpoint(5, Path("the checkpoint"), state),
        "_step": 0,
        "_version": 0,
        "_skipped": 0,
        "_sampling": None,
        "_batches": BatchMaker(config, parts.all),
    }
    for name in ("_ranks", "_stream", "_sync", "_backend", "_collector", "_heal"):
        values[name] = parts
    for name, value in values.items():
        setattr(trainer, name, value)
    return trainer


def config_of(tmp_path: Path, *overrides: str) -> Config:
    words = [f"run.dir={tmp_path / 'run'}", *QUIET, *overrides]
    return Config.load("configs/tiny_cpu.yaml", words)


# BR-018, BR-048
def test_a_resumed_run_restores_everything_then_pushes_the_weights_then_rolls_out(
    tmp_path: Path,
) -> None:
    config, parts = config_of(tmp_path), FakeParts(ready=[0])
    with RunDirectory(config, "train") as run, pytest.raises(FirstRollout):
        resumed_trainer(run, config, parts).run()
    assert parts.events == [
        ("load_initial", "the checkpoint"),
        ("load", "the checkpoint"),
        ("stream", 160),
        "make_senders",
        ("connect", 0),
        ("sync", 4),
        "rollout",
    ]


def test_a_resumed_run_goes_on_with_the_kl_coefficient_it_had_come_to(tmp_path: Path) -> None:
    config = config_of(tmp_path, "grpo.kl={coef: 0.1, target: 0.05}")
    with RunDirectory(config, "train") as run:
        trainer = resumed_trainer(run, config, FakeParts(ready=[0]))
        with pytest.raises(FirstRollout):
            trainer.run()
    assert trainer._batches.kl.coef == 0.07


# BR-018
def test_weights_that_do_not_arrive_end_the_run_before_any_rollout(tmp_path: Path) -> None:
    config, parts = config_of(tmp_path), FakeParts(ready=[])
    with RunDirectory(config, "train") as run, pytest.raises(SyncError, match="it is late"):
        resumed_trainer(run, config, parts).run()
    assert ("heal", 0) in parts.events
    assert "rollout" not in parts.events


def test_a_replica_lost_while_the_run_connects_is_healed_and_does_not_end_the_run(
    tmp_path: Path,
) -> None:
    config, parts = config_of(tmp_path), FakeParts(ready=[0])

    def connect(replica: int) -> None:
        raise SyncError("its process died")

    parts.connect = connect
    with RunDirectory(config, "train") as run, pytest.raises(FirstRollout):
        resumed_trainer(run, config, parts).run()
    assert parts.events[-3:] == [("heal", 0), ("sync", 4), "rollout"]


def test_a_trainer_rank_that_is_gone_ends_the_run_and_costs_no_restart(tmp_path: Path) -> None:
    config, parts = config_of(tmp_path), FakeParts(ready=[])

    def require_answers(timeout_s: float) -> None:
        raise RankError("trainer rank 0 died")

    parts.require_answers = require_answers
    with RunDirectory(config, "train") as run:
        trainer = resumed_trainer(run, config, parts)
        with pytest.raises(RankError, match="trainer rank 0 died"):
            trainer.run()
        with pytest.raises(RankError, match="trainer rank 0 died"):
            trainer._lose([0])
    assert not [event for event in parts.events if event[0] in ("heal", "lose")]


@pytest.mark.parametrize(
    ("reason", "is_trainers"),
    [
        ("stream: hashes of trainer rank 0: NonFiniteError: NaN or infinity in lm_head", True),
        ("stream: replica 0 worker 0: SyncError: late; trainer rank 1: KeyError: 'lm_head'", True),
        ("stream: replica 0 worker 0: WorkerDied: its process died (pid: 3)", False),
        ("stream: trainer rank 0: TransportError: replica 0 worker 0 is gone", False),
        ("prepare: trainer rank 0: RefusedError: trainer rank 0 is not connected", False),
    ],
)
def test_what_the_trainer_does_wrong_is_not_blamed_on_replicas(
    tmp_path: Path, reason: str, is_trainers: bool
) -> None:
    config, parts = config_of(tmp_path), FakeParts(ready=[])
    parts.sync = lambda version, replicas: SimpleNamespace(failed={0: reason}, metrics=dict)
    with RunDirectory(config, "train") as run, pytest.raises(SyncError) as caught:
        resumed_trainer(run, config, parts).run()
    assert str(caught.value).startswith("no restart of a replica mends") == is_trainers
    assert (("heal", 0) in parts.events) != is_trainers


def test_a_probe_that_every_replica_fails_ends_the_run_and_restarts_nothing(tmp_path: Path) -> None:
    config, parts = config_of(tmp_path), FakeParts(ready=[])
    parts.condemns = lambda: "every replica fails the probe: 0.5"
    with (
        RunDirectory(config, "train") as run,
        pytest.raises(TrainingError, match=r"every replica fails the probe: 0\.5"),
    ):
        resumed_trainer(run, config, parts).run()
    assert not any(event[0] == "heal" for event in parts.events)


@pytest.mark.parametrize("is_given_up", [True, False])
def test_a_replica_that_fails_its_probe_again_is_given_up(tmp_path: Path, is_given_up) -> None:
    config, parts = config_of(tmp_path), FakeParts(ready=[0])

    def bring(*args: Any) -> list[int]:
        raise SyncError("the probe differs by 0.5")

    parts.bring, parts.receivers = bring, lambda replica: []
    parts.gives_up = lambda replica: f"{replica}: 2 times in a row" if is_given_up else None
    with RunDirectory(config, "train") as run:
        trainer = resumed_trainer(run, config, parts)
        with pytest.raises(GivenUpError if is_given_up else SyncError):
            trainer._bring(7)


def test_before_the_last_replica_is_forgotten_the_run_ends_where_the_probe_says_so(
    tmp_path: Path,
) -> None:
    config, parts = config_of(tmp_path), FakeParts(ready=[])
    parts.condemns, parts.forget = lambda: "every replica fails the probe", parts.restore
    with (
        RunDirectory(config, "train") as run,
        pytest.raises(TrainingError, match="every replica fails the probe"),
    ):
        resumed_trainer(run, config, parts)._forget(0)
    assert parts.events == []


def test_a_kl_reference_that_changed_since_the_run_began_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, "grpo.kl.coef=0.1")
    with RunDirectory(config, "train") as run:
        with pytest.raises(FirstRollout):
            resumed_trainer(run, config, FakeParts(ready=[0])).run()
        with pytest.raises(ConfigError, match="not those that the run began with"):
            resumed_trainer(run, config, FakeParts(ready=[0], master_hash="bb")).run()


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"metrics": {"mismatch/logprob_abs_diff_mean": 0.2}}, r"differ by 0\.2"),
        ({"metrics": {"mismatch/logprob_abs_diff_mean": float("nan")}}, "differ by nan"),
        ({"skipped_updates": 1000}, "1000 updates were skipped"),
    ],
)
def test_a_run_that_was_stopped_for_its_numbers_is_stopped_again_when_it_is_started_again(
    tmp_path: Path, state: dict, said: str
) -> None:
    config, parts = config_of(tmp_path, "train.steps=5"), FakeParts(ready=[0])
    with RunDirectory(config, "train") as run:
        trainer = resumed_trainer(run, config, parts)
        trainer._found.state.update(state)
        with pytest.raises(TrainingError, match=said):
            trainer.run()
    assert "make_senders" not in parts.events


# BR-072: quantisation noise is no alarm, another function is
@pytest.mark.parametrize("mismatch", [0.0, 0.010, 0.015])
def test_a_small_mismatch_stays_quiet(tmp_path: Path, mismatch: float) -> None:
    config = config_of(tmp_path)
    with RunDirectory(config, "train") as run:
        trainer = resumed_trainer(run, config, FakeParts(ready=[0]))
        trainer._check_health({"mismatch/logprob_abs_diff_mean": mismatch})


def test_a_large_mismatch_or_too_many_skipped_updates_stop_the_run(tmp_path: Path) -> None:
    config = config_of(tmp_path, "train.max_skipped_updates=2")
    with RunDirectory(config, "train") as run:
        trainer = resumed_trainer(run, config, FakeParts(ready=[0]))
        with pytest.raises(TrainingError, match=r"differ by 0\.2 .*train\.max_mismatch=0\.15"):
            trainer._check_health({"mismatch/logprob_abs_diff_mean": 0.2})
        trainer._skipped = 2
        trainer._check_health({})
        trainer._skipped = 3
        with pytest.raises(TrainingError, match="3 updates were skipped"):
            trainer._check_health({})


@pytest.mark.parametrize("override", ["rollout.top_p=0.9", "rollout.top_k=5", "rollout.min_p=0.1"])
def test_truncated_sampling_cannot_be_trained_on(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match="training needs the whole distribution"):
        train(config_of(tmp_path, override))
