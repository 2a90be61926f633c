"""Two trainer ranks over gloo, each a process of its own, against one rank."""

import json

import numpy as np
import pytest
import torch

from m3rl.rendezvous import Rendezvous
from tests.forked import PROCESSES
from tests.m3rl.rank_cases import CONFIG, distance, gradients, start
from tests.m3rl.rank_process import ROWS, TWO_RANKS, play_rank, two_rank_batches
from tests.tiny_models import random_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    random_checkpoint(path, CONFIG, seed=0)
    return path


def run_two_ranks(model, out):
    meeting = Rendezvous("127.0.0.1", 60.0)
    meet_at = f"tcp://{meeting.host}:{meeting.port}"
    processes = [
        PROCESSES.Process(target=play_rank, args=(rank, 2, model, out, meet_at), daemon=True)
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    assert [process.exitcode for process in processes] == [0, 0]
    return [json.loads((out / f"record{r}.json").read_text()) for r in range(2)]


@pytest.fixture(scope="module")
def two_ranks(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("two_ranks")
    return out, run_two_ranks(model, out)


def test_two_ranks_have_the_gradient_of_one(model, two_ranks):
    out, _ = two_ranks
    expected = gradients(start(model), two_rank_batches()[0])
    for rank in range(2):
        assert distance(torch.load(out / f"grad{rank}"), expected) <= 1e-6


def test_two_ranks_take_the_step_of_one(model, two_ranks):
    out, _ = two_ranks
    alone = start(model, TWO_RANKS)
    alone.update(two_rank_batches()[0])
    weights = torch.load(out / "weights")
    for name, tensor in alone.policy.export("float32"):
        torch.testing.assert_close(weights[name], tensor, atol=1e-6, rtol=0, msg=name)


def test_two_ranks_agree_with_each_other_and_with_one_on_every_metric(model, two_ranks):
    _, records = two_ranks
    assert records[0] == records[1]
    alone = start(model)
    logprobs = alone.logprobs(two_rank_batches()[0])
    np.testing.assert_allclose(records[0]["logprobs"], logprobs, atol=1e-5)
    expected = alone.update(two_rank_batches()[0])
    for name, value in expected.items():
        if not name.startswith(("perf/", "optim/param")):
            assert records[0]["metrics"][0][name] == pytest.approx(value, abs=1e-4), name
    assert records[0]["metrics"][0]["perf/seqlen_imbalance"] > 1.0


def test_a_rank_needs_no_ray_no_wandb_and_no_vllm(two_ranks):
    assert two_ranks[1][0]["neighbours"] == []


def test_two_ranks_skip_a_broken_step_together(two_ranks):
    _, records = two_ranks
    assert [record["skipped"] for record in records] == [1.0, 1.0]


def test_two_ranks_resumed_are_bit_for_bit_two_ranks_uninterrupted(model, two_ranks):
    out, records = two_ranks
    (out / "saving").rename(out / "saved")
    resumed = run_two_ranks(model, out)
    assert [r["resumed_hash"] for r in resumed] == [r["hash"] for r in records]
    assert resumed[0]["version"] == len(ROWS)
