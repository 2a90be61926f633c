from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLExperts

from inference.kernels.experts_mlp import experts_mlp
from inference.kernels.mxfp8 import MXFP8Tensor, dequantize, quantize

ALPHA, LIMIT = 1.702, 2.0
"""A limit that many of these activations reach."""


def case(num_tokens: int, *, experts: int = 5, choices: int = 3, hidden: int = 12, width: int = 7):
    """(x, ids, weights, gate_up, down) in FP64, every float one with a gradient."""
    generator = torch.Generator().manual_seed(num_tokens)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, gate_up = randn(num_tokens, hidden), randn(experts, 2 * width, hidden)
    ids = torch.rand(num_tokens, experts, generator=generator).topk(choices).indices.int()
    weights, down = randn(num_tokens, choices), randn(experts, hidden, width)
    floats = [tensor.requires_grad_() for tensor in (x, weights, gate_up, down)]
    return floats[0], ids, *floats[1:]


def run(x, ids, weights, gate_up, down) -> Tensor:
    return experts_mlp(x, ids, weights, gate_up, down, alpha=ALPHA, limit=LIMIT)


def transformers_eager(x, ids, weights, gate_up, down) -> Tensor:
    """-1 is expert E there."""
    num_experts, double_width, hidden = gate_up.shape
    config = SimpleNamespace(
        num_local_experts=num_experts,
        hidden_size=hidden,
        intermediate_size=double_width // 2,
        swiglu_limit=LIMIT,
        swiglu_alpha=ALPHA,
        _experts_implementation="eager",
    )
    experts = MiniMaxM3VLExperts(config)
    del experts.gate_up_proj, experts.down_proj
    experts.gate_up_proj, experts.down_proj = gate_up, down
    return experts(x, torch.where(ids < 0, num_experts, ids).long(), weights)


def agree_with_transformers(*arguments: Tensor) -> None:
    floats = [tensor for tensor in arguments if tensor.requires_grad]
    found, wanted = run(*arguments), transformers_eager(*arguments)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(found)
    found_grads = torch.autograd.grad(found, floats, grad)
    for a, b in zip(found_grads, torch.autograd.grad(wanted, floats, grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_tokens", [1, 2, 63])
def test_output_and_gradients_are_those_of_transformers(num_tokens):
    agree_with_transformers(*case(num_tokens))


def test_choices_of_nobody_here_add_nothing():
    x, ids, *rest = case(40)
    agree_with_transformers(x, torch.where(torch.rand(ids.shape) < 0.5, -1, ids), *rest)


def test_experts_that_nobody_chose_have_gradient_zero():
    x, ids, weights, gate_up, down = case(30, experts=6)
    ids = torch.where((ids == 0) | (ids == 3) | (ids == 5), 1, ids)
    agree_with_transformers(x, ids, weights, gate_up, down)
    of_gate_up, of_down = torch.autograd.grad(
        run(x, ids, weights, gate_up, down).sum(), (gate_up, down)
    )
    for expert in (0, 3, 5):
        assert not of_gate_up[expert].any()
        assert not of_down[expert].any()


def test_all_tokens_may_choose_one_expert():
    x, ids, *rest = case(33)
    agree_with_transformers(x, torch.full_like(ids, 4), *rest)


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_without_any_row_all_is_zero_and_has_gradients(num_tokens):
    x, ids, weights, gate_up, down = case(num_tokens)
    out = run(x, torch.full_like(ids, -1), weights, gate_up, down)
    assert torch.equal(out, torch.zeros_like(x))
    for leaf, grad in zip(
        (x, weights, gate_up, down),
        torch.autograd.grad(out.sum(), (x, weights, gate_up, down)),
        strict=True,
    ):
        assert torch.equal(grad, torch.zeros_like(leaf))


def test_ids_may_be_int64():
    x, ids, *rest = case(9)
    assert torch.equal(run(x, ids.long(), *rest), run(x, ids, *rest))


def test_a_token_does_not_depend_on_what_is_beside_it():
    x, ids, weights, gate_up, down = (t.detach() for t in case(64))
    x, weights, gate_up, down = (t.float() for t in (x, weights, gate_up, down))
    together = run(x, ids, weights, gate_up, down)
    for first, end in ((0, 40), (40, 64)):
        part = slice(first, end)
        alone = run(x[part], ids[part], weights[part], gate_up, down)
        torch.testing.assert_close(alone, together[part], rtol=1e-5, atol=1e-5)


def test_bf16_is_rounded_once():
    arguments = [t.detach() for t in case(20)]
    arguments = [t.bfloat16() if t.is_floating_point() else t for t in arguments]
    wide = [t.float() if t.is_floating_point() else t for t in arguments]
    assert torch.equal(run(*arguments), run(*wide).bfloat16())


def test_frozen_mxfp8_experts_are_their_widened_weights():
    x, ids, weights, gate_up, down = case(21, hidden=64, width=32)
    frozen = [quantize(weight.detach().bfloat16()) for weight in (gate_up, down)]
    widened = [dequantize(*weight, torch.float32).double() for weight in frozen]
    found, wanted = run(x, ids, weights, *frozen), run(x, ids, weights, *widened)
    assert torch.equal(found, wanted)
    grads = [torch.autograd.grad(out.square().sum(), (x, weights)) for out in (found, wanted)]
    assert all(map(torch.equal, *grads))


def test_bad_arguments_are_refused():
    x, ids, weights, gate_up, down = case(4, hidden=32, width=32)
    with pytest.raises(ValueError, match=r"ids_TA holds .*needs -1..4"):
        run(x, ids + 5, weights, gate_up, down)
    with pytest.raises(ValueError, match="down_ECI has shape"):
        run(x, ids, weights, gate_up, down[..., :5])
    with pytest.raises(TypeError, match="down_ECI is float32, needs float64"):
        run(x, ids, weights, gate_up, down.float())
    frozen: MXFP8Tensor = quantize(down.detach().bfloat16())
    with pytest.raises(TypeError, match="one of gate_up and down is MXFP8"):
        run(x, ids, weights, gate_up, frozen)
