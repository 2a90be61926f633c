import pytest
import torch

from inference.kernels.swiglu_oai import kernel, reference, swiglu_oai
from inference.kernels.swiglu_oai.function import SwiGLU

M3 = {"alpha": 1.702, "limit": 7.0, "beta": 1.0}


def agree(found: torch.Tensor, wanted: torch.Tensor) -> None:
    if wanted.dtype == torch.float32:
        torch.testing.assert_close(found, wanted, rtol=2e-6, atol=1e-6)
    else:
        # The exponential differs in its last bits: at most the neighbouring number.
        torch.testing.assert_close(found, wanted, rtol=torch.finfo(wanted.dtype).eps, atol=1e-7)


@pytest.mark.parametrize("shape", [(1, 2), (3, 96), (2, 3, 130), (2, 6000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_equals_the_reference(kernel_device, shape, dtype):
    gate_up = torch.randn(shape, dtype=dtype, device=kernel_device) * 6
    agree(kernel.swiglu_oai(gate_up, **M3), reference.swiglu_oai(gate_up, **M3))


def test_rows_of_a_wider_matrix_are_read_in_place(kernel_device):
    wide = torch.randn(5, 100, device=kernel_device)
    found = kernel.swiglu_oai(wide[:, 10:50], 0.5, 1.0, -1.0)
    agree(found, reference.swiglu_oai(wide[:, 10:50], 0.5, 1.0, -1.0))


def test_no_rows(kernel_device):
    assert kernel.swiglu_oai(torch.zeros(0, 8, device=kernel_device), **M3).shape == (0, 4)


def test_nan_stays_nan(kernel_device):
    gate_up = torch.tensor([[torch.nan, 1.0, 1.0, torch.nan]], device=kernel_device)
    assert kernel.swiglu_oai(gate_up, **M3).isnan().all()


def check_gradient(gate_up: torch.Tensor, act, seed: torch.Tensor, rtol: float) -> None:
    """Of `act` against the reference's in FP64."""
    exact = gate_up.detach().double().requires_grad_()
    (found,) = torch.autograd.grad(act(gate_up), gate_up, seed)
    (wanted,) = torch.autograd.grad(reference.swiglu_oai(exact, **M3), exact, seed.double())
    assert found.dtype == gate_up.dtype
    torch.testing.assert_close(found.double(), wanted, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("shape", [(1, 2), (3, 96), (2, 3, 130), (2, 6000)])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.float16, 2.0**-10)])
def test_gradient_is_that_of_the_reference(kernel_device, shape, dtype, rtol):
    gate_up = (torch.randn(shape, dtype=dtype, device=kernel_device) * 6).requires_grad_()
    seed = torch.randn((*shape[:-1], shape[-1] // 2), dtype=dtype, device=kernel_device)
    check_gradient(gate_up, lambda x: SwiGLU.apply(x, *M3.values()), seed, rtol)


def test_the_clamps_pass_the_gradient_of_values_at_their_limits(kernel_device):
    gates = torch.tensor([7.0, 7.25, 6.0, 6.0, 6.0, 6.0, torch.nan], device=kernel_device)
    ups = torch.tensor([1.0, 1.0, 7.0, -7.0, 7.25, -7.25, 1.0], device=kernel_device)
    gate_up = torch.cat([gates, ups]).requires_grad_()
    grads = [
        torch.autograd.grad(act(gate_up, *M3.values()).sum(), gate_up)[0]
        for act in (SwiGLU.apply, reference.swiglu_oai)
    ]
    torch.testing.assert_close(*grads, equal_nan=True)
    assert (grads[0] == 0).tolist() == (grads[1] == 0).tolist()
    assert (grads[0] == 0).sum() == 4


def test_gradient_reaches_rows_of_a_wider_matrix(kernel_device):
    wide = torch.randn(5, 100, device=kernel_device, requires_grad=True)
    seed = torch.randn(20, 5, device=kernel_device).T
    found, wanted = (
        torch.autograd.grad(act(wide[:, 10:50], 0.5, 1.0, -1.0), wide, seed)[0]
        for act in (SwiGLU.apply, reference.swiglu_oai)
    )
    torch.testing.assert_close(found, wanted)


def test_no_rows_give_an_empty_gradient(kernel_device):
    gate_up = torch.zeros(0, 8, device=kernel_device, requires_grad=True)
    SwiGLU.apply(gate_up, *M3.values()).sum().backward()
    assert gate_up.grad.shape == (0, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [3072, 12288])
def test_gradient_at_the_widths_of_m3(cuda, width):
    gate_up = (torch.randn(500, 2 * width, device=cuda) * 4).bfloat16().requires_grad_()
    seed = torch.randn(500, width, device=cuda).bfloat16()
    check_gradient(gate_up, lambda x: swiglu_oai(x, **M3), seed, 2.0**-7)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_rows", "width"), [(1, 12288), (128, 3072), (8192, 12288)])
def test_equals_the_reference_at_the_widths_of_m3(cuda, num_rows, width):
    gate_up = (torch.randn(num_rows, 2 * width, device=cuda) * 4).bfloat16()
    agree(kernel.swiglu_oai(gate_up, **M3), reference.swiglu_oai(gate_up, **M3))
