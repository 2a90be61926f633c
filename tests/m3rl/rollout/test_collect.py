"""Collecting: seeds, order, lost replicas, failed samples."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from m3rl.rollout.backend import BackendError, Generated, GenerationOutcome, ReplicaHealth
from m3rl.rollout.collect import EVALUATION, Collector, sample_seed
from m3rl.types import Completion, GenerationRequest, Prompt, SamplingSettings

SAMPLING = SamplingSettings(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=4)


def prompt(ordinal: int) -> Prompt:
    return Prompt(ordinal, np.array([1, 2, ordinal], np.int32), f"p{ordinal}", "test", {})


def answer(request: GenerationRequest, finish_reason: str = "stop") -> Generated:
    """Tokens that depend on the seed alone, as a real engine's do."""
    ids = np.random.default_rng(request.seed).integers(3, 90, 3).astype(np.int32)
    spans = np.array([[0, 7]], np.int64)
    return Generated(
        request.request_id, ids, np.zeros(3, np.float32), finish_reason, spans, request.seed
    )


class FakeBackend:
    """Answers every request, except what `faults` says of a call: request ids that are lost with
    their replica."""

    num_replicas = 2

    def __init__(self, faults: Sequence[set[str]] = (), alive: bool = True) -> None:
        self.faults = list(faults)
        self.alive = alive
        self.calls: list[list[str]] = []
        self.replicas: list[list[int] | None] = []
        self.seeds: list[dict[str, int]] = []

    def generate(self, requests, *, timeout_s, replicas=None):
        self.calls.append([r.request_id for r in requests])
        self.replicas.append(replicas)
        self.seeds.append({r.request_id: r.seed for r in requests})
        lost = self.faults.pop(0) if self.faults else set()
        return GenerationOutcome(
            generated={r.request_id: answer(r) for r in requests if r.request_id not in lost},
            lost=[r for r in requests if r.request_id in lost],
            failures={1: "killed by the test"} if lost else {},
        )

    def health(self):
        return [ReplicaHealth(r, self.alive, 7, "") for r in range(2)]


def score_by_length(pairs: Sequence[tuple[Prompt, Completion]]) -> None:
    for _, completion in pairs:
        completion.reward = float(completion.sample_index)
        completion.reward_status = "ok"


def collector(backend: FakeBackend, heal=lambda replica: True, serving=None) -> Collector:
    return Collector(
        backend,
        run_seed=3,
        decode=lambda ids: " ".join(map(str, ids)),
        score=score_by_length,
        heal=heal,
        timeout_s=1.0,
        serving=serving,
    )


# BR-025
def test_seeds_differ_by_run_stream_prompt_sample_and_turn_and_repeat() -> None:
    keys = list(itertools.product(range(3), range(2), range(5), range(8), range(2)))
    seeds = [sample_seed(*key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert seeds == [sample_seed(*key) for key in keys]
    assert all(0 <= seed < 2**63 for seed in seeds)


# BR-034
def test_groups_come_in_prompt_order_with_samples_in_order() -> None:
    groups, stats = collector(FakeBackend()).collect([prompt(4), prompt(2)], 3, SAMPLING)
    assert [[c.sample_id for c in g.completions] for g in groups] == [
        [(4, 0), (4, 1), (4, 2)],
        [(2, 0), (2, 1), (2, 2)],
    ]
    assert [c.reward for c in groups[0].completions] == [0.0, 1.0, 2.0]
    assert stats.requeued_samples == stats.failed_samples == 0


# BR-075
def test_lost_requests_are_issued_again_with_the_same_seed_and_give_the_same_completions() -> None:
    plain, _ = collector(FakeBackend()).collect([prompt(0), prompt(1)], 4, SAMPLING)
    backend = FakeBackend(faults=[{"1.0", "1.1", "1.2", "1.3"}])
    healed: list[int] = []

    def heal(replica: int) -> bool:
        healed.append(replica)
        return True

    groups, stats = collector(backend, heal).collect([prompt(0), prompt(1)], 4, SAMPLING)
    assert healed == [1]
    assert stats.requeued_samples == 4
    assert backend.calls[1] == ["1.0", "1.1", "1.2", "1.3"]
    assert all(backend.seeds[0][key] == seed for key, seed in backend.seeds[1].items())
    for group, twin in zip(groups, plain, strict=True):
        for a, b in zip(group.completions, twin.completions, strict=True):
            assert a.sample_id == b.sample_id
            assert np.array_equal(a.completion_ids, b.completion_ids)


def test_only_replicas_that_may_serve_at_that_moment_are_asked() -> None:
    backend = FakeBackend(faults=[{"0.1"}])
    serving = iter([[0, 1], [1]])
    collector(backend, serving=lambda: next(serving)).collect([prompt(0)], 2, SAMPLING)
    assert backend.replicas == [[0, 1], [1]]


# BR-075
def test_no_living_replica_ends_the_call_and_names_the_fault() -> None:
    backend = FakeBackend(faults=[{"0.0", "0.1"}], alive=False)
    with pytest.raises(BackendError, match="replica 1: killed by the test"):
        collector(backend, lambda replica: False).collect([prompt(0)], 2, SAMPLING)


# BR-017
def test_failed_and_aborted_samples_are_counted_and_never_scored() -> None:
    class Partly(FakeBackend):
        def generate(self, requests, *, timeout_s, replicas=None):
            reasons = {"0.0": "error", "1.0": "abort", "1.1": "error"}
            return GenerationOutcome(
                {r.request_id: answer(r, reasons.get(r.request_id, "length")) for r in requests}
            )

    groups, stats = collector(Partly()).collect([prompt(0), prompt(1)], 3, SAMPLING)
    assert [[c.reward_status for c in g.completions] for g in groups] == [
        ["unscored", "ok", "ok"],
        ["unscored", "unscored", "ok"],
    ]
    assert np.isnan(groups[0].completions[0].reward)
    assert stats.failed_samples == 3


def test_the_text_ends_before_the_stop_string_and_the_ids_keep_it() -> None:
    sampling = SamplingSettings(1.0, 1.0, 0, 0.0, 4, stop=("#", "END"))
    decoded = iter(["cat#", "no stop", "a END #"])
    made = Collector(
        FakeBackend(),
        run_seed=0,
        decode=lambda ids: next(decoded),
        score=score_by_length,
        heal=lambda replica: True,
        timeout_s=1.0,
    )
    groups, _ = made.collect([prompt(0)], 3, sampling)
    assert [c.text for c in groups[0].completions] == ["cat", "no stop", "a "]
    assert all(len(c.completion_ids) == 3 for c in groups[0].completions)


def test_evaluation_draws_apart_from_training() -> None:
    backend = FakeBackend()
    made = collector(backend)
    made.collect([prompt(0)], 2, SAMPLING)
    made.collect([prompt(0)], 2, SAMPLING, stream=EVALUATION)
    assert backend.seeds[0].keys() == backend.seeds[1].keys()
    assert not set(backend.seeds[0].values()) & set(backend.seeds[1].values())


class Stream:
    """Prompts from 100 on; notes how many were asked for."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def take(self, count: int) -> list[Prompt]:
        first = 100 + sum(self.taken)
        self.taken.append(count)
        return [prompt(first + i) for i in range(count)]


def refilled(teaches, max_rounds: int, backend: FakeBackend | None = None):
    """Four prompts, of whose groups and successors those teach whose ordinal `teaches` accepts."""
    stream = Stream()
    groups, stats = collector(backend or FakeBackend()).collect_refilled(
        [prompt(i) for i in range(4)],
        2,
        SAMPLING,
        take=stream.take,
        has_signal=lambda group: teaches(group.prompt.ordinal),
        max_rounds=max_rounds,
    )
    return [g.prompt.ordinal for g in groups], stream.taken, stats.metrics()


def test_groups_that_teach_nothing_are_replaced_by_exactly_as_many_new_prompts() -> None:
    # 0 and 2 teach; of 100 and 101 the first; then 102 does.
    ordinals, taken, metrics = refilled(lambda o: o in (0, 2, 100, 102), max_rounds=5)
    assert taken == [2, 1]
    assert ordinals == [0, 1, 2, 3, 100, 101, 102]
    assert metrics["data/resampled_batches"] == 2
    assert metrics["data/resampled_prompts"] == 3
    assert metrics["data/missing_groups"] == 0


def test_refilling_ends_after_the_set_number_of_rounds_though_groups_are_missing() -> None:
    ordinals, taken, metrics = refilled(lambda o: o == 1, max_rounds=3)
    assert taken == [3, 3, 3]
    assert len(ordinals) == 4 + 9
    assert metrics["data/resampled_batches"] == 3
    assert metrics["data/missing_groups"] == 3


@pytest.mark.parametrize(
    ("teaches", "max_rounds"), [(lambda o: True, 5), (lambda o: False, 0)], ids=["full", "off"]
)
def test_a_full_step_and_no_rounds_take_no_further_prompt(teaches, max_rounds) -> None:
    ordinals, taken, metrics = refilled(teaches, max_rounds)
    assert (ordinals, taken) == ([0, 1, 2, 3], [])
    assert metrics["data/resampled_batches"] == metrics["data/resampled_prompts"] == 0


def test_faults_of_every_round_are_counted() -> None:
    backend = FakeBackend(faults=[{"0.0"}, set(), {"100.0", "100.1"}])
    _, _, metrics = refilled(lambda o: o != 3, max_rounds=1, backend=backend)
    assert metrics["fault/requeued_samples"] == 3
