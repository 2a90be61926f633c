"""Trainer ranks of other architectures than M3: alone, resumed, and several that share a policy."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from m3rl.checkpoint import CheckpointError
from m3rl.index_alignment import IndexLossSettings
from m3rl.lora.settings import LoraSettings
from m3rl.policy_any import TransformersPolicy
from tests.m3rl.any_models import QWEN3, QWEN3_MOE, change_config, write_any
from tests.m3rl.parallel_process import BATCH, NEXT_BATCH, batch_of, learn, on_ranks, resume
from tests.m3rl.rank_cases import (
    SETTINGS,
    distance,
    gradients,
    on_policy,
    random_batch,
    start,
    with_loss,
)
from tests.m3rl.test_parallel import assert_each_element_is_held_once

KINDS = {"qwen3": QWEN3, "qwen3_moe": QWEN3_MOE}
# Adam's first step is lr * g / (|g| + eps): the eps keeps it from giving gradients that are
# rounding noise a step of full size.
SMOOTH = replace(SETTINGS, optimizer=replace(SETTINGS.optimizer, eps=1e-4))


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    write_any(path, KINDS[request.param])
    return path


@pytest.mark.parametrize("recomputes", [False, True])
def test_the_gradient_does_not_depend_on_the_micro_batch_split(model, recomputes):
    batch = random_batch(0)
    settings = replace(SETTINGS, activation_checkpointing=recomputes)
    whole = gradients(start(model, replace(settings, micro_batch_tokens=10_000)), batch)
    split = gradients(start(model, replace(settings, micro_batch_tokens=30)), batch)
    assert distance(split, whole) <= 2e-6


def test_tokens_of_better_completions_become_more_likely(model):
    rank = start(model)
    batch = on_policy(rank, random_batch(3))
    metrics = [rank.update(batch) for _ in range(5)]
    assert metrics[0]["mismatch/logprob_abs_diff_mean"] < 1e-6
    assert not any(name.startswith("m3/") for name in metrics[0])
    moved = ((rank.logprobs(batch) - batch.behaviour_logprobs_BS) * batch.loss_mask_BS).sum(-1)
    assert (np.sign(moved) == np.sign(batch.advantages_B)).mean() > 0.8
    assert rank.policy_version == 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stopped_and_resumed_is_bit_for_bit_uninterrupted(model, tmp_path, dtype):
    settings = replace(with_loss(kl_coef=0.1), dtype=dtype, activation_checkpointing=True)
    straight = start(model, settings)
    for seed in range(4):
        straight.update(random_batch(seed))
    stopped = start(model, settings)
    for seed in range(2):
        stopped.update(random_batch(seed))
    stopped.save(tmp_path)
    resumed = start(model, settings)
    assert resumed.load(tmp_path) == 2
    for seed in range(2, 4):
        resumed.update(random_batch(seed))
    assert resumed.master_hash() == straight.master_hash()
    assert start(tmp_path).master_hash() == stopped.master_hash() != straight.master_hash()


def test_a_checkpoint_of_another_model_is_refused(model, tmp_path):
    rank = start(model)
    rank.save(tmp_path)
    change_config(tmp_path, transformers_version="5.99")
    assert rank.load(tmp_path) == 0
    change_config(tmp_path, rms_norm_eps=1e-3)
    with pytest.raises(CheckpointError, match="is another model than"):
        rank.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"replay_routing": True}, "policy.replay_routing"),
        ({"index_loss": IndexLossSettings(1.0, "token")}, "policy.index_loss"),
        ({"index_drift_every": 5}, "policy.index_drift_every"),
        ({"lora": LoraSettings(4, 8.0, ("attention",), False, 0)}, "policy.lora"),
    ],
)
def test_what_m3_alone_has_is_refused(model, changes, key):
    with pytest.raises(ValueError, match=f"{key}: of MiniMax-M3 alone"):
        start(model, replace(SETTINGS, **changes))


@pytest.mark.parametrize("recomputes", [False, True])
def test_two_ranks_have_the_gradient_and_take_the_step_of_one(model, recomputes):
    settings = replace(SMOOTH, activation_checkpointing=recomputes)
    rank = start(model, settings)
    logprobs, grads = rank.logprobs(batch_of(BATCH)), gradients(rank, batch_of(BATCH))
    metrics = rank.update(batch_of(BATCH))
    told = on_ranks(learn, 2, model, settings)
    assert distance({n: torch.from_numpy(g) for n, g in told[0]["gradients"].items()}, grads) < 2e-6
    np.testing.assert_allclose(told[1]["logprobs"], logprobs, atol=1e-5)
    for name, weight in rank.policy.export("float32"):
        # A step of Adam is at most lr, and its slope in the gradient at most lr / eps.
        np.testing.assert_allclose(told[0]["weights"][name], weight, atol=2e-5, err_msg=name)
    assert told[0]["metrics"]["optim/grad_norm"] == pytest.approx(
        metrics["optim/grad_norm"], rel=1e-5
    )
    assert_each_element_is_held_once([each["layout"] for each in told], "float32")


def test_what_ranks_send_in_bf16_is_together_what_one_exports_and_so_are_their_hashes(model):
    settings = replace(SMOOTH, dtype="bfloat16")
    told = on_ranks(learn, 3, model, settings)
    alone = start(model, settings)
    np.testing.assert_array_equal(told[0]["logprobs"], alone.logprobs(batch_of(BATCH)))
    policy = TransformersPolicy(model, dtype="bfloat16")
    views = {slot.name: np.full(slot.shape, np.nan, np.float32) for slot in policy.layout()}
    for rank in told:
        for slot in rank["layout"]:
            views[slot.name][tuple(slice(*edge) for edge in slot.bounds)] = rank["views"][slot.name]
    for name, weight in told[0]["weights"].items():
        policy._master(name).copy_(torch.from_numpy(weight))
        assert torch.equal(policy.wire_view(name).float(), torch.from_numpy(views[name])), name
    assert {rank["hash"] for rank in told} == {policy.master_hash()}


def test_two_ranks_resumed_are_bit_for_bit_ranks_uninterrupted(model, tmp_path):
    settings = replace(SMOOTH, loss=with_loss(kl_coef=0.1).loss)
    told = on_ranks(resume, 2, model, settings, tmp_path, replace(settings, ep=2))
    for rank in told:
        assert rank["resumed"] == rank["straight"] == told[0]["straight"]
    assert start(tmp_path).master_hash() == told[0]["saved"]
    alone = start(model, settings)
    alone.update(batch_of(BATCH))
    second = alone.update(batch_of(NEXT_BATCH))
    assert second["policy/kl_ref_k3"] > 0
    assert told[0]["second"]["policy/kl_ref_k3"] == pytest.approx(
        second["policy/kl_ref_k3"], rel=1e-3
    )
