"""The probe: a wrong function with the right bits is found before it serves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from m3rl.grpo.micro import MicroBatch
from m3rl.policy import Policy
from m3rl.rollout.m3_replica import M3Replica, ReplicaSettings
from m3rl.weight_sync import transport as transport_module
from m3rl.weight_sync.layout import Bounds
from m3rl.weight_sync.probe import Probe, ProbeError, probe_batch, probe_prompts, scores_of
from m3rl.weight_sync.send import Sender
from m3rl.weight_sync.sync import WeightSync
from tests.m3rl.weight_sync.sync_fakes import LocalSenders, store_without_sockets
from tests.m3rl.weight_sync.test_sync_pauses import Worker
from tests.tiny_models import random_checkpoint, tiny_config

RAW = tiny_config(num_hidden_layers=2)
KEPT = 8
"""Top-k 2 of blocks of 4."""
MAX_ERROR = 1e-4
"""FP32 on both sides: they differ by sums in another order, 1e-6 here."""


@pytest.fixture(autouse=True)
def _store_without_sockets(monkeypatch):
    monkeypatch.setattr(transport_module, "TCPStore", store_without_sockets)
    monkeypatch.setattr("m3rl.rendezvous.TCPStore", store_without_sockets)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    random_checkpoint(path, RAW, seed=0)
    return path


def text(count: int = 50) -> np.ndarray:
    return np.random.default_rng(0).integers(3, RAW["vocab_size"], count).astype(np.int32)


class Trainer:
    """A policy and its sender; `names` says which tensor is sent under another's name."""

    def __init__(self, path: Path, names: dict[str, str] | None = None) -> None:
        self.policy = Policy.for_model(path, dtype="float32")
        self.policy.load(path)
        self._names = names or {}
        self.sender = Sender(0, self.policy.layout(), self.read, stays=True)

    def read(self, name: str, bounds: Bounds) -> torch.Tensor:
        return self.policy.wire_view(self._names.get(name, name), bounds)

    def scores(self, prompts: Sequence[np.ndarray]) -> list[np.ndarray]:
        batch = probe_batch(prompts)
        logprobs_BS = np.zeros(batch.ids_BS.shape, np.float32)
        micro = MicroBatch.of(
            np.arange(len(prompts)),
            batch.ids_BS,
            batch.length_B,
            batch.loss_mask_BS,
            torch.device("cpu"),
        )
        with torch.no_grad():
            logprobs_M, _ = self.policy(
                micro.ids_T, micro.packing, micro.targets_M, temperature=batch.temperature
            )
        micro.put(logprobs_M, logprobs_BS)
        return scores_of(batch, logprobs_BS)

    def __getattr__(self, name: str):
        return getattr(self.sender, name)


def probed_run(trainer: Trainer, replica: M3Replica, every: int = 1) -> tuple[WeightSync, Worker]:
    longest = replica.prompt_lengths()[1]
    prompts = probe_prompts(text(), 2, num_kept=KEPT, longest=longest)
    probe = Probe(
        prompts,
        trainer=trainer.scores,
        replica=lambda number, asked: replica.prompt_logprobs(asked),
        every=every,
        max_error=MAX_ERROR,
    )
    worker = Worker(replica)
    sync = WeightSync(
        LocalSenders([trainer]),
        {0: worker},
        pause=lambda number: replica.pause("keep"),
        resume=lambda number: replica.resume(),
        host="127.0.0.1",
        timeout_s=10.0,
        min_replicas=0,
        verify=True,
        probe=probe,
    )
    sync.connect(0)
    return sync, worker


def new_replica(path: Path, **engine) -> M3Replica:
    return M3Replica(ReplicaSettings(str(path), {"num_pages": 64} | engine))


@pytest.mark.parametrize("shadow", [False, True])
def test_a_probe_of_equal_functions_is_quiet_and_its_error_is_in_the_metrics(model_path, shadow):
    trainer, replica = Trainer(model_path), new_replica(model_path, shadow_weights=shadow)
    sync, _ = probed_run(trainer, replica, every=2)
    errors = []
    for version in range(3):
        with torch.no_grad():
            trainer.policy.model.lm_head.weight.mul_(1.1)
        del sync.events[:]
        report = sync.sync(version)
        probed = ["probe"] if version % 2 == 0 else []
        phases = [event.phase for event in sync.events]
        assert phases[phases.index("commit") :] == ["commit", *probed, "resume"]
        errors.append(report.metrics().get("refit/probe_error"))
    assert errors[1] is None
    assert errors[0] < 1e-5
    assert errors[2] < 1e-5
    assert sync.states() == {0: "READY(2)"}


def swapped(raw: dict) -> dict[str, str]:
    """Gate and up projection of every expert, under each other's name: a fault of a name map."""
    names = {}
    for expert in range(raw["num_local_experts"]):
        prefix = f"model.layers.1.block_sparse_moe.experts.{expert}"
        names |= {f"{prefix}.w1.weight": f"{prefix}.w3.weight"}
        names |= {f"{prefix}.w3.weight": f"{prefix}.w1.weight"}
    return names


@pytest.mark.parametrize("shadow", [False, True])
def test_weights_under_wrong_names_pass_the_hash_and_not_the_probe(model_path, shadow):
    trainer = Trainer(model_path, swapped(RAW))
    replica = new_replica(model_path, shadow_weights=shadow)
    sync, _ = probed_run(trainer, replica)
    report = sync.sync(0)
    assert report.checksum_ok is True
    assert report.ready == ()
    assert "replica 0: with equal weights" in report.failed[0]
    assert "prompts ([64, 72] tokens)" in report.failed[0]
    assert sync.states() == {0: "POISONED"}
    assert replica.engine._paused == "keep"  # it has computed nothing for anybody
    assert replica.engine.stats()["steps"] == 0


def test_a_fault_of_sparse_attention_alone_is_found_by_the_long_prompt(model_path):
    """Wrong index keys matter only where blocks are left out."""
    index_keys = "model.layers.1.self_attn.index_k_proj.weight"
    trainer = Trainer(model_path)
    flipped = trainer.policy.wire_view(index_keys).flip(0)

    def read(name: str, bounds: Bounds) -> torch.Tensor:
        return flipped if name == index_keys else trainer.policy.wire_view(name, bounds)

    trainer.sender = Sender(0, trainer.policy.layout(), read, stays=True)
    replica = new_replica(model_path)
    sync, _ = probed_run(trainer, replica)
    report = sync.sync(0)
    assert (report.checksum_ok, report.ready) == (True, ())
    prompts = [text(KEPT), text(KEPT + 64)]
    pairs = zip(replica.prompt_logprobs(prompts), trainer.scores(prompts), strict=True)
    errors = [np.abs(mine - theirs).mean() for mine, theirs in pairs]
    assert errors[0] < 1e-5 < MAX_ERROR < errors[1]


def scores(*values: float) -> list[np.ndarray]:
    return [np.array(values, np.float32)]


def probe_of(trainer: list[np.ndarray], replica: list[np.ndarray]) -> Probe:
    probe = Probe(
        [text(3)], trainer=lambda _: trainer, replica=lambda _, __: replica, every=3, max_error=0.1
    )
    probe.begin()
    return probe


def test_the_error_is_the_mean_difference_and_nan_is_no_small_one():
    assert probe_of(scores(-1.0, -2.0), scores(-1.12, -1.94)).error(0) == pytest.approx(
        0.09, rel=1e-6
    )
    with pytest.raises(ProbeError, match=r"replica 7: .* by 0\.15 on average; .*max_error=0\.1"):
        probe_of(scores(-1.0, -2.0), scores(-1.3, -2.0)).error(7)
    with pytest.raises(ProbeError, match="by nan on average"):
        probe_of(scores(-1.0, -2.0), scores(-1.0, np.nan)).error(0)


def test_a_probe_is_due_at_multiples_of_its_period():
    probe = probe_of(scores(0.0, 0.0), scores(0.0, 0.0))
    assert [version for version in range(8) if probe.is_due(version)] == [0, 3, 6]


def test_prompts_are_of_two_lengths_in_turn_and_differ():
    prompts = probe_prompts(text(), 4, num_kept=2048, longest=10_000)
    assert [len(ids) for ids in prompts] == [64, 2112, 64, 2112]
    assert not np.array_equal(prompts[0], prompts[2])
    assert prompts[1][:33].tolist() == text()[17:].tolist()
    assert [len(ids) for ids in probe_prompts(text(), 2, num_kept=2048, longest=50)] == [50, 50]


def test_a_trainer_that_cannot_score_poisons_nobody_quietly(model_path):
    trainer, replica = Trainer(model_path), new_replica(model_path)
    sync, _ = probed_run(trainer, replica)

    def fail(prompts: Sequence[np.ndarray]) -> list[np.ndarray]:
        raise RuntimeError("out of memory")

    sync._driver.probe._trainer = fail
    assert "probe(0): RuntimeError: out of memory" in sync.sync(0).failed[0]
    assert sync.states() == {0: "POISONED"}
