"""The skinny kernel against the reference, in the interpreter where there is no GPU."""

import pytest
import torch
from torch import Tensor

from inference.kernels.linear import SwiGLU, kernel, linear, reference
from inference.kernels.linear.kernel import Config, skinny_linear

M3 = SwiGLU(alpha=1.702, limit=7.0)
SMALL = Config(rows=64, block_k=32, num_stages=2, prefetch=0)
DTYPES = (torch.float32, torch.float16)


def operands(
    num_tokens: int, num_rows: int, size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(num_tokens + num_rows)
    x = torch.randn(num_tokens, size, generator=generator, device=device)
    weight = torch.randn(num_rows, size, generator=generator, device=device)
    return x.to(dtype), (weight / size**0.5).to(dtype)


def tolerance(dtype: torch.dtype) -> float:
    # Results of size 1 to 4: one rounding to the output, and in FP32 another order of the sum.
    return 1e-5 if dtype == torch.float32 else 4e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "size"), [(1, 64, 64), (3, 100, 96), (16, 70, 40), (5, 1, 32)]
)
def test_the_kernel_is_the_reference(num_tokens, num_rows, size, dtype, kernel_device):
    x, weight = operands(num_tokens, num_rows, size, dtype, kernel_device)
    y = skinny_linear(x, weight, None, None, SMALL)
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(y.double(), expected, atol=tolerance(dtype), rtol=0)
    assert y.dtype == dtype


@pytest.mark.parametrize("rows", [7, 40, 47, 75, 128])
def test_any_number_of_rows_a_program_covers_the_weight(rows, kernel_device):
    x, weight = operands(2, 150, 32, torch.float32, kernel_device)
    y = skinny_linear(x, weight, None, None, SMALL._replace(rows=rows))
    torch.testing.assert_close(y, x @ weight.T, atol=1e-5, rtol=0)


def test_fp32_output_of_half_operands_is_not_rounded_to_half(kernel_device):
    x, weight = operands(4, 64, 64, torch.float16, kernel_device)
    y = skinny_linear(x, weight, torch.float32, None, SMALL)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), x.double() @ weight.double().T, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [64, 48])
def test_swiglu_in_the_kernel_is_swiglu_behind_it(rows, dtype, kernel_device):
    x, weight = operands(3, 120, 64, dtype, kernel_device)
    weight = weight * 6
    config = SMALL._replace(rows=rows)
    gate_up = skinny_linear(x, weight, None, None, config)
    fused = skinny_linear(x, weight, None, M3, config)
    expected = reference.swiglu_oai.swiglu_oai(gate_up, *M3)
    assert fused.shape == (3, 60)
    # Values to 50; the exponential of the GPU is good to 2 in 2^23.
    eps = 2 * torch.finfo(dtype).eps if dtype == torch.float16 else 2e-6
    torch.testing.assert_close(fused, expected, atol=1e-5, rtol=eps)


def test_a_token_does_not_depend_on_the_others_nor_on_their_number(kernel_device):
    x, weight = operands(16, 100, 64, torch.float16, kernel_device)
    together = skinny_linear(x, weight, None, None, SMALL)
    for token in (0, 7, 15):
        alone = skinny_linear(x[token : token + 1], weight, None, None, SMALL)
        assert torch.equal(alone[0], together[token])
    poisoned = x.clone()
    poisoned[3] = torch.nan
    found = skinny_linear(poisoned, weight, None, None, SMALL)
    is_other = torch.arange(16) != 3
    assert torch.equal(found[is_other], together[is_other])


def test_rows_may_lie_apart(kernel_device):
    x, weight = operands(2, 64, 64, torch.float32, kernel_device)
    wide = torch.full((64, 96), torch.nan, device=kernel_device)
    wide[:, :64] = weight
    y = skinny_linear(x, wide[:, :64], None, None, SMALL)
    torch.testing.assert_close(y, x @ weight.T, atol=1e-5, rtol=0)


def test_what_does_not_fit_is_left_to_cublas():
    x, weight = torch.zeros(4, 1024).bfloat16(), torch.zeros(4096, 1024).bfloat16()
    assert kernel.fits_skinny(x, weight)
    assert kernel.fits_skinny(x[:1], weight)
    assert not kernel.fits_skinny(torch.zeros(17, 1024).bfloat16(), weight)
    assert not kernel.fits_skinny(x[:0], weight)
    assert not kernel.fits_skinny(x.float(), weight.float())
    assert not kernel.fits_skinny(x, weight[:1024])
    assert not kernel.fits_skinny(x.half(), weight)


SHAPES = [(9856, 6144), (9216, 6144), (6144, 8192), (6144, 12288), (6144, 6144), (6144, 3072)]


@pytest.mark.parametrize("num_tokens", [1, 4, 16, 17])
@pytest.mark.parametrize(("num_rows", "size"), SHAPES)
def test_m3_projections_on_the_gpu(num_rows, size, num_tokens, cuda):
    x, weight = operands(num_tokens, num_rows, size, torch.bfloat16, cuda)
    expected = x.double() @ weight.double().T
    y = linear(x, weight)
    # One rounding to 8 bits of values to 5.
    torch.testing.assert_close(y.double(), expected, atol=2e-2, rtol=2**-8)
    y = linear(x, weight, torch.float32)
    torch.testing.assert_close(y.double(), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("num_tokens", [1, 16, 17])
@pytest.mark.parametrize("width", [12288, 3072])
def test_m3_gate_up_on_the_gpu(width, num_tokens, cuda):
    x, weight = operands(num_tokens, 2 * width, 6144, torch.bfloat16, cuda)
    fused = linear(x, weight, swiglu=M3)
    expected = reference.swiglu_oai.swiglu_oai(linear(x, weight), *M3)
    torch.testing.assert_close(fused, expected, atol=1e-6, rtol=2**-7)


@pytest.mark.parametrize("num_tokens", [1, 16, 33])
def test_m3_head_on_the_gpu(num_tokens, cuda):
    x, weight = operands(num_tokens, 200064, 6144, torch.bfloat16, cuda)
    y = linear(x, weight, torch.float32)
    expected = x.float() @ weight.float().T
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, expected, atol=3e-5, rtol=0)


def test_a_graph_replays_the_kernel_on_new_values(cuda):
    x, weight = operands(4, 6144, 6144, torch.bfloat16, cuda)
    linear(linear(x, weight), weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear(linear(x, weight), weight)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(y, linear(linear(x, weight), weight))
