"""The skinny kernel against the reference, in the interpreter where there is no GPU."""

import pytest
import torch
from torch import Tensor

from inference.kernels.linear import SwiGLU, kernel, linear, reference
from inference.kernels.linear.kernel import skinny_linear

M3 = SwiGLU(alpha=1.702, limit=7.0)
SMALL = {"block_k": 32}
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


def accumulation(expected: Tensor, size: int) -> float:
    """How far FP32 sums of the tensor cores may be from `expected`, results of x Wᵀ over `size`.

    They add 16 products at a time to the sum so far and cut the result off, one unit of 2^-23 at
    most and half of one on average, always towards zero: size / 32 units of a sum that grows
    to its end like a random walk, so of about 2/3 of the largest result.
    """
    return size / 32 * 2**-23 * 2 / 3 * float(expected.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "size"),
    [(1, 64, 64), (3, 100, 96), (16, 70, 40), (5, 1, 32), (19, 65, 32)],
)
def test_the_kernel_is_the_reference(num_tokens, num_rows, size, dtype, kernel_device):
    x, weight = operands(num_tokens, num_rows, size, dtype, kernel_device)
    y = skinny_linear(x, weight, None, None, **SMALL)
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(y.double(), expected, atol=tolerance(dtype), rtol=0)
    assert y.dtype == dtype


def test_fp32_output_of_half_operands_is_not_rounded_to_half(kernel_device):
    x, weight = operands(4, 64, 64, torch.float16, kernel_device)
    y = skinny_linear(x, weight, torch.float32, None, **SMALL)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), x.double() @ weight.double().T, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_in_the_kernel_is_swiglu_behind_it(dtype, kernel_device):
    x, weight = operands(3, 120, 64, dtype, kernel_device)
    weight = weight * 6
    gate_up = skinny_linear(x, weight, None, None, **SMALL)
    fused = skinny_linear(x, weight, None, M3, **SMALL)
    expected = reference.swiglu_oai.swiglu_oai(gate_up, *M3)
    assert fused.shape == (3, 60)
    # Values to 50; the exponential of the GPU is good to 2 in 2^23.
    eps = 2 * torch.finfo(dtype).eps if dtype == torch.float16 else 2e-6
    torch.testing.assert_close(fused, expected, atol=1e-5, rtol=eps)


def check_nan(run, weight: Tensor) -> None:
    """`run`: SwiGLU of tokens times a weight. NaN in one gate or one up is in one column."""
    width = len(weight) // 2
    for row, column in ((2, 2), (width + 1, 1)):
        spoilt = weight.clone()
        spoilt[row] = torch.nan
        assert run(spoilt).isnan().all(0).nonzero().tolist() == [[column]]
        assert run(spoilt).isnan().any(0).sum() == 1


def test_nan_in_a_gate_or_an_up_stays_nan(kernel_device):
    x, weight = operands(3, 14, 32, torch.float32, kernel_device)
    check_nan(lambda spoilt: skinny_linear(x, spoilt, None, M3, **SMALL), weight)


@pytest.mark.parametrize("num_tokens", [3, 17])
def test_nan_in_a_gate_or_an_up_stays_nan_on_the_gpu(num_tokens, cuda):
    x, weight = operands(num_tokens, 6144, 1024, torch.bfloat16, cuda)
    assert kernel.fits_skinny(x, weight)
    check_nan(lambda spoilt: linear(x, spoilt, swiglu=M3), weight)


def test_a_token_does_not_depend_on_the_others_nor_on_their_number(kernel_device):
    x, weight = operands(16, 100, 64, torch.float16, kernel_device)
    together = skinny_linear(x, weight, None, None, **SMALL)
    for token in (0, 7, 15):
        alone = skinny_linear(x[token : token + 1], weight, None, None, **SMALL)
        assert torch.equal(alone[0], together[token])
    poisoned = x.clone()
    poisoned[3] = torch.nan
    found = skinny_linear(poisoned, weight, None, None, **SMALL)
    is_other = torch.arange(16) != 3
    assert torch.equal(found[is_other], together[is_other])


def test_rows_may_lie_apart(kernel_device):
    x, weight = operands(2, 64, 64, torch.float32, kernel_device)
    wide = torch.full((64, 96), torch.nan, device=kernel_device)
    wide[:, :64] = weight
    y = skinny_linear(x, wide[:, :64], None, None, **SMALL)
    torch.testing.assert_close(y, x @ weight.T, atol=1e-5, rtol=0)


def test_what_does_not_fit_is_left_to_cublas():
    x, weight = torch.zeros(4, 1024).bfloat16(), torch.zeros(4096, 1024).bfloat16()
    assert kernel.fits_skinny(x, weight)
    assert kernel.fits_skinny(x[:1], weight)
    assert not kernel.fits_skinny(torch.zeros(33, 1024).bfloat16(), weight)
    assert not kernel.fits_skinny(x[:0], weight)
    assert not kernel.fits_skinny(x.float(), weight.float())
    assert not kernel.fits_skinny(x, weight[:1024])
    assert not kernel.fits_skinny(x.half(), weight)


SHAPES = [(9856, 6144), (9216, 6144), (6144, 8192), (6144, 12288), (6144, 6144), (6144, 3072)]


@pytest.mark.parametrize("num_tokens", [1, 4, 16, 17, 32, 33])
@pytest.mark.parametrize(("num_rows", "size"), SHAPES)
def test_m3_projections_on_the_gpu(num_rows, size, num_tokens, cuda):
    x, weight = operands(num_tokens, num_rows, size, torch.bfloat16, cuda)
    expected = x.double() @ weight.double().T
    y = linear(x, weight)
    # One rounding to 8 bits of values to 5.
    torch.testing.assert_close(y.double(), expected, atol=2e-2, rtol=2**-8)
    y = linear(x, weight, torch.float32)
    torch.testing.assert_close(y.double(), expected, atol=accumulation(expected, size), rtol=0)


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "size"),
    [(1, 64, 1024), (3, 1232, 6144), (16, 100, 640), (31, 1540, 3072), (20, 192, 1152)],
)
def test_the_ring_of_tiles_on_hopper(num_tokens, num_rows, size, dtype, is_gated, cuda):
    if not kernel.IS_HOPPER:
        pytest.skip("needs a Hopper GPU")
    from inference.kernels.linear import hopper_kernel

    x, weight = operands(num_tokens, num_rows, size, dtype, cuda)
    exact = x.double() @ weight.double().T
    default = hopper_kernel.config_of(num_tokens, num_rows, size)
    for config in (default, hopper_kernel.Config(128, 64, 4), hopper_kernel.Config(64, 128, 4)):
        if is_gated:
            found = hopper_kernel.stream_linear(x, weight, None, M3, config)
            rounded = hopper_kernel.stream_linear(x, weight, None, None, config)
            expected = reference.swiglu_oai.swiglu_oai(rounded, *M3)
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=torch.finfo(dtype).eps)
        else:
            found = hopper_kernel.stream_linear(x, weight, torch.float32, None, config)
            atol = accumulation(exact, size)
            torch.testing.assert_close(found.double(), exact, atol=atol, rtol=0)


def test_what_fills_no_deep_ring_gets_a_shorter_one():
    pytest.importorskip("triton.experimental.gluon")
    from inference.kernels.linear.hopper_kernel import config_of

    for num_tokens in (1, 16, 17, 32):
        for num_rows in (6144, 200064):
            for size in (512, 640, 1024, 1152, 1280, 3072, 12288):
                _, block_k, stages = config_of(num_tokens, num_rows, size)
                assert size % block_k == 0
                assert size >= stages * block_k or size < 1024
                # Weights, tokens and the exchange of SwiGLU in shared memory.
                tokens = 16 if num_tokens <= 16 else 32
                assert (64 + tokens) * block_k * stages * 2 + 64 * tokens * 4 < 227 * 1024


@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_a_token_does_not_depend_on_the_batch_on_the_gpu(out_dtype, cuda):
    x, weight = operands(kernel.MAX_TOKENS, 6144, 6144, torch.bfloat16, cuda)
    together = linear(x, weight, out_dtype)
    for num_tokens in (1, 3, 16, 17):
        assert torch.equal(linear(x[:num_tokens], weight, out_dtype), together[:num_tokens])


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 33])
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
    assert y.dtype == torch.float32
    for rows in range(0, 200064, 16384):
        expected = x.double() @ weight[rows : rows + 16384].double().T
        found = y[:, rows : rows + 16384].double()
        torch.testing.assert_close(found, expected, atol=accumulation(expected, 6144), rtol=0)


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
