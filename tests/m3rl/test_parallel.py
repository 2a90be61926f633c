"""Trainer ranks that share one policy against one rank that holds all of it, over gloo."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from m3rl.grpo.micro import MicroBatch, token_ranges
from m3rl.weight_sync.layout import whole
from m3rl.weight_sync.plan import check_plan, make_plan
from tests.m3rl.parallel_process import (
    BATCH,
    NEXT_BATCH,
    batch_of,
    joined,
    learn,
    on_ranks,
    resume,
    timeouts,
)
from tests.m3rl.rank_cases import CONFIG, SETTINGS, distance, gradients, start, with_loss
from tests.tiny_models import random_checkpoint

# Adam's first step is lr * g / (|g| + eps): the eps keeps it from giving gradients that are
# rounding noise a step of full size.
SMOOTH = replace(SETTINGS, optimizer=replace(SETTINGS.optimizer, eps=1e-4))
SPLITS = [(2, 1, 1), (2, 2, 1), (2, 1, 2), (4, 2, 1), (4, 4, 1), (4, 1, 4), (4, 2, 2)]
CASES = [
    *((*split, "float64", False) for split in SPLITS),
    (2, 1, 1, "float64", True),
    (4, 2, 2, "float64", True),
    (2, 2, 1, "float32", False),
    (4, 2, 2, "float32", True),
]
BOUNDS = {"float64": 1e-12, "float32": 1e-6}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    random_checkpoint(path, CONFIG, seed=0)
    return path


@pytest.fixture(scope="module")
def alone(model):
    """By dtype, what one rank computes."""
    told = {}
    for dtype in ("float64", "float32", "bfloat16"):
        rank = start(model, replace(SMOOTH, dtype=dtype))
        logprobs = rank.logprobs(batch_of(BATCH))
        grads = gradients(rank, batch_of(BATCH))
        metrics = rank.update(batch_of(BATCH))
        weights = {n: t.clone() for n, t in rank.policy.export("float64")}
        told[dtype] = {
            "logprobs": logprobs,
            "gradients": grads,
            "metrics": metrics,
            "weights": weights,
        }
    return told


@pytest.mark.parametrize(("num_ranks", "ep", "cp", "dtype", "recomputes"), CASES)
def test_ranks_have_the_gradient_and_take_the_step_of_one(
    model, alone, num_ranks, ep, cp, dtype, recomputes
):
    settings = replace(SMOOTH, dtype=dtype, ep=ep, cp=cp, activation_checkpointing=recomputes)
    told = on_ranks(learn, num_ranks, model, settings)
    expected, bound = alone[dtype], BOUNDS[dtype]
    assert distance(joined(told, ep), expected["gradients"]) <= bound
    # A step of Adam is at most lr, and its slope in the gradient at most lr / eps.
    atol = bound * 1e-3 / 1e-4 * max(g.abs().max() for g in expected["gradients"].values())
    for name, weight in expected["weights"].items():
        off = np.abs(told[0]["weights"][name] - weight.numpy()).max()
        assert off <= atol + torch.finfo(getattr(torch, dtype)).eps * weight.abs().max(), name
    assert not any(rank["weights"] for rank in told[1:]), "rank 0 alone puts tensors together"
    for rank in told:
        np.testing.assert_allclose(rank["logprobs"], expected["logprobs"], atol=1e-5)
        assert rank["metrics"] == told[0]["metrics"]
    for name, value in expected["metrics"].items():
        if not name.startswith("perf/"):
            rel = 1e-2 if name == "optim/param_delta_frac" else 1e-4
            assert told[0]["metrics"][name] == pytest.approx(value, rel=rel, abs=1e-5), name
    assert_each_element_is_held_once([rank["layout"] for rank in told], dtype)


def assert_each_element_is_held_once(layouts, dtype):
    tensors = {slot.name: slot for layout in layouts for slot in layout}
    if dtype == "float64":  # no dtype of a sync, and the same rectangles
        layouts = [[replace(s, dtype="float32") for s in layout] for layout in layouts]
    receiver = [
        replace(
            slot, dtype="float32" if dtype == "float64" else slot.dtype, bounds=whole(slot.shape)
        )
        for slot in tensors.values()
    ]
    check_plan(make_plan(layouts, [receiver], 1 << 20), layouts, [receiver])
    count = {name: np.zeros(slot.shape, int) for name, slot in tensors.items()}
    for layout in layouts:
        for slot in layout:
            count[slot.name][tuple(slice(*edge) for edge in slot.bounds)] += 1
    assert all((held == 1).all() for held in count.values())


@pytest.mark.parametrize(("num_ranks", "ep"), [(2, 1), (4, 2), (3, 1)])
def test_what_ranks_send_is_together_what_one_exports_and_so_are_their_hashes(model, num_ranks, ep):
    settings = replace(SMOOTH, dtype="bfloat16", ep=ep)
    told = on_ranks(learn, num_ranks, model, settings)
    assert len({rank["hash"] for rank in told}) == 1
    exported = {n: torch.from_numpy(w) for n, w in told[0]["weights"].items()}
    views = {name: np.full(w.shape, np.nan, np.float32) for name, w in exported.items()}
    for rank in told:
        for slot in rank["layout"]:
            views[slot.name][tuple(slice(*edge) for edge in slot.bounds)] = rank["views"][slot.name]
    one = start(model, settings)
    for name, weight in exported.items():
        one.policy._master(name).copy_(weight)
        assert torch.equal(one.policy.wire_view(name).float(), torch.from_numpy(views[name])), name
    assert one.master_hash() == told[0]["hash"]


def test_in_bf16_sharded_weights_give_the_bits_of_whole_ones_and_gradients_are_rounded_once(
    model, alone
):
    settings = replace(SMOOTH, dtype="bfloat16")
    told = on_ranks(learn, 2, model, settings)
    assert np.array_equal(told[0]["logprobs"], alone["bfloat16"]["logprobs"])
    # Of each micro-batch: half a unit in the last of 8 bits.
    assert distance(joined(told, 1), alone["bfloat16"]["gradients"]) <= 2**-8


def test_ranks_resumed_are_bit_for_bit_ranks_uninterrupted_and_what_they_save_is_a_model(
    model, tmp_path
):
    with_kl = with_loss(kl_coef=0.1)
    settings = replace(SMOOTH, loss=with_kl.loss, ep=2, cp=2)
    told = on_ranks(resume, 4, model, settings, tmp_path, replace(settings, ep=4, cp=1))
    for rank in told:
        assert rank["resumed"] == rank["straight"] == told[0]["straight"]
        assert rank["version"] == 1
        assert "resume it with train.parallel.ep=2" in rank["refusal"]
    assert start(tmp_path).master_hash() == told[0]["saved"]
    alone = start(model, replace(settings, ep=1, cp=1))
    alone.update(batch_of(BATCH))
    second = alone.update(batch_of(NEXT_BATCH))
    assert second["policy/kl_ref_k3"] > 0
    assert told[0]["second"]["policy/kl_ref_k3"] == pytest.approx(
        second["policy/kl_ref_k3"], rel=1e-3
    )
    rows = batch_of(BATCH)
    accuracy = alone.greedy_accuracy(rows.ids_BS, rows.length_B, rows.loss_mask_BS)
    assert told[0]["accuracy"] == told[3]["accuracy"] == accuracy


def test_every_group_of_ranks_waits_as_long_as_it_was_told():
    settings = replace(SETTINGS, ep=2, cp=2, timeout_s=77.0)
    names = ("ranks", "expert_ranks", "expert_groups", "sharers")
    # Longer than the driver does, which then says who did not answer.
    told_s = settings.collective_timeout_s
    assert 77.0 < told_s < 600.0
    assert on_ranks(timeouts, 4, settings) == [dict.fromkeys(names, told_s)] * 4


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_moments_on_the_host_change_no_bit(model, monkeypatch, decay):
    monkeypatch.setattr("m3rl.optimizer.CHUNK_BYTES", 4096)  # several runs
    hashes = []
    for offload in (False, True):
        optimizer = replace(SETTINGS.optimizer, offload=offload, weight_decay=decay)
        rank = start(model, replace(SETTINGS, optimizer=optimizer))
        for seed in (BATCH, NEXT_BATCH):
            rank.update(batch_of(seed))
        hashes.append(rank.master_hash())
    assert hashes[0] == hashes[1]


def test_ranges_of_shared_tokens_by_hand_and_a_row_of_filling_where_tokens_are_few():
    assert token_ranges(10, 4) == [(0, 3), (3, 3), (6, 2), (8, 2)]
    with pytest.raises(ValueError, match="3 tokens cannot be split over 4 ranks"):
        token_ranges(3, 4)
    ids, lengths = np.array([[7, 8, 0]]), np.array([2])
    mask = np.array([[False, True, False]])
    micros = [
        MicroBatch.of(rows, ids, lengths, mask, torch.device("cpu"), place=2, num_sharers=4)
        for rows in (np.array([0]), np.array([], int))
    ]
    assert [micro.packing.lengths for micro in micros] == [(2, 2), (4,)]
    assert [micro.ids_T.tolist() for micro in micros] == [[7, 8, 0, 0], [0, 0, 0, 0]]
    assert [micro.targets_M.tolist() for micro in micros] == [[1], []]
    assert [(m.packing.first, m.packing.num_queries) for m in micros] == [(2, 1), (2, 1)]
