import pytest
import torch

from inference.kernels.swiglu_oai import kernel, reference

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


@pytest.mark.gpu
@pytest.mark.parametrize(("num_rows", "width"), [(1, 12288), (128, 3072), (8192, 12288)])
def test_equals_the_reference_at_the_widths_of_m3(cuda, num_rows, width):
    gate_up = (torch.randn(num_rows, 2 * width, device=cuda) * 4).bfloat16()
    agree(kernel.swiglu_oai(gate_up, **M3), reference.swiglu_oai(gate_up, **M3))
