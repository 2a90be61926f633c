import pytest
import torch

from inference.kernels.rms_norm import kernel, reference


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


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 33, 8192])
def test_equals_the_reference_at_the_width_of_m3(cuda, num_rows):
    x, residual = (torch.randn(num_rows, 6144, device=cuda).bfloat16() for _ in "xr")
    weight = torch.randn(6144, device=cuda).bfloat16()
    y, stream = kernel.rms_norm(x, weight, 1e-6, residual)
    expected_y, expected_stream = reference.rms_norm(x, weight, 1e-6, residual)
    assert torch.equal(stream, expected_stream)
    agree(y, expected_y)
