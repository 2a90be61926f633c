import pytest
import torch
from torch import Tensor

from inference.kernels.linear import mxfp8_kernel, reference
from inference.kernels.linear.mxfp8_kernel import linear
from inference.kernels.mxfp8 import MXFP8Tensor, dequantize

M3 = 1.702, 7.0, 1.0
BYTES = torch.tensor([byte for byte in range(256) if byte & 0x7F != 0x7F], dtype=torch.uint8)
"""All e4m3 values but the NaNs."""


def make(
    num_tokens: int, size: int, num_rows: int, dtype: torch.dtype
) -> tuple[Tensor, MXFP8Tensor]:
    g = torch.Generator().manual_seed(0)
    values = BYTES[torch.randint(len(BYTES), (num_rows, size), generator=g)]
    scale = torch.randint(116, 122, (num_rows, size // 32), generator=g).to(torch.uint8)
    x = (torch.randn(num_tokens, size, generator=g) / size**0.5).to(dtype)
    return x, MXFP8Tensor(values.view(torch.float8_e4m3fn), scale)


def wide(weight: MXFP8Tensor) -> Tensor:
    return dequantize(weight.values, weight.scale, torch.float32)


def to(weight: MXFP8Tensor, device: torch.device) -> MXFP8Tensor:
    return MXFP8Tensor(weight.values.to(device), weight.scale.to(device))


def error_of(found: Tensor, wanted: Tensor) -> float:
    return float((found.cpu().double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("swiglu", [None, M3])
@pytest.mark.parametrize(
    ("num_tokens", "size", "num_rows"), [(1, 32, 70), (17, 96, 34), (70, 64, 6)]
)
def test_equals_the_reference_over_the_wide_weight(
    kernel_device, swiglu, num_tokens, size, num_rows
):
    x, weight = make(num_tokens, size, num_rows, torch.float32)
    found = linear(x.to(kernel_device), to(weight, kernel_device), None, swiglu)
    assert error_of(found, reference.linear(x, wide(weight), None, swiglu)) < 1e-6


def poisoned(x: Tensor, weight: MXFP8Tensor, half: int) -> tuple[Tensor, MXFP8Tensor]:
    """Token 0 has NaN in all gates (`half` 0) or ups (1) and infinity in the others.

    As 0 · inf: values of a weight are finite.
    """
    x, values = x.clone(), weight.values.clone().view(torch.uint8)
    x[0, 0] = torch.inf
    values.unflatten(-2, (2, -1))[..., :, 0] = 0x38  # 1.0
    values.unflatten(-2, (2, -1))[..., half, :, 0] = 0
    return x, MXFP8Tensor(values.view(torch.float8_e4m3fn), weight.scale)


@pytest.mark.parametrize("half", [0, 1], ids=["gate", "up"])
def test_nan_in_a_gate_or_an_up_stays_nan(kernel_device, half):
    x, weight = poisoned(*make(3, 32, 14, torch.float32), half)
    found = linear(x.to(kernel_device), to(weight, kernel_device), None, M3)
    assert found.isnan().all(1).tolist() == [True, False, False]
    assert error_of(found[1:], reference.linear(x[1:], wide(weight), None, M3)) < 1e-6


def test_tokens_may_be_columns_of_something_wider(kernel_device):
    x, weight = make(5, 64, 32, torch.float32)
    whole = torch.full((5, 96), torch.nan)
    whole[:, 16:80] = x
    found = linear(whole.to(kernel_device)[:, 16:80], to(weight, kernel_device), None, None)
    assert error_of(found, reference.linear(x, wide(weight), None, None)) < 1e-6


def test_no_tokens(kernel_device):
    x, weight = make(0, 32, 6, torch.float32)
    assert linear(x.to(kernel_device), to(weight, kernel_device), None, None).shape == (0, 6)


@pytest.mark.gpu
@pytest.mark.parametrize("swiglu", [None, M3])
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 32, 33, 64, 65, 300])
@pytest.mark.parametrize(("size", "num_rows"), [(128, 256), (640, 512), (6144, 1280)])
def test_bf16_equals_the_reference(cuda, swiglu, out_dtype, num_tokens, size, num_rows):
    """One rounding of the result, and with SwiGLU one before: 2^-9 each."""
    x, weight = make(num_tokens, size, num_rows, torch.bfloat16)
    found = linear(x.to(cuda), to(weight, cuda), out_dtype, swiglu)
    wanted = reference.linear(x.float(), wide(weight), None, swiglu)
    assert error_of(found, wanted) < (1e-5 if out_dtype and swiglu is None else 4e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("half", [0, 1], ids=["gate", "up"])
@pytest.mark.parametrize("num_tokens", [2, 32, 300])
def test_nan_in_a_gate_or_an_up_stays_nan_in_bf16(cuda, num_tokens, half):
    x, weight = poisoned(*make(num_tokens, 640, 512, torch.bfloat16), half)
    found = linear(x.to(cuda), to(weight, cuda), None, M3)
    assert found.isnan().all(1).nonzero().tolist() == [[0]]
    assert not found[1:].isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [7, 40, 300])
def test_rows_that_do_not_fill_a_program(cuda, num_tokens):
    x, weight = make(num_tokens, 512, 9 * 128 + 8, torch.bfloat16)
    found = linear(x.to(cuda), to(weight, cuda), torch.float32, None)
    assert error_of(found, reference.linear(x.float(), wide(weight), None, None)) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [40, 300])
def test_a_program_takes_several_tiles(cuda, num_tokens):
    """Of 200 tiles of rows; five steps, no more than are on their way at once."""
    x, weight = make(num_tokens, 640, 200 * 256, torch.bfloat16)
    found = linear(x.to(cuda), to(weight, cuda), torch.float32, None)
    assert error_of(found, reference.linear(x.float(), wide(weight), None, None)) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [9, 100])
def test_a_token_does_not_depend_on_the_others(cuda, num_tokens):
    """Of calls that are cut alike."""
    x, weight = make(num_tokens, 1024, 512, torch.bfloat16)
    x, weight = x.to(cuda), to(weight, cuda)
    few = linear(x[: num_tokens - 2].contiguous(), weight, None, None)
    assert torch.equal(few, linear(x, weight, None, None)[: num_tokens - 2])


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [3, 40])
def test_the_portable_kernel_agrees_in_bf16(cuda, num_tokens):
    x, weight = make(num_tokens, 512, 256, torch.bfloat16)
    found = torch.empty(num_tokens, 256, device=cuda)
    mxfp8_kernel._linear(x.to(cuda), to(weight, cuda), found, None)
    assert error_of(found, reference.linear(x.float(), wide(weight), None, None)) < 1e-5
