import pytest
import torch
from torch import Tensor

from inference.kernels.qk_norm_rope import kernel, qk_norm_rope, reference
from inference.kernels.qk_norm_rope.function import QKNormRope

SHAPES = {
    "one-row": (1, 1, 8, 4),
    "tiles-end-early": (13, 3, 8, 4),
    "tokens-fill-tiles": (4, 16, 16, 8),
    "no-rest": (9, 2, 8, 8),
    "odd-widths": (7, 5, 18, 6),
    "long-rest": (3, 2, 34, 8),
}


def case(shape, device, dtype=torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens, num_heads, head_dim, rotary_dim = shape
    angles = torch.randn(num_tokens, rotary_dim // 2, device=device) * 3
    x = torch.randn(num_tokens, num_heads, head_dim, dtype=dtype, device=device)
    weight = torch.randn(head_dim, dtype=dtype, device=device)
    return x, weight, torch.cat([angles.cos(), angles.sin()], -1)


def check(op, x: Tensor, weight: Tensor, cos_sin: Tensor, seed: Tensor, rtol, eps=1e-6) -> None:
    """Result and gradients of `op` against the reference's in FP64."""
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    out = op(*leaves, cos_sin, eps)
    exact_out = reference.qk_norm_rope(*exact, cos_sin, eps)
    found = [out, *torch.autograd.grad(out, leaves, seed)]
    wanted = [exact_out, *torch.autograd.grad(exact_out, exact, seed.double())]
    for value, right in zip(found, wanted, strict=True):
        assert value.dtype == x.dtype
        atol = rtol * float(right.detach().abs().max())
        torch.testing.assert_close(value.double(), right, rtol=rtol, atol=atol)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_equals_the_reference(kernel_device, shape):
    args = case(shape, kernel_device)
    check(QKNormRope.apply, *args, torch.randn_like(args[0]), 1e-5)


def test_half_precision_is_rounded_once(kernel_device):
    args = case(SHAPES["tiles-end-early"], kernel_device, torch.float16)
    check(QKNormRope.apply, *args, torch.randn_like(args[0]), 2.0**-10)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, for rows that are not stored
def test_an_eps_of_zero_lets_no_nan_in_from_past_the_end(kernel_device):
    args = case(SHAPES["tiles-end-early"], kernel_device)
    check(QKNormRope.apply, *args, torch.randn_like(args[0]), 1e-5, eps=0.0)


def test_a_program_sums_several_tiles(kernel_device, monkeypatch):
    launch = kernel.BACKWARD._replace(rows=2)
    monkeypatch.setattr(kernel, "BACKWARD", launch)
    args = case((9, 3, 8, 4), kernel_device)
    check(QKNormRope.apply, *args, torch.randn_like(args[0]), 1e-5)


def test_heads_of_a_wider_matrix_and_gradients_in_another_order_are_read_in_place(kernel_device):
    _, weight, cos_sin = case((6, 2, 8, 4), kernel_device)
    wide = torch.randn(6, 40, device=kernel_device)
    x = wide[:, 10:26].unflatten(1, (2, 8)).detach()
    assert not x.is_contiguous()
    check(QKNormRope.apply, x, weight, cos_sin, torch.randn(2, 6, 8).transpose(0, 1).to(x), 1e-5)
    check(QKNormRope.apply, x, weight, cos_sin, torch.randn(8, 6, 2).permute(1, 2, 0).to(x), 1e-5)
    with pytest.raises(ValueError, match="the head dim has stride 2, needs 1"):
        kernel.qk_norm_rope(wide[:, :32].unflatten(1, (2, 16))[..., ::2], weight, cos_sin, 1e-6)


def test_a_frozen_weight_gets_no_gradient(kernel_device):
    x, weight, cos_sin = case((5, 2, 8, 4), kernel_device)
    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    seed = torch.randn_like(x)
    x.requires_grad_()
    QKNormRope.apply(x, weight, cos_sin, 1e-6).backward(seed)
    QKNormRope.apply(*leaves, cos_sin, 1e-6).backward(seed)
    assert weight.grad is None
    assert torch.equal(x.grad, leaves[0].grad)


def test_no_rows(kernel_device):
    x, weight, cos_sin = case((0, 2, 8, 4), kernel_device)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    out = QKNormRope.apply(*leaves, cos_sin, 1e-6)
    assert out.shape == (0, 2, 8)
    out.sum().backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [64, 4, 1])
def test_equals_the_reference_at_the_sizes_of_m3(cuda, num_heads):
    x, weight, cos_sin = case((700, num_heads, 128, 64), cuda, torch.bfloat16)
    seed = torch.randn_like(x)

    def op(*args):
        return qk_norm_rope(*args[:-1], eps=args[-1])

    check(op, x, weight, cos_sin, seed, 2.0**-7)
    with torch.no_grad():
        runs = [kernel.qk_norm_rope_backward(x, weight, cos_sin, 1e-6, seed, True) for _ in "12"]
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])
