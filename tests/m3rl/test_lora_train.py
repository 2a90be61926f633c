"""Trainer ranks that train adapters alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.m3rl.lora_cases import ALL, CONFIG, LORA, RANK
from tests.m3rl.lora_process import SEEDS, batch_of, learn, summed_gradients
from tests.m3rl.parallel_process import on_ranks
from tests.m3rl.rank_cases import WIDTH, distance, gradients, on_policy, random_batch, start
from tests.tiny_models import random_checkpoint

EVERYTHING = replace(RANK, dtype="bfloat16", lora=replace(LORA, targets=ALL))
MXFP8 = replace(RANK, dtype="bfloat16", lora=replace(LORA, mxfp8_experts=True))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    random_checkpoint(path, CONFIG, seed=0)
    return path


def base_of(policy):
    """Bits of all weights, those of targets without adapters."""
    state = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    return state | {name: policy.adapters.base(name).clone() for name in policy.adapters.names}


@pytest.mark.parametrize("settings", [RANK, EVERYTHING, MXFP8], ids=["fp32", "all", "mxfp8"])
def test_frozen_weights_keep_their_bits_while_adapters_are_trained(model, settings):
    rank = start(model, settings)
    base = base_of(rank.policy)
    a_before = {n: p.detach().clone() for n, p in rank.policy.adapters.named_parameters()}
    for step in range(3):
        metrics = rank.update(random_batch(step))
    assert metrics["policy/version"] == 3
    after = base_of(rank.policy)
    assert after.keys() == base.keys()
    for name, tensor in base.items():
        assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8)), name
    for name, parameter in rank.policy.adapters.named_parameters():
        assert not torch.equal(parameter, a_before[name]), name
    assert set(rank._optimizer.tensors()) == {
        f"adapters.{name}.{kind}" for name in a_before for kind in ("step", "exp_avg", "exp_avg_sq")
    }
    targets = sum(rank.policy.adapters.base(name).numel() for name in rank.policy.adapters.names)
    share = targets / rank.policy.config.num_parameters
    assert share / 4 < metrics["optim/param_delta_frac"] <= share


@pytest.mark.parametrize("settings", [RANK, MXFP8], ids=["fp32", "mxfp8"])
def test_tokens_of_better_completions_become_more_likely(model, settings):
    rank = start(model, settings)
    batch = on_policy(rank, random_batch(3))
    for _ in range(8):
        rank.update(batch)
    moved = ((rank.logprobs(batch) - batch.behaviour_logprobs_BS) * batch.loss_mask_BS).sum(-1)
    assert (np.sign(moved) == np.sign(batch.advantages_B)).mean() > 0.8


def test_a_supervised_loss_falls(model):
    rank, batch = start(model, EVERYTHING), random_batch(11)
    losses = [
        rank.sft_step(batch.ids_BS, batch.length_B, batch.loss_mask_BS)["sft/loss"]
        for _ in range(15)
    ]
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("checkpointing", [False, True])
# In FP32 the trunk's rounding is up to that of this batch, with and without adapters: see below.
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 2e-6), ("float64", 1e-12)])
def test_the_gradient_does_not_depend_on_the_micro_batch_split(model, dtype, bound, checkpointing):
    batch = random_batch(0)
    settings = replace(RANK, dtype=dtype, activation_checkpointing=checkpointing)
    whole = gradients(start(model, replace(settings, micro_batch_tokens=10_000)), batch)
    split = gradients(start(model, replace(settings, micro_batch_tokens=WIDTH)), batch)
    assert distance(split, whole) <= bound


def test_in_fp32_gradients_of_adapters_are_rounded_like_those_of_all_weights(model):
    """Adapters in FP64 change these distances by 2 %, the head in FP64 by 10 %."""
    distances = {"adapters": [], "all weights": []}
    for seed in range(4):
        batch = random_batch(seed)
        for kind, lora in (("adapters", LORA), ("all weights", None)):
            whole, split = (
                gradients(start(model, replace(RANK, lora=lora, micro_batch_tokens=size)), batch)
                for size in (10_000, WIDTH)
            )
            distances[kind].append(distance(split, whole))
    rms = {kind: float(np.sqrt(np.mean(np.square(of)))) for kind, of in distances.items()}
    assert rms["adapters"] <= 1e-6
    assert rms["adapters"] <= 1.1 * rms["all weights"]


def test_the_kl_reference_is_the_base(model):
    settings = replace(RANK, loss=replace(RANK.loss, kl_coef=0.1))
    rank, batch = start(model, settings), random_batch(5)
    initial = rank.logprobs(batch)
    first = rank.update(batch)
    for _ in range(3):
        later = rank.update(batch)
    assert np.array_equal(rank.reference_logprobs(batch), initial)
    assert first["policy/kl_ref_k3"] == 0.0
    assert later["policy/kl_ref_k3"] > 1e-6


@pytest.mark.parametrize("settings", [RANK, EVERYTHING, MXFP8], ids=["fp32", "all", "mxfp8"])
def test_a_resumed_rank_is_bit_for_bit_one_that_never_stopped(model, tmp_path, settings):
    rank = start(model, settings)
    for step in range(2):
        rank.update(random_batch(step))
    rank.save(tmp_path)
    assert not list(tmp_path.glob("model*.safetensors"))
    assert (tmp_path / "config.json").read_bytes() == (model / "config.json").read_bytes()
    straight = [rank.update(random_batch(step)) for step in (2, 3)]
    resumed = start(model, settings)
    assert resumed.load(tmp_path) == 2
    assert [resumed.update(random_batch(step)) for step in (2, 3)] == straight
    assert resumed.master_hash() == rank.master_hash()


def test_a_merged_model_is_written_for_those_who_know_no_adapters(model, tmp_path):
    rank, batch = start(model, RANK), random_batch(1)
    rank.update(batch)
    rank.save_model(tmp_path / "merged")
    plain = start(tmp_path / "merged", replace(RANK, lora=None))
    assert np.array_equal(plain.logprobs(batch), rank.logprobs(batch))


CASES = [
    (2, 1, 1, replace(RANK, dtype="float64"), False),
    (2, 1, 1, replace(EVERYTHING, dtype="float64"), True),
    (2, 2, 1, replace(EVERYTHING, dtype="float64"), False),
    (4, 2, 2, replace(EVERYTHING, dtype="float64"), True),
    (2, 1, 1, replace(RANK, loss=replace(RANK.loss, kl_coef=0.1)), False),
    (4, 2, 1, replace(MXFP8, dtype="float64"), True),
    (2, 2, 1, replace(MXFP8, dtype="float32"), False),
    (4, 2, 1, MXFP8, False),
]


@pytest.mark.parametrize(("num_ranks", "ep", "cp", "settings", "recomputes"), CASES)
def test_ranks_learn_what_one_learns(model, tmp_path, num_ranks, ep, cp, settings, recomputes):
    settings = replace(settings, activation_checkpointing=recomputes)
    told = on_ranks(learn, num_ranks, model, replace(settings, ep=ep, cp=cp), tmp_path)
    alone = start(model, settings)
    # In BF16 each rank rounds its sum over a token's experts.
    bound = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 2**-6}[settings.dtype]
    if settings.dtype != "float64":
        # Whoever holds how much of them: the bits are the same.
        assert {rank["initial"] for rank in told} == {alone.master_hash()}
        assert {rank["base"] for rank in told} == {alone.policy.base_hash()}
    expected = gradients_seen(alone)
    for rank in told:
        assert (
            distance({n: torch.from_numpy(g) for n, g in rank["gradients"].items()}, expected)
            <= bound
        )
    metrics = [alone.update(batch_of(seed)) for seed in SEEDS]
    for rank in told:
        assert rank["metrics"] == told[0]["metrics"]
    for mine, one in zip(told[0]["metrics"], metrics, strict=True):
        assert mine["optim/grad_norm"] == pytest.approx(one["optim/grad_norm"], rel=20 * bound)
    for name, tensor in alone.policy.export("float64"):
        atol = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 0.03}[settings.dtype]
        np.testing.assert_allclose(told[0]["weights"][name], tensor.numpy(), atol=atol, rtol=0)
    if settings.dtype == "float64":
        return
    for rank in told:
        assert rank["hash"] == rank["resumed"] == told[0]["hash"]
        assert rank["version"] == 2
    views = {name: np.full(w.shape, np.nan) for name, w in told[0]["weights"].items()}
    for rank in told:
        for slot in rank["layout"]:
            views[slot.name][tuple(slice(*edge) for edge in slot.bounds)] = rank["views"][slot.name]
    for name, weight in told[0]["weights"].items():
        assert np.array_equal(views[name], weight), name


def gradients_seen(rank):
    return {n: torch.from_numpy(g) for n, g in summed_gradients(rank).items()}
