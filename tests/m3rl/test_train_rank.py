"""TrainRank alone and, through this file's own command line, as two processes over gloo."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from m3rl.checkpoint import CheckpointError
from m3rl.grpo.batch import build_batch
from m3rl.grpo.loss import LossSettings
from m3rl.optimizer import OptimizerSettings
from m3rl.train_rank import RankSettings, TrainRank
from m3rl.types import Completion, Group, Prompt, TrainBatch
from tests.tiny_models import random_checkpoint, tiny_config, transformers_model

CONFIG = tiny_config(num_hidden_layers=3)
WIDTH = 24

SETTINGS = RankSettings(
    loss=LossSettings(
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=None,
        kl_coef=0.0,
        kl_estimator="k3",
        importance_cap=2.0,
    ),
    optimizer=OptimizerSettings(
        lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, grad_clip=1.0, warmup_steps=0
    ),
    dtype="float32",
    attention="sdpa",
    replay_routing=False,
    micro_batch_tokens=60,
    old_logprobs="behaviour",
    updates_per_batch=1,
    seed=0,
    num_threads=1,
    timeout_s=60,
)


def with_loss(**changes):
    return replace(SETTINGS, loss=replace(SETTINGS.loss, **changes))


def with_optimizer(**changes):
    return replace(SETTINGS, optimizer=replace(SETTINGS.optimizer, **changes))


def random_batch(seed, num_rows=7, num_prompt=5):
    rng = np.random.default_rng(seed)
    length_B = rng.integers(num_prompt + 1, WIDTH + 1, num_rows)
    place_S = np.arange(WIDTH)
    mask = (place_S >= num_prompt) & (place_S < length_B[:, None])
    mask[0, num_prompt + 1 :: 3] = False  # tokens of a tool
    ids = np.where(place_S < length_B[:, None], rng.integers(1, 97, (num_rows, WIDTH)), 0)
    logprobs = np.where(mask, -rng.uniform(3, 6, mask.shape), 0).astype(np.float32)
    advantages = rng.normal(size=num_rows).astype(np.float32)
    samples = [(row, 0) for row in range(num_rows)]
    return TrainBatch(
        samples, ids, length_B, mask, logprobs, advantages, 1.0, denominator=float(mask.sum())
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    random_checkpoint(path, CONFIG, seed=0)
    return path


def start(model, settings=SETTINGS):
    rank = TrainRank(settings, 0, 1)
    rank.load_initial(model)
    return rank


def on_policy(rank, batch):
    batch.behaviour_logprobs_BS = rank.logprobs(batch)
    return batch


def gradients(rank, batch, rows=None):
    """Summed gradient of one optimizer step, which is not taken."""
    rows = np.arange(len(batch.sample_ids)) if rows is None else rows
    taken = {}

    def keep(loss):
        for name, parameter in rank.policy.named_parameters():
            if parameter.grad is not None:
                taken[name] = parameter.grad.clone()
                parameter.grad = None
        return {"loss": loss}

    real, rank._optimizer.step = rank._optimizer.step, keep
    try:
        rank._step(batch, rows, rank._grpo_loss_of(batch, rows, batch.behaviour_logprobs_BS), None)
    finally:
        rank._optimizer.step = real
    return taken


def assert_close_gradients(actual, expected):
    """FP32 sums in another order: 1e-6 of the largest gradient of the tensor."""
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        atol = 1e-6 * max(1.0, grad.abs().max().item())
        torch.testing.assert_close(actual[name], grad, atol=atol, rtol=1e-5, msg=name)


@pytest.mark.parametrize("tokens", [1, 25, 50, 10_000])
def test_the_gradient_does_not_depend_on_the_micro_batch_split(model, tokens):
    batch = random_batch(0)
    whole = gradients(start(model, replace(SETTINGS, micro_batch_tokens=72)), batch)
    split = gradients(start(model, replace(SETTINGS, micro_batch_tokens=tokens)), batch)
    assert_close_gradients(split, whole)
    assert sum(g.abs().sum() for g in whole.values()) > 0


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
        settings = replace(settings, micro_batch_tokens=1)
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


def test_a_batch_of_equal_rewards_changes_nothing_even_with_kl_and_momentum(model):
    rank = start(model, with_loss(kl_coef=0.1))
    rank.update(random_batch(8))
    before = rank.master_hash()
    options = {"temperature": 1.0, "advantage": "grpo", "truncated": "keep"}
    metrics = rank.update(build_batch(flat_groups(), skip_zero_variance=True, **options))
    assert rank.master_hash() == before
    assert (metrics["policy/loss"], metrics["optim/grad_norm"]) == (0.0, 0.0)
    assert (metrics["optim/update_skipped"], metrics["policy/version"]) == (0.0, 1.0)
    kept = rank.update(build_batch(flat_groups(), skip_zero_variance=False, **options))
    assert kept["policy/pg_loss"] == 0.0
    assert kept["policy/kl_loss"] > 0.0


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


def test_recorded_routing_is_compared_and_replayed(model):
    batch = random_batch(16)
    shape = (2, 2)  # MoE layers, experts per token
    rng = np.random.default_rng(0)
    batch.routing = [
        np.stack([rng.permutation(8)[:2] for _ in range((n - 1) * 2)]).reshape(n - 1, *shape)
        for n in batch.length_B
    ]
    batch.routing = [r.astype(np.uint8) for r in batch.routing]
    compared = start(model).update(batch)
    assert 0 < compared["m3/router_agreement"] < 0.6
    assert compared["m3/router_replay_coverage"] == 0.0
    rank = start(model, replace(SETTINGS, replay_routing=True))
    replayed = rank.update(batch)
    assert replayed["policy/loss"] != compared["policy/loss"]
    total = int(batch.length_B.sum())
    assert replayed["m3/router_replay_coverage"] == pytest.approx(1 - 7 / total)
    batch.routing[3] = None
    partly = start(model, replace(SETTINGS, replay_routing=True)).update(batch)
    assert partly["m3/router_replay_coverage"] < replayed["m3/router_replay_coverage"]


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


def test_stopped_and_resumed_is_bit_for_bit_uninterrupted(model, tmp_path):
    settings = replace(with_optimizer(warmup_steps=4), updates_per_batch=2)
    straight = start(model, settings)
    for seed in range(4):
        straight.update(random_batch(seed))

    stopped = start(model, settings)
    stopped.save(tmp_path / "at_0")
    for seed in range(2):
        stopped.update(random_batch(seed))
    torch.rand(3)
    np.random.rand(3)
    stopped.save(tmp_path / "at_2")
    expected = torch.rand(2).tolist(), np.random.rand(2).tolist()

    resumed = start(model, settings)
    assert resumed.load(tmp_path / "at_2") == resumed.policy_version == 4
    assert (torch.rand(2).tolist(), np.random.rand(2).tolist()) == expected
    for seed in range(2, 4):
        resumed.update(random_batch(seed))
    assert resumed.master_hash() == straight.master_hash()

    from_the_beginning = start(model, settings)
    assert from_the_beginning.load(tmp_path / "at_0") == 0
    for seed in range(4):
        from_the_beginning.update(random_batch(seed))
    assert from_the_beginning.master_hash() == straight.master_hash()


def test_a_checkpoint_is_a_model_path_and_keeps_the_bias_of_now(model, tmp_path):
    rank = start(model)
    rank.update(random_batch(0))
    bias = rank.policy.model.model.layers[1].mlp.gate.e_score_correction_bias
    with torch.no_grad():
        bias.copy_(torch.arange(8) * 0.1 + 0.1234567)
    rank.save(tmp_path / "saved")
    again = start(tmp_path / "saved")
    assert again.master_hash() == rank.master_hash()
    saved = again.wire_tensor("model.layers.1.block_sparse_moe.e_score_correction_bias")
    assert torch.equal(saved, bias)
    assert (tmp_path / "saved" / "config.json").read_bytes() == (model / "config.json").read_bytes()


def test_checkpoints_of_other_models_or_rank_counts_are_refused(model, tmp_path):
    rank = start(model)
    rank.save(tmp_path / "saved")
    raw = json.loads((tmp_path / "saved" / "config.json").read_text())
    raw["text_config"]["rope_theta"] = 10000
    (tmp_path / "saved" / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="is another model than"):
        rank.load(tmp_path / "saved")
    rank.save(tmp_path / "of_two")
    (tmp_path / "of_two" / "ranks" / "00001.pt").touch()
    with pytest.raises(CheckpointError, match=r"resume it with train\.num_ranks=2"):
        rank.load(tmp_path / "of_two")


def test_random_weights_follow_the_seed(model):
    ranks = [TrainRank(replace(SETTINGS, seed=seed), 0, 1) for seed in (1, 1, 2)]
    for rank in ranks:
        rank.init_random(model)
    hashes = [rank.master_hash() for rank in ranks]
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"old_logprobs": "none"}, "use 'behaviour'"), ({"updates_per_batch": 0}, "at least 1")],
)
def test_settings_that_make_no_sense_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SETTINGS, **change)


# Two ranks. With one row the second rank has none. Adam's first step is lr * g / (|g| + eps): the
# eps keeps it from giving gradients that are rounding noise a step of full size.
TWO_RANKS = with_optimizer(eps=1e-4)
ROWS = {0: 7, 1: 3, 2: 1, 3: 7}


def two_rank_batches():
    return [random_batch(20 + step, num_rows=rows) for step, rows in ROWS.items()]


def play_rank(rank_id, world_size, model, out):
    """A rank's whole life, run as a process: a straight run, or its second half after a resume."""
    rank = TrainRank(TWO_RANKS, rank_id, world_size, f"file://{out}/meet")
    rank.load_initial(model)
    batches = two_rank_batches()
    if (out / "saved").exists():
        rank.load(out / "saved")
        for batch in batches[2:]:
            rank.update(batch)
        record = {"resumed_hash": rank.master_hash(), "version": rank.policy_version}
    else:
        grads = gradients(rank, batches[0])
        rank._group.sum_gradients(_with_grads(rank, grads))
        torch.save({n: p.grad for n, p in rank.policy.named_parameters()}, out / f"grad{rank_id}")
        for p in rank.policy.parameters():
            p.grad = None
        logprobs = rank.logprobs(batches[0])
        metrics = []
        for step, batch in enumerate(batches):
            metrics.append(rank.update(batch))
            if step == 0:
                torch.save(dict(rank.policy.export("float32")), out / f"weights{rank_id}")
            if step == 1:
                (out / "saving").mkdir(exist_ok=True)
                rank.save(out / "saving")
        broken = random_batch(40)
        broken.advantages_B[0] = np.nan
        skipped = rank.update(broken)["optim/update_skipped"]
        record = {
            "hash": rank.master_hash(),
            "metrics": metrics,
            "logprobs": logprobs.tolist(),
            "skipped": skipped,
            "neighbours": sorted({"ray", "wandb", "vllm"} & set(sys.modules)),
        }
    (out / f"record{rank_id}.json").write_text(json.dumps(record))
    rank.close()


def _with_grads(rank, grads):
    parameters = dict(rank.policy.named_parameters())
    for name, grad in grads.items():
        parameters[name].grad = grad
    return [p for p in parameters.values() if p.requires_grad]


def run_two_ranks(model, out):
    (out / "meet").unlink(missing_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    command = [sys.executable, "-W", "ignore", __file__, str(model), str(out)]
    processes = [subprocess.Popen([*command, str(r)], env=environment) for r in range(2)]
    try:
        codes = [process.wait(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0]
    return [json.loads((out / f"record{r}.json").read_text()) for r in range(2)]


@pytest.fixture(scope="module")
def two_ranks(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("two_ranks")
    return out, run_two_ranks(model, out)


def test_two_ranks_have_the_gradient_of_one(model, two_ranks):
    out, _ = two_ranks
    expected = gradients(start(model), two_rank_batches()[0])
    for rank in range(2):
        summed = {n: g for n, g in torch.load(out / f"grad{rank}").items() if g is not None}
        assert_close_gradients(summed, expected)


def test_two_ranks_take_the_step_of_one(model, two_ranks):
    out, _ = two_ranks
    alone = start(model, TWO_RANKS)
    alone.update(two_rank_batches()[0])
    first, second = (torch.load(out / f"weights{rank}") for rank in range(2))
    for name, tensor in alone.policy.export("float32"):
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], tensor, atol=1e-6, rtol=0, msg=name)


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


if __name__ == "__main__":
    play_rank(int(sys.argv[3]), 2, Path(sys.argv[1]), Path(sys.argv[2]))
