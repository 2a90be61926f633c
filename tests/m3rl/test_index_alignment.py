"""The loss of the index branch in a policy and in optimizer steps."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import m3rl.policy_layers
from inference.kernels.index_alignment import ALIGNMENT_LEVELS
from inference.kernels.packing import Packing
from m3rl.grpo.replay import Record, recorded_blocks
from m3rl.index_alignment import IndexLoss, IndexLossSettings
from m3rl.policy import Policy
from m3rl.rank_settings import RankSettings
from tests.m3rl.parallel_process import BATCH, batch_of, joined, learn, on_ranks
from tests.m3rl.rank_cases import CONFIG, SETTINGS, distance, gradients, random_batch, start
from tests.tiny_models import model_config, random_checkpoint

COEF = 0.5
NUM_SPARSE, NUM_HEADS = 2, 2
LENGTHS = [21, 13, 8, 1]


def trained(**changes) -> RankSettings:
    loss = IndexLossSettings(**({"coef": COEF} | changes))
    smooth = replace(SETTINGS.optimizer, eps=1e-4)
    return replace(SETTINGS, index_loss=loss, optimizer=smooth)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    random_checkpoint(path, CONFIG, seed=0)
    return path


def policy_of(model, **options):
    policy = Policy(model_config(CONFIG), dtype="float64", **options)
    policy.load(model)
    return policy


def packed(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids_T = torch.randint(1, 97, (sum(lengths),), generator=generator)
    return ids_T, Packing.of(lengths, "cpu")


def is_index(name):
    return ".indexer." in name


def of_index(grads):
    return {name: grad for name, grad in grads.items() if is_index(name)}


def backward(policy, lengths, settings, *, targets=None, num_tokens=None, num_rows=None):
    """(loss of the index branch in metrics, gradients by name) of one packed row."""
    ids_T, packing = packed(lengths)
    total = sum(lengths)
    loss = IndexLoss(settings, num_tokens or total, total if num_rows is None else num_rows)
    targets = torch.tensor([lengths[0] - 1]) if targets is None else targets
    logprobs, _ = policy(ids_T, packing, targets, temperature=1.0, index_loss=loss)
    policy.zero_grad(set_to_none=True)
    logprobs.sum().backward()
    grads = {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}
    return loss.metrics().get("m3/index_kl"), grads


@pytest.mark.parametrize("level", ALIGNMENT_LEVELS)
def test_gradients_are_those_of_the_loss_that_metrics_tell(model, level):
    policy = policy_of(model, trains_index=True)
    settings = IndexLossSettings(COEF, level)
    _, grads = backward(policy, LENGTHS, settings)
    # Only the last layer's: the choice of an earlier one would move the later ones.
    weights = policy.model.model.layers[-1].self_attn.indexer
    generator = torch.Generator().manual_seed(1)
    slope = 0.0
    step = 1e-6
    directions = {}
    for name, parameter in weights.named_parameters():
        directions[name] = torch.randn(parameter.shape, generator=generator).double()
        name_of = (
            f"model.model.layers.{len(policy.model.model.layers) - 1}.self_attn.indexer.{name}"
        )
        slope += float((grads[name_of] * directions[name]).sum())
    told = []
    for side in (1, -1):
        with torch.no_grad():
            for name, parameter in weights.named_parameters():
                parameter += side * step * directions[name]
        told.append(backward(policy, LENGTHS, settings)[0])
        with torch.no_grad():
            for name, parameter in weights.named_parameters():
                parameter -= side * step * directions[name]
    # The metric is a mean over layers, the loss is a sum.
    measured = (told[0] - told[1]) / (2 * step) * NUM_SPARSE * COEF
    assert abs(slope) > 1e-4
    assert slope == pytest.approx(measured, rel=1e-6)


@pytest.mark.parametrize("recomputes", [False, True])
def test_only_the_index_branch_feels_it(model, recomputes):
    options = {"activation_checkpointing": recomputes}
    frozen, free = policy_of(model, **options), policy_of(model, trains_index=True, **options)
    ids_T, packing = packed(LENGTHS)
    frozen(ids_T, packing, torch.tensor([20]), temperature=1.0)[0].sum().backward()
    without = {n: p.grad for n, p in frozen.named_parameters() if p.grad is not None}
    kl, grads = backward(free, LENGTHS, IndexLossSettings(COEF))
    assert not of_index(without)
    assert len(of_index(grads)) == NUM_SPARSE * 4
    assert all(grad.abs().max() > 0 for grad in of_index(grads).values())
    assert all(torch.equal(grads[name], grad) for name, grad in without.items())
    plain, of_plain = backward(
        policy_of(model, trains_index=True), LENGTHS, IndexLossSettings(COEF)
    )
    assert kl == plain
    assert distance(of_index(grads), of_index(of_plain)) == 0


def test_it_is_not_scaled_by_the_loss_that_it_rides_on(model):
    policy = policy_of(model, trains_index=True)
    kl, grads = backward(policy, LENGTHS, IndexLossSettings(COEF))
    no_targets = torch.empty(0, dtype=torch.int64)
    same, without_loss = backward(policy, LENGTHS, IndexLossSettings(COEF), targets=no_targets)
    assert kl == same > 0.01
    assert distance(of_index(without_loss), of_index(grads)) == 0
    assert not any(grad.any() for name, grad in without_loss.items() if not is_index(name))


def test_packing_does_not_matter(model):
    policy = policy_of(model, trains_index=True)
    settings = IndexLossSettings(COEF)
    kl, grads = backward(policy, LENGTHS, settings)
    ids_T, _ = packed(LENGTHS)
    summed, total = {}, 0.0
    for ids in ids_T.split(LENGTHS):
        loss = IndexLoss(settings, sum(LENGTHS), len(ids))
        packing, last = Packing.of([len(ids)], "cpu"), torch.arange(len(ids) - 1, len(ids) - 1)
        policy.zero_grad(set_to_none=True)
        policy(ids, packing, last, temperature=1.0, index_loss=loss)[0].sum().backward()
        total += loss.metrics()["m3/index_kl"]
        for name, parameter in policy.named_parameters():
            if is_index(name):
                summed[name] = summed.get(name, 0) + parameter.grad
    assert total == pytest.approx(kl, rel=1e-12)
    assert distance(summed, of_index(grads)) <= 1e-12


def test_filling_does_not_count(model):
    policy = policy_of(model, trains_index=True)
    settings = IndexLossSettings(COEF)
    kl, grads = backward(policy, [21], settings)
    filled, of_filled = backward(policy, [21, 9], settings, num_tokens=21, num_rows=21)
    assert filled == pytest.approx(kl, rel=1e-12)
    assert distance(of_index(of_filled), of_index(grads)) <= 1e-12


def test_in_bf16_gradients_reach_the_fp32_masters(model):
    policy = Policy(model_config(CONFIG), dtype="bfloat16", trains_index=True)
    policy.load(model)
    kl, grads = backward(policy, LENGTHS, IndexLossSettings(COEF))
    exact, expected = backward(
        policy_of(model, trains_index=True), LENGTHS, IndexLossSettings(COEF)
    )
    assert kl == pytest.approx(exact, rel=0.05)
    assert all(grad.dtype == torch.float32 for grad in of_index(grads).values())
    found = {name: grad.double() for name, grad in of_index(grads).items()}
    # Some choices differ, and with them hidden states of the later layer.
    assert distance(found, of_index(expected)) < 0.5


def test_filling_among_the_queries_of_a_rank_does_not_count():
    # Queries are tokens 3 and 4 of a row whose tokens from 4 on are filling.
    x, kl = torch.ones(2, 3, requires_grad=True), torch.tensor([[2.0, 4.0], [8.0, 8.0]])
    loss = IndexLoss(IndexLossSettings(COEF), num_tokens=10, num_rows=4)
    kl.requires_grad_()
    loss.attach(x, kl, 1, 3).sum().backward()
    assert kl.grad.tolist() == pytest.approx(np.array([[0.025, 0.025], [0, 0]]))
    assert x.grad.tolist() == [[1] * 3] * 2
    assert loss.metrics() == {"m3/index_kl": pytest.approx((2 + 4) / 2 / 10)}


def test_off_it_costs_no_op_and_the_index_branch_is_frozen(model, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the loss is off")

    monkeypatch.setattr(m3rl.policy_layers, "index_alignment", refuse)
    monkeypatch.setattr(IndexLoss, "attach", refuse)
    calls = []
    real = m3rl.policy_layers.index_heads
    monkeypatch.setattr(
        m3rl.policy_layers, "index_heads", lambda *args: calls.append(0) or real(*args)
    )
    rank = start(model, replace(SETTINGS, micro_batch_tokens=200))
    metrics = rank.update(random_batch(0))
    assert "m3/index_kl" not in metrics
    assert len(calls) == NUM_SPARSE, "one forward pass chooses blocks, and nothing else asks"
    assert not any(p.requires_grad for n, p in rank.policy.named_parameters() if is_index(n))


def test_steps_bring_the_index_branch_nearer(model):
    settings = replace(trained(), optimizer=replace(SETTINGS.optimizer, lr=3e-3))
    rank, batch = start(model, settings), random_batch(0)
    batch.advantages_B = np.zeros_like(batch.advantages_B)  # nothing else moves
    before = dict(rank.policy.wire_state())
    told = [rank.update(batch)["m3/index_kl"] for _ in range(12)]
    assert told[-1] < 0.7 * told[0]
    changed = {n for n, t in rank.policy.wire_state().items() if not torch.equal(t, before[n])}
    assert changed
    assert all(is_index(name) for name in changed)


def test_accumulation_does_not_matter(model):
    batch = batch_of(BATCH)
    whole = gradients(start(model, replace(trained(), micro_batch_tokens=200)), batch)
    parts = gradients(start(model, replace(trained(), micro_batch_tokens=24)), batch)
    assert distance(of_index(parts), of_index(whole)) <= 1e-6


def test_replayed_blocks_are_those_that_are_compared(model, monkeypatch):
    policy = policy_of(model, trains_index=True, replay_blocks=True)
    lengths = [24]
    record = np.zeros((23, NUM_SPARSE, NUM_HEADS, 2), np.int16)
    record[..., 1] = -1  # the first block alone
    shape = {"num_layers": NUM_SPARSE, "num_heads": NUM_HEADS, "topk_blocks": 2, "block_size": 4}
    blocks = recorded_blocks([record], lengths, **shape, device=torch.device("cpu"))
    seen = []
    real = m3rl.policy_layers.index_alignment
    monkeypatch.setattr(
        m3rl.policy_layers,
        "index_alignment",
        lambda *args, **options: seen.append(args[4]) or real(*args, **options),
    )
    ids_T, packing = packed(lengths)
    loss = IndexLoss(IndexLossSettings(COEF), 24, 24)
    options = {"temperature": 1.0, "record": Record(blocks=blocks), "index_loss": loss}
    policy(ids_T, packing, torch.tensor([23]), **options)
    assert len(seen) == NUM_SPARSE
    assert all((used[:23] == torch.tensor([0, -1])).all() for used in seen)


def test_supervised_steps_train_it_too(model):
    rank, batch = start(model, trained()), random_batch(0)
    before = {n: t.clone() for n, t in rank.policy.wire_state().items()}
    metrics = rank.sft_step(batch.ids_BS, batch.length_B, batch.loss_mask_BS)
    assert metrics["m3/index_kl"] > 0
    assert any(is_index(n) for n, t in rank.policy.wire_state().items() if (t != before[n]).any())


@pytest.mark.parametrize(
    ("num_ranks", "ep", "cp", "recomputes"), [(2, 1, 1, True), (2, 1, 2, False), (4, 2, 2, True)]
)
def test_ranks_have_the_gradient_of_one(model, num_ranks, ep, cp, recomputes):
    settings = replace(trained(), dtype="float64")
    alone = start(model, settings)
    expected, metrics = gradients(alone, batch_of(BATCH)), alone.update(batch_of(BATCH))
    shared = replace(settings, ep=ep, cp=cp, activation_checkpointing=recomputes)
    told = on_ranks(learn, num_ranks, model, shared)
    found = joined(told, ep)
    assert distance(found, expected) <= 1e-12
    assert distance(of_index(found), of_index(expected)) <= 1e-12
    for rank in told:
        assert rank["metrics"]["m3/index_kl"] == pytest.approx(metrics["m3/index_kl"], rel=1e-6)


def test_bad_settings():
    with pytest.raises(ValueError, match="coef=-1 must not be negative"):
        IndexLossSettings(-1)
    with pytest.raises(ValueError, match="level='page' is unknown"):
        IndexLossSettings(1.0, "page")
