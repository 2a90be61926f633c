import pytest
import torch

from inference.kernels.linear import SwiGLU, linear, reference
from inference.kernels.mxfp8 import dequantize, quantize
from inference.kernels.swiglu_oai import swiglu_oai

M3 = SwiGLU(alpha=1.702, limit=7.0)


def test_it_is_the_product_with_the_transposed_weight():
    x = torch.tensor([[1.0, 2.0], [0.0, -1.0]])
    weight = torch.tensor([[3.0, 4.0], [5.0, 6.0], [0.5, 0.0]])
    assert linear(x, weight).tolist() == [[11.0, 17.0, 0.5], [-4.0, -6.0, 0.0]]


def test_in_one_dtype_it_is_torchs_linear_bit_for_bit():
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = torch.randn(5, 48).to(dtype), torch.randn(33, 48).to(dtype)
        assert torch.equal(linear(x, weight), torch.nn.functional.linear(x, weight))


def test_the_fp32_product_of_bf16_rounds_nothing_also_under_autocast():
    x, weight = torch.randn(3, 32).bfloat16(), torch.randn(50, 32).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = linear(x, weight, torch.float32)
    assert y.dtype == torch.float32
    # 32 terms of size 1, each sum rounded to 2^-24.
    torch.testing.assert_close(y.double(), x.double() @ weight.double().T, atol=1e-5, rtol=0)


def test_the_fp32_product_does_not_depend_on_its_pieces(monkeypatch):
    x, weight = torch.randn(3, 32).bfloat16(), torch.randn(50, 32).bfloat16()
    whole = linear(x, weight, torch.float32)
    monkeypatch.setattr(reference, "MAX_ROWS", 7)
    torch.testing.assert_close(linear(x, weight, torch.float32), whole, atol=1e-5, rtol=0)


def test_fp32_of_mixed_operands():
    x, weight = torch.randn(2, 16), torch.randn(6, 16).bfloat16()
    torch.testing.assert_close(linear(x, weight, torch.float32), x @ weight.float().T)


def test_swiglu_is_the_activation_of_the_rounded_product():
    x, weight = torch.randn(4, 16).bfloat16() * 3, torch.randn(20, 16).bfloat16()
    expected = swiglu_oai(linear(x, weight), alpha=1.702, limit=7.0, beta=1.0)
    assert torch.equal(linear(x, weight, swiglu=M3), expected)
    assert expected.shape == (4, 10)


@pytest.mark.parametrize("max_rows", [7, 16384])
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_an_mxfp8_weight_is_its_dequantised_self(monkeypatch, out_dtype, max_rows):
    weight = quantize(torch.randn(20, 64).bfloat16())
    plain = dequantize(*weight, torch.float32)
    monkeypatch.setattr(reference, "MAX_ROWS", max_rows)
    for swiglu in (None, M3):
        x = torch.randn(4, 64)
        expected = linear(x, plain, out_dtype, swiglu=swiglu)
        found = linear(x, weight, out_dtype, swiglu=swiglu)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    x = torch.randn(4, 64).bfloat16()
    found, expected = linear(x, weight, out_dtype), linear(x, plain.bfloat16(), out_dtype)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected)


def test_no_tokens_give_no_rows():
    assert linear(torch.zeros(0, 8), torch.zeros(5, 8)).shape == (0, 5)
    assert linear(torch.zeros(0, 8), torch.zeros(6, 8), swiglu=M3).shape == (0, 3)


def test_wrong_shapes_and_dtypes_are_refused():
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="x_TX has 8 columns and weight_YX 4"):
        linear(x, torch.zeros(5, 4))
    with pytest.raises(TypeError, match=r"out_dtype is torch\.float16, needs float32 or None"):
        linear(x, torch.zeros(5, 8), torch.float16)
    with pytest.raises(ValueError, match="5 rows are not gates and as many ups"):
        linear(x, torch.zeros(5, 8), swiglu=M3)
