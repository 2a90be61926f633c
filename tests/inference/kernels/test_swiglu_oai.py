import pytest
import torch

from inference.kernels.swiglu_oai import swiglu_oai

M3 = {"alpha": 1.702, "limit": 7.0}


# BR-065
@pytest.mark.parametrize(
    ("gate", "up", "expected"),
    [
        (1.0, 0.5, 1.26869),
        (10.0, -10.0, -41.99972),
        (-3.0, 2.0, -0.05421),
        (8.0, 8.0, 55.9996),
        (-10.0, 0.0, -4.06e-7),
    ],
)
def test_values_by_hand(gate: float, up: float, expected: float):
    out = swiglu_oai(torch.tensor([[gate, up]]), **M3)
    torch.testing.assert_close(out, torch.tensor([[expected]]), rtol=2e-5, atol=5e-6)


def test_all_gates_come_before_all_ups():
    gate, up = torch.randn(5, 3), torch.randn(5, 3)
    pairs = torch.stack([gate.flatten(), up.flatten()], -1)
    expected = swiglu_oai(pairs, **M3).view(5, 3)
    assert torch.equal(swiglu_oai(torch.cat([gate, up], -1), **M3), expected)


def test_alpha_limit_and_beta_are_the_ones_given():
    out = swiglu_oai(torch.tensor([[3.0, 5.0]]), alpha=0.0, limit=2.0, beta=-1.0)
    # min(3, 2) * sigmoid(0) * (clamp(5, 2) - 1)
    assert out.item() == 1.0


def test_bf16_is_rounded_once():
    gate_up = (torch.randn(63, 64) * 4).bfloat16()
    expected = swiglu_oai(gate_up.float(), **M3).bfloat16()
    assert torch.equal(swiglu_oai(gate_up, **M3), expected)


def test_gradients_stop_at_the_clamps():
    gate_up = torch.tensor([[8.0, 2.0, 2.0, 1.0, -9.0, 3.0]], requires_grad=True)
    swiglu_oai(gate_up, **M3).sum().backward()
    gate, up = torch.tensor([7.0, 2.0, 2.0]), torch.tensor([1.0, -7.0, 3.0])
    s = torch.sigmoid(1.702 * gate)
    d_gate = (up + 1) * s * (1 + 1.702 * gate * (1 - s)) * torch.tensor([0.0, 1.0, 1.0])
    d_up = gate * s * torch.tensor([1.0, 0.0, 1.0])
    torch.testing.assert_close(gate_up.grad, torch.cat([d_gate, d_up])[None])


def test_a_value_at_its_limit_passes_its_gradient_and_nan_stays():
    gate_up = torch.tensor([[7.0, 7.5, 1.0, -7.0]], requires_grad=True)
    swiglu_oai(gate_up, **M3).sum().backward()
    assert gate_up.grad[0, 0] != 0
    assert gate_up.grad[0, 1] == 0
    assert gate_up.grad[0, 3] != 0
    assert swiglu_oai(torch.tensor([[torch.nan, 1.0, 1.0, torch.nan]]), **M3).isnan().all()


def test_fp64_stays_fp64_and_its_gradients_are_those_of_differences():
    gate_up = (torch.randn(5, 12, dtype=torch.float64) * 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: swiglu_oai(x, alpha=1.7, limit=2.5), gate_up)


def test_an_odd_width_is_refused():
    with pytest.raises(ValueError, match="width 5 is not gates and as many ups"):
        swiglu_oai(torch.zeros(2, 5), **M3)
