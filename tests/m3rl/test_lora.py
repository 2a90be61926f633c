"""Adapters: gradients against autograd through merged weights, merging, freezing."""

from dataclasses import replace

import pytest
import torch

from m3rl.lora.settings import LoraSettings
from tests.m3rl.lora_cases import (
    ALL,
    CONFIG,
    LORA,
    TARGETS,
    logprobs,
    make,
    plain,
    product,
    sample,
    shake,
)
from tests.tiny_models import model_config, random_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    random_checkpoint(path, CONFIG, seed=0)
    return path


def gradients_through_merged_weights(path, policy, weight_T):
    """dA and dB by the chain rule from dW of a plain policy that holds the merged weights."""
    merged = plain(path, "float64")
    state = merged.model.state_dict()
    for name in policy.adapters.names:
        state[name] += product(policy.adapters[name])
    (logprobs(merged) * weight_T).sum().backward()
    parameters = dict(merged.model.named_parameters())
    grads = {}
    for name in policy.adapters.names:
        adapter, grad = policy.adapters[name], parameters[name].grad
        grads[name] = (
            adapter.scale * adapter.B.detach().mT @ grad,
            adapter.scale * grad @ adapter.A.detach().mT,
        )
    return grads


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lora", TARGETS, ids=["attention", "all"])
def test_gradients_are_those_through_the_merged_weights(model, lora, checkpointing):
    policy = make(model, "float64", lora, activation_checkpointing=checkpointing)
    shake(policy)
    weight_T = torch.linspace(-1, 2, len(sample()[2]), dtype=torch.float64)
    (logprobs(policy) * weight_T).sum().backward()
    expected = gradients_through_merged_weights(model, policy, weight_T)
    for name, (grad_a, grad_b) in expected.items():
        adapter = policy.adapters[name]
        for actual, grad in ((adapter.A.grad, grad_a), (adapter.B.grad, grad_b)):
            assert grad.norm() > 0, name
            assert (actual - grad).norm() <= 1e-11 * grad.norm(), name


def test_gradients_in_bf16_are_close_to_those_in_fp32(model):
    grads = []
    for dtype in ("float32", "bfloat16"):
        policy = make(model, dtype)
        shake(policy)
        logprobs(policy).sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in policy.adapters.parameters()]))
    assert all(grad.dtype == torch.float32 for grad in grads)
    assert (grads[1] - grads[0]).norm() < 0.2 * grads[0].norm()


@pytest.mark.parametrize("lora", TARGETS, ids=["attention", "all"])
def test_adapters_alone_are_trained(model, lora):
    policy = make(model, lora=lora)
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert trained
    assert all(name.startswith("adapters.") for name in trained)
    kinds = {name.split("/")[3] for name in trained}
    assert kinds == ({"self_attn", "mlp"} if lora.targets == ALL else {"self_attn"})
    assert not any("indexer" in name for name in trained)
    logprobs(policy).sum().backward()
    assert {name for name, p in policy.named_parameters() if p.grad is not None} == trained


def test_a_new_policy_is_its_base_and_a_is_drawn_from_the_seed(model):
    first, again, other = (make(model, lora=replace(LORA, seed=s)) for s in (1, 1, 2))
    assert torch.equal(logprobs(first), logprobs(plain(model)))
    assert first.master_hash() == again.master_hash() != other.master_hash()
    name = "model.layers.1.self_attn.q_proj.weight"
    draws = first.adapters[name].A.detach()
    assert draws.abs().max() <= 32**-0.5  # of 32 channels
    assert draws.std().item() == pytest.approx((32 * 3) ** -0.5, rel=0.15)
    assert not torch.equal(draws, other.adapters[name].A)
    assert not torch.equal(draws, first.adapters["model.layers.2.self_attn.q_proj.weight"].A)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", TARGETS, ids=["attention", "all"])
def test_merged_weights_are_base_plus_product_rounded_once(model, lora, dtype):
    policy = make(model, dtype, lora)
    before = dict(policy.export("float32"))
    before = {name: tensor.clone() for name, tensor in before.items()}
    shake(policy)
    after = dict(policy.export())
    changed = set()
    for name, tensor in after.items():
        place = policy._placement[name]
        if place.param not in policy.adapters.names:
            assert torch.equal(tensor, before[name].to(tensor.dtype)), name
            continue
        changed.add(name)
        added = product(policy.adapters[place.param])[place.index]
        expected = (before[name].double() + added).to(policy.dtype)
        assert torch.equal(tensor, expected), name
        assert not torch.equal(tensor.float(), before[name]), name
    assert set(policy.fixed_names) == set(after) - changed
    assert len(changed) == (12 if lora.targets == ("attention",) else 12 + 2 * (3 + 3 * 8))


def test_the_forward_pass_computes_with_the_bits_that_are_sent(model):
    policy = make(model, "bfloat16")
    shake(policy)
    receiver = plain(model, "bfloat16")
    for name in (slot.name for slot in policy.layout()):
        receiver._master(name).copy_(policy.wire_view(name))
    assert torch.equal(logprobs(policy), logprobs(receiver))


def test_a_part_merged_alone_has_the_bits_of_the_whole(model):
    """As ranks do that own some rows, or some experts."""
    policy = make(model, "bfloat16", replace(LORA, targets=ALL))
    shake(policy)
    for name in policy.adapters.names:
        merged, bounds = policy._own(name)
        base, adapter = policy.adapters.base(name), policy.adapters[name]
        cuts = [slice(size // 4, size - 1) for size in base.shape[:-1]]
        part = torch.empty_like(merged[tuple(cuts)])
        edges = [(cut.start, cut.stop) for cut in cuts]
        adapter.merge(base[tuple(cuts)], part, (*edges, bounds[-1]))
        assert torch.equal(part, merged[tuple(cuts)]), name


def test_the_reference_is_the_base_and_leaves_no_trace(model):
    policy = make(model, "bfloat16")
    shake(policy)
    reference, before = policy.frozen_copy(), logprobs(policy)
    base = reference(*sample(), temperature=1.0)[0]
    assert torch.equal(base, logprobs(plain(model, "bfloat16")))
    assert not base.requires_grad
    assert not torch.equal(base, before)
    assert torch.equal(logprobs(policy), before)
    # A reference pass between forward and backward of the policy does not change the gradient.
    before.sum().backward()
    alone = make(model, "bfloat16")
    shake(alone)
    logprobs(alone).sum().backward()
    for actual, expected in zip(
        policy.adapters.parameters(), alone.adapters.parameters(), strict=True
    ):
        assert torch.equal(actual.grad, expected.grad)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"targets": ()}, "use some of"),
        ({"targets": ("mlp",)}, r"targets=\['mlp'\]; use some of"),
        ({"rank": 0}, "rank=0 must be at least 1"),
        ({"targets": ("experts",), "mxfp8_experts": True}, "quantised anew in every step"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        LoraSettings(**({"rank": 4, "alpha": 8.0} | changes))


def test_adapters_without_a_base_are_refused(model):
    policy = make(model)
    with pytest.raises(ValueError, match="need a trained base"):
        policy.init_random(0, std=0.1, embedding_std=0.1, bias_std=0.1)
    assert policy.config == model_config(CONFIG)
