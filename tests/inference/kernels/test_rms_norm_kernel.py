import pytest
import torch

from inference.kernels.rms_norm import backward_kernel, kernel, reference, rms_norm
from inference.kernels.rms_norm.function import RMSNorm


def agree(found: torch.Tensor, wanted: torch.Tensor) -> None:
    if wanted.dtype == torch.float32:
        torch.testing.assert_close(found, wanted, rtol=2e-6, atol=1e-6)
    else:
        # FP32 sums in another order turn a rounding at most to the neighbouring number.
        torch.testing.assert_close(found, wanted, rtol=torch.finfo(wanted.dtype).eps, atol=0)


@pytest.mark.parametrize("shape", [(1, 4), (3, 48), (2, 3, 129), (5, 1024)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_equals_the_reference(kernel_device, shape, dtype):
    x, residual = (torch.randn(shape, dtype=dtype, device=kernel_device) * 3 for _ in "xr")
    weight = torch.randn(shape[-1], dtype=dtype, device=kernel_device)
    agree(kernel.rms_norm(x, weight, 1e-6, None), reference.rms_norm(x, weight, 1e-6, None))
    y, stream = kernel.rms_norm(x, weight, 1e-6, residual)
    expected_y, expected_stream = reference.rms_norm(x, weight, 1e-6, residual)
    assert torch.equal(stream, expected_stream)
    agree(y, expected_y)


def test_rows_of_a_wider_matrix_are_read_in_place(kernel_device):
    wide = torch.randn(5, 100, device=kernel_device)
    weight = torch.randn(40, device=kernel_device)
    x, residual = wide[:, 8:48], wide[:, 50:90]
    y, stream = kernel.rms_norm(x, weight, 1e-6, residual)
    agree(y, reference.rms_norm(x, weight, 1e-6, residual)[0])
    assert torch.equal(stream, x + residual)
    with pytest.raises(ValueError, match="columns have stride 5"):
        kernel.rms_norm(torch.zeros(4, 5, device=kernel_device).T, weight[:4], 1e-6, None)


def test_no_rows(kernel_device):
    x, weight = torch.zeros(0, 8, device=kernel_device), torch.zeros(8, device=kernel_device)
    assert kernel.rms_norm(x, weight, 1e-6, None).shape == (0, 8)


def leaves_of(*shapes, dtype, device):
    return [torch.randn(s, dtype=dtype, device=device, requires_grad=True) for s in shapes]


def check_gradients(norm, x, weight, residual, eps=1e-6, rtol=1e-5):
    """Of `norm` against those of the reference in FP64; all leaves that ask for one get one."""
    leaves = [x, weight] if residual is None else [x, weight, residual]
    exact = [leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in leaves]
    outs, exact_outs = (
        fn(*ts[:2], eps, ts[2] if residual is not None else None)
        for fn, ts in ((norm, leaves), (reference.rms_norm, exact))
    )
    if residual is None:
        outs, exact_outs = (outs,), (exact_outs,)
    seeds = [torch.randn_like(out) for out in outs]
    asked = [leaf for leaf in leaves if leaf.requires_grad]
    found = torch.autograd.grad(outs, asked, seeds)
    exact_asked = [leaf for leaf in exact if leaf.requires_grad]
    wanted = torch.autograd.grad(exact_outs, exact_asked, [seed.double() for seed in seeds])
    for leaf, gradient, right in zip(asked, found, wanted, strict=True):
        assert gradient.dtype == leaf.dtype
        assert gradient.shape == leaf.shape
        scale = float(right.abs().max())
        torch.testing.assert_close(gradient.double(), right, rtol=rtol, atol=rtol * scale)


@pytest.mark.parametrize("shape", [(1, 4), (11, 48), (2, 3, 129), (5, 300)])
@pytest.mark.parametrize("has_residual", [False, True])
def test_gradients_are_those_of_the_reference(kernel_device, shape, has_residual):
    shapes = (shape, shape[-1:], shape)
    x, weight, residual = leaves_of(*shapes, dtype=torch.float32, device=kernel_device)
    check_gradients(RMSNorm.apply, x, weight, residual if has_residual else None)


def test_gradients_in_half_precision_are_rounded_once(kernel_device):
    leaves = leaves_of((9, 96), (96,), (9, 96), dtype=torch.float16, device=kernel_device)
    check_gradients(RMSNorm.apply, leaves[0], leaves[1], None, rtol=2.0**-11)


def test_a_frozen_weight_gets_no_gradient(kernel_device):
    x, weight = leaves_of((7, 40), (40,), dtype=torch.float32, device=kernel_device)
    check_gradients(RMSNorm.apply, x, weight.requires_grad_(False), None)


def test_the_stream_alone_carries_a_gradient(kernel_device):
    x, weight, residual = leaves_of((3, 8), (8,), (3, 8), dtype=torch.float32, device=kernel_device)
    _, stream = RMSNorm.apply(x, weight, 1e-6, residual)
    seed = torch.randn_like(stream)
    stream.backward(seed)
    assert torch.equal(x.grad, seed)
    assert torch.equal(residual.grad, seed)
    assert weight.grad is None


def test_gradients_reach_rows_of_a_wider_matrix(kernel_device):
    wide = torch.randn(5, 100, device=kernel_device, requires_grad=True)
    weight = torch.randn(40, device=kernel_device, requires_grad=True)
    seed = torch.randn(40, 5, device=kernel_device).T
    found = torch.autograd.grad(RMSNorm.apply(wide[:, 8:48], weight, 1e-6, None), wide, seed)
    wanted = torch.autograd.grad(reference.rms_norm(wide[:, 8:48], weight, 1e-6, None), wide, seed)
    torch.testing.assert_close(found, wanted)


def test_no_rows_give_a_zero_gradient_of_the_weight(kernel_device):
    x, weight = leaves_of((0, 8), (8,), dtype=torch.float32, device=kernel_device)
    RMSNorm.apply(x, weight, 1e-6, None).sum().backward()
    assert x.grad.shape == (0, 8)
    assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 1000])
@pytest.mark.parametrize("has_residual", [False, True])
def test_gradients_at_the_width_of_m3_are_right_and_repeat(cuda, num_rows, has_residual):
    shapes = ((num_rows, 6144), (6144,), (num_rows, 6144))
    x, weight, residual = leaves_of(*shapes, dtype=torch.bfloat16, device=cuda)
    residual = residual if has_residual else None
    check_gradients(rms_norm, x, weight, residual, rtol=2.0**-7)
    args = (x.detach(), weight.detach(), 1e-6, torch.randn_like(x), residual, True)
    first, second = (backward_kernel.rms_norm_backward(*args) for _ in "12")
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 33, 8192])
def test_equals_the_reference_at_the_width_of_m3(cuda, num_rows):
    x, residual = (torch.randn(num_rows, 6144, device=cuda).bfloat16() for _ in "xr")
    weight = torch.randn(6144, device=cuda).bfloat16()
    y, stream = kernel.rms_norm(x, weight, 1e-6, residual)
    expected_y, expected_stream = reference.rms_norm(x, weight, 1e-6, residual)
    assert torch.equal(stream, expected_stream)
    agree(y, expected_y)
