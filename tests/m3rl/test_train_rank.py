"""TrainRank as the only rank."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from inference.kernels.packing import Packing
from m3rl.grpo.batch import build_batch
from m3rl.train_rank import TrainRank
from m3rl.types import Completion, Group, Prompt
from tests.m3rl.rank_cases import (
    CONFIG,
    SETTINGS,
    WIDTH,
    assert_close_gradients,
    distance,
    gradients,
    on_policy,
    random_batch,
    start,
    with_loss,
    with_optimizer,
)
from tests.tiny_models import random_checkpoint, transformers_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    random_checkpoint(path, CONFIG, seed=0)
    return path


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-6), ("float64", 1e-12)])
def test_the_gradient_does_not_depend_on_the_micro_batch_split(model, dtype, bound, checkpointing):
    batch = random_batch(0)
    settings = replace(SETTINGS, dtype=dtype, activation_checkpointing=checkpointing)
    whole = gradients(start(model, replace(settings, micro_batch_tokens=10_000)), batch)
    for tokens in (WIDTH, 30, 50, 72):
        split = gradients(start(model, replace(settings, micro_batch_tokens=tokens)), batch)
        assert distance(split, whole) <= bound


def test_a_row_that_no_micro_batch_can_hold_is_refused(model):
    rank = start(model, replace(SETTINGS, micro_batch_tokens=20))
    with pytest.raises(
        ValueError, match=r"row \d has 2\d tokens and policy\.micro_batch_tokens=20"
    ):
        rank.update(random_batch(0))


def test_the_gradient_is_that_of_the_formula_on_transformers_own_model(model):
    batch = random_batch(1)
    actual = gradients(start(model), batch)
    oracle = transformers_model(CONFIG, dict(start(model).policy.export("float32")))
    ids = torch.from_numpy(batch.ids_BS)
    attention_mask = torch.arange(WIDTH) < torch.from_numpy(batch.length_B)[:, None]
    log_p = oracle(ids, attention_mask=attention_mask.long()).logits.log_softmax(-1)
    chosen = log_p[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    mask = torch.from_numpy(batch.loss_mask_BS)[:, 1:]
    ratio = (chosen - torch.from_numpy(batch.behaviour_logprobs_BS)[:, 1:]).exp()
    adv = torch.from_numpy(batch.advantages_B)[:, None]
    objective = torch.minimum(ratio * adv, ratio.clamp(0.8, 1.28) * adv)
    (-(objective * mask).sum() / mask.sum()).backward()
    expected = {
        f"model.{name}": parameter.grad
        for name, parameter in oracle.named_parameters()
        if parameter.grad is not None
    }
    assert_close_gradients(actual, expected)


def test_the_same_inputs_give_the_same_bits(model):
    hashes, records = [], []
    for _ in range(2):
        rank = start(model)
        records.append([rank.update(random_batch(seed)) for seed in range(3)])
        hashes.append(rank.master_hash())
    assert hashes[0] == hashes[1]
    assert records[0] == records[1]


# BR-036
def test_order_of_rows_does_not_change_the_loss_and_logprobs_go_back_to_their_rows(model):
    rank, batch = start(model), random_batch(2)
    order = np.random.default_rng(0).permutation(len(batch.sample_ids))
    shuffled = replace(
        batch,
        sample_ids=[batch.sample_ids[i] for i in order],
        ids_BS=batch.ids_BS[order],
        length_B=batch.length_B[order],
        loss_mask_BS=batch.loss_mask_BS[order],
        behaviour_logprobs_BS=batch.behaviour_logprobs_BS[order],
        advantages_B=batch.advantages_B[order],
    )
    straight = rank.logprobs(batch)
    np.testing.assert_allclose(rank.logprobs(shuffled), straight[order], atol=1e-5)
    assert (straight[batch.loss_mask_BS] < 0).all()
    assert (straight[~batch.loss_mask_BS] == 0).all()
    a, b = start(model).update(batch), start(model).update(shuffled)
    assert a["policy/loss"] == pytest.approx(b["policy/loss"], abs=1e-6)


def test_tokens_of_better_completions_become_more_likely(model):
    rank = start(model)
    batch = on_policy(rank, random_batch(3))
    for _ in range(5):
        metrics = rank.update(batch)
    moved = ((rank.logprobs(batch) - batch.behaviour_logprobs_BS) * batch.loss_mask_BS).sum(-1)
    assert (np.sign(moved) == np.sign(batch.advantages_B)).mean() > 0.8
    assert metrics["policy/version"] == rank.policy_version == 5


def test_on_policy_batches_have_no_mismatch_and_a_shift_of_the_record_shows(model):
    rank = start(model)
    batch = on_policy(rank, random_batch(4))
    metrics = start(model).update(batch)
    assert metrics["mismatch/logprob_abs_diff_max"] == 0.0
    assert metrics["policy/ratio_max"] == 1.0
    batch.behaviour_logprobs_BS = np.roll(batch.behaviour_logprobs_BS, 1, axis=1)
    batch.behaviour_logprobs_BS *= batch.loss_mask_BS
    assert start(model).update(batch)["mismatch/logprob_abs_diff_mean"] > 0.3


def test_behaviour_off_by_a_tenth_is_measured_before_the_weights_move(model):
    rank = start(model)
    batch = on_policy(rank, random_batch(5))
    batch.behaviour_logprobs_BS[batch.loss_mask_BS] -= 0.1
    metrics = rank.update(batch)
    assert metrics["mismatch/logprob_abs_diff_mean"] == pytest.approx(0.1, abs=1e-5)
    assert metrics["mismatch/kl_k1"] == pytest.approx(-0.1, abs=1e-5)
    assert metrics["policy/ratio_mean"] == pytest.approx(np.exp(0.1), abs=1e-4)


def test_recomputed_old_logprobs_leave_the_mismatch_to_the_importance_weight(model):
    batch = on_policy(start(model), random_batch(5))
    batch.behaviour_logprobs_BS[batch.loss_mask_BS] -= 0.1
    metrics = start(model, replace(SETTINGS, old_logprobs="recompute")).update(batch)
    assert metrics["policy/ratio_max"] == 1.0
    assert metrics["mismatch/is_weight_mean"] == pytest.approx(np.exp(0.1), abs=1e-5)


@pytest.mark.parametrize("updates", [1, 2, 3])
def test_recomputing_gives_the_bits_of_a_perfect_record(model, updates):
    settings = replace(SETTINGS, updates_per_batch=updates)
    if updates > 1:  # steps see other micro-batches than one pass over all rows
        settings = replace(settings, micro_batch_tokens=WIDTH)
    batch = on_policy(start(model, settings), random_batch(6))
    recorded = start(model, settings)
    recomputed = start(model, replace(settings, old_logprobs="recompute"))
    first = recorded.update(batch)
    second = recomputed.update(batch)
    assert recorded.policy_version == recomputed.policy_version == updates
    assert recorded.master_hash() == recomputed.master_hash()
    assert first["policy/loss"] == second["policy/loss"]
    assert second["mismatch/logprob_abs_diff_max"] == 0.0
    if updates > 1:
        assert first["policy/ratio_max"] > 1.0


def test_every_update_has_a_denominator_of_its_own(model):
    batch = random_batch(7, num_rows=4)
    whole = replace(SETTINGS, updates_per_batch=2)
    halves = [
        replace(
            batch,
            sample_ids=batch.sample_ids[part],
            ids_BS=batch.ids_BS[part],
            length_B=batch.length_B[part],
            loss_mask_BS=batch.loss_mask_BS[part],
            behaviour_logprobs_BS=batch.behaviour_logprobs_BS[part],
            advantages_B=batch.advantages_B[part],
        )
        for part in (slice(0, 2), slice(2, 4))
    ]
    at_once, one_by_one = start(model, whole), start(model)
    metrics = at_once.update(batch)
    losses = [one_by_one.update(half)["policy/loss"] for half in halves]
    assert at_once.master_hash() == one_by_one.master_hash()
    assert metrics["policy/loss"] == pytest.approx(np.mean(losses))


def flat_groups():
    prompt = Prompt(0, np.array([5, 6], np.int32), "", "task", {})
    ids = np.array([7, 8, 2], np.int32)
    completions = [
        Completion(0, i, "g", prompt.ids, ids, "", np.full(3, -4, np.float32), np.ones(3, bool),
                   "stop", np.array([[0, 0]]), 0, reward=0.7)
        for i in range(4)
    ]  # fmt: skip
    return [Group(prompt, completions)]


# BR-033
def test_a_batch_of_equal_rewards_changes_nothing_even_with_kl_and_momentum(model):
    rank = start(model, with_loss(kl_coef=0.1))
    rank.update(random_batch(8))
    before = rank.master_hash()
    options = {"temperature": 1.0, "advantage": "grpo", "truncated": "keep"}
    metrics = rank.update(build_batch(flat_groups(), skip_zero_variance=True, **options))
    assert rank.master_hash() == before
    assert (metrics["policy/loss"], metrics["optim/grad_norm"]) == (0.0, 0.0)
    assert (metrics["optim/update_skipped"], metrics["policy/version"]) == (0.0, 1.0)
    assert metrics["optim/update_empty"] == 1.0
    kept = rank.update(build_batch(flat_groups(), skip_zero_variance=False, **options))
    assert kept["optim/update_empty"] == 0.0
    assert kept["policy/pg_loss"] == 0.0
    assert kept["policy/kl_loss"] > 0.0


# BR-037
@pytest.mark.parametrize("where", ["behaviour_logprobs_BS", "advantages_B"])
def test_a_step_on_nan_is_skipped_counted_and_leaves_no_trace(model, where):
    disturbed, calm = start(model), start(model)
    broken = random_batch(9)
    place = (0, 5) if where.endswith("BS") else (0,)
    getattr(broken, where)[place] = np.nan
    for rank in (disturbed, calm):
        rank.update(random_batch(10))
    before = disturbed.master_hash()
    metrics = disturbed.update(broken)
    assert metrics["optim/update_skipped"] == 1.0
    assert metrics["optim/param_delta_frac"] == 0.0
    assert disturbed.master_hash() == before
    assert disturbed.policy_version == 1
    for rank in (disturbed, calm):
        rank.update(random_batch(11))
    assert disturbed.master_hash() == calm.master_hash()


def test_kl_is_measured_against_the_initial_weights(model):
    rank = start(model, with_loss(kl_coef=0.5))
    batch = on_policy(rank, random_batch(12))
    first = rank.update(batch)
    assert first["policy/kl_ref_k3"] == 0.0
    assert first["policy/loss"] == first["policy/pg_loss"]
    later = rank.update(batch)
    assert later["policy/kl_ref_k3"] > 0.0
    assert later["policy/loss"] == pytest.approx(later["policy/pg_loss"] + later["policy/kl_loss"])
    moved = rank.logprobs(batch)[batch.loss_mask_BS]
    again = rank.update(batch)
    mean_k1 = (moved - batch.behaviour_logprobs_BS[batch.loss_mask_BS]).mean()
    assert again["policy/kl_ref_k1"] == pytest.approx(mean_k1, abs=1e-6)


def test_warm_up_and_clipping_are_what_they_say(model):
    rank = start(model, with_optimizer(warmup_steps=3, grad_clip=0.1))
    metrics = [rank.update(random_batch(13)) for _ in range(4)]
    assert [m["optim/lr"] for m in metrics] == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3])
    assert metrics[0]["optim/grad_norm"] > 0.1
    assert metrics[0]["optim/grad_norm_clipped"] == 0.1


def test_weight_decay_acts_on_trained_matrices_only(model):
    plain, decayed = start(model), start(model, with_optimizer(weight_decay=10.0))
    initial = dict(start(model).policy.export("float32"))
    for rank in (plain, decayed):
        rank.update(random_batch(14))
    shrunk = dict(decayed.policy.export("float32"))
    for name, tensor in plain.policy.export("float32"):
        if "index_" in name or name.endswith("e_score_correction_bias"):
            assert torch.equal(shrunk[name], initial[name]), name
        elif tensor.ndim == 1:
            assert torch.equal(shrunk[name], tensor), name
        else:
            expected = tensor - 1e-3 * 10.0 * initial[name]
            torch.testing.assert_close(shrunk[name], expected, atol=1e-6, rtol=0, msg=name)


def test_the_share_of_changed_weights_is_counted_in_wire_dtype(model):
    still = with_optimizer(lr=1e-12)
    assert start(model, still).update(random_batch(15))["optim/param_delta_frac"] < 0.01
    in_fp32 = start(model).update(random_batch(15))["optim/param_delta_frac"]
    in_bf16 = start(model, replace(SETTINGS, dtype="bfloat16")).update(random_batch(15))
    assert 0 < in_bf16["optim/param_delta_frac"] < in_fp32 < 1


def test_supervised_steps_start_at_transformers_loss_and_learn(model):
    rank, batch = start(model), random_batch(17)
    oracle = transformers_model(CONFIG, dict(rank.policy.export("float32")))
    ids = torch.from_numpy(batch.ids_BS)
    labels = torch.where(torch.from_numpy(batch.loss_mask_BS), ids, -100)
    attention_mask = (torch.arange(WIDTH) < torch.from_numpy(batch.length_B)[:, None]).long()
    expected = oracle(ids, attention_mask=attention_mask, labels=labels).loss.item()
    arguments = (batch.ids_BS, batch.length_B, batch.loss_mask_BS)
    losses = [rank.sft_step(*arguments)["sft/loss"] for _ in range(10)]
    assert losses[0] == pytest.approx(expected, abs=1e-5)
    assert losses[-1] < losses[0] - 0.3
    assert rank.policy_version == 10
    with pytest.raises(ValueError, match="is empty"):
        rank.sft_step(batch.ids_BS, batch.length_B, np.zeros_like(batch.loss_mask_BS))


def test_a_mask_over_padding_is_refused(model):
    batch = random_batch(18)
    batch.loss_mask_BS[:, -1] = True
    with pytest.raises(ValueError, match="covers padding"):
        start(model).update(batch)


def test_random_weights_follow_the_seed(model):
    ranks = [TrainRank(replace(SETTINGS, seed=seed), 0, 1) for seed in (1, 1, 2)]
    for rank in ranks:
        rank.init_random(model, 0.02, 1.0, 0.01)
    hashes = [rank.master_hash() for rank in ranks]
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"old_logprobs": "none"}, "use 'behaviour'"), ({"updates_per_batch": 0}, "at least 1")],
)
def test_settings_that_make_no_sense_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SETTINGS, **change)


def test_greedy_accuracy_is_the_share_of_rows_that_greedy_decoding_produces(model):
    rank = start(model)
    policy = rank.policy
    prompts = [[5, 6, 7], [8, 9], [3, 4, 5, 6]]
    rows = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(4):
            hidden = policy.hidden_states(torch.tensor(ids), Packing.of([len(ids)], "cpu"))
            ids.append(int((hidden[-1] @ policy.model.lm_head.weight.T).argmax()))
        rows.append(ids)
    rows[1][-2] = (rows[1][-2] + 1) % 90 or 1  # one answer is not what greedy decoding says
    length_B = np.array([len(row) for row in rows])
    ids_BS = np.zeros((3, max(length_B)), np.int64)
    mask_BS = np.zeros(ids_BS.shape, bool)
    for b, row in enumerate(rows):
        ids_BS[b, : len(row)] = row
        mask_BS[b, len(row) - 4 : len(row)] = True
    assert rank.greedy_accuracy(ids_BS, length_B, mask_BS) == pytest.approx(2 / 3)
