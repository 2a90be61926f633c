import pytest
import torch

from inference.kernels.rms_norm import rms_norm


def test_the_gain_is_one_plus_the_weight():
    y = rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([0.0, 1.0]), 0.0)
    # rms = sqrt(12.5); 3 / rms and 2 * 4 / rms
    torch.testing.assert_close(y, torch.tensor([[0.8485281, 2.2627417]]))


def test_a_zero_weight_gives_rows_of_unit_mean_square():
    y = rms_norm(torch.randn(63, 48) * 7, torch.zeros(48), 0.0)
    torch.testing.assert_close(y.square().mean(-1), torch.ones(63))


def test_eps_is_added_to_the_mean_square():
    y = rms_norm(torch.zeros(1, 4), torch.zeros(4), 1e-6)
    assert torch.equal(y, torch.zeros(1, 4))
    y = rms_norm(torch.full((1, 4), 1e-3), torch.zeros(4), 1e-6)
    torch.testing.assert_close(y, torch.full((1, 4), 0.5**0.5))


def test_bf16_is_rounded_once():
    x, weight = torch.randn(65, 96).bfloat16(), torch.randn(96).bfloat16()
    rms = (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    exact = x.double() / rms * (1 + weight.double())
    error = (rms_norm(x, weight, 1e-6).double() - exact).abs()
    # half a unit in the last place of BF16, and a little for FP32 inside
    assert (error <= exact.abs() * 2.0**-8 * 1.01).all()


def test_the_norm_reads_the_stream_as_stored():
    x = torch.full((1, 4), 2.0**-10, dtype=torch.bfloat16)
    residual = torch.tensor([[1.0, 2.0, -1.0, 0.5]], dtype=torch.bfloat16)
    y, stream = rms_norm(x, torch.zeros(4, dtype=torch.bfloat16), 1e-6, residual)
    assert torch.equal(stream, torch.tensor([[1.0, 2.0, -1.0, 0.5]]).bfloat16() + x)
    assert torch.equal(y, rms_norm(stream, torch.zeros(4, dtype=torch.bfloat16), 1e-6))


def test_gradients_are_those_of_the_formula():
    x = torch.randn(5, 6, requires_grad=True)
    weight = torch.randn(6, requires_grad=True)
    dy = torch.randn(5, 6)
    rms_norm(x, weight, 1e-6).backward(dy)
    r = (x.detach().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    x_hat, gain = x.detach() * r, 1 + weight.detach()
    dx = r * (gain * dy - x_hat * (gain * dy * x_hat).mean(-1, keepdim=True))
    torch.testing.assert_close(x.grad, dx)
    torch.testing.assert_close(weight.grad, (dy * x_hat).sum(0))


def test_a_weight_of_another_width_is_refused():
    with pytest.raises(ValueError, match=r"weight_C has shape \(5,\), needs \(4,\)"):
        rms_norm(torch.zeros(2, 4), torch.zeros(5), 1e-6)


@pytest.mark.parametrize("has_residual", [False, True])
def test_fp64_stays_fp64_and_its_gradients_are_those_of_differences(has_residual):
    shapes = [(3, 6), (6,), (3, 6)][: 2 + has_residual]
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(lambda x, weight, *r: rms_norm(x, weight, 0.1, *r), leaves)
