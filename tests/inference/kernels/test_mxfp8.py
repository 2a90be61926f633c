import math

import pytest
import torch

from inference.kernels import mxfp8
from inference.kernels.tensor_hash import HashTable, combine, tensor_hash


def e4m3_values() -> list[float]:
    """The 127 non-negative finite numbers of e4m3fn, from its definition."""
    values = []
    for code in range(127):
        exponent, mantissa = code >> 3, code & 7
        if exponent == 0:
            values.append(mantissa / 8 * 2.0**-6)
        else:
            values.append((1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return values


def block_of(*values: float) -> torch.Tensor:
    """One block of 32, the rest zero."""
    block = torch.zeros(1, 32)
    block[0, : len(values)] = torch.tensor(values)
    return block.bfloat16()


def test_the_scale_is_the_ceiling_for_every_bf16_magnitude():
    """All 32639 positive finite BF16 numbers as the largest of their block."""
    amax = torch.arange(1, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    blocks = torch.zeros(len(amax), 32, dtype=torch.bfloat16)
    blocks[:, 7] = -amax
    values, scale = mxfp8.quantize(blocks)
    wanted = [max(math.ceil(math.log2(a / 448)), -127) + 127 for a in amax.tolist()]
    assert scale[:, 0].tolist() == wanted
    quotient = amax.double() / torch.exp2(scale[:, 0].double() - 127)
    assert (quotient <= 448).all()
    # Half a unit in the last place of e4m3 at the top of its range: nothing saturated.
    error = (values[:, 7].double() + quotient).abs()
    assert (error <= quotient * 2.0**-4).logical_or(quotient < 2.0**-6).all()


@pytest.mark.parametrize("exponent", [-118, -20, 0, 1, 100])
def test_the_scale_steps_just_above_448_times_a_power_of_two(exponent):
    exact = 448 * 2.0**exponent
    above = 452 * 2.0**exponent  # the next BF16 number is 450, 452 leaves room
    next_above = 450 * 2.0**exponent
    for amax, byte in (
        (exact, exponent + 127),
        (next_above, exponent + 128),
        (above, exponent + 128),
    ):
        values, scale = mxfp8.quantize(block_of(amax))
        assert scale.item() == byte
    values, _ = mxfp8.quantize(block_of(exact))
    assert values[0, 0].item() == 448


def test_values_round_to_the_nearest_even_e4m3_number():
    """Against a search of the table of e4m3 numbers, within blocks of fixed scale."""
    table = torch.tensor(e4m3_values(), dtype=torch.float64)
    x = torch.randn(200, 32).mul(60).clamp(-440, 440).bfloat16()
    x[:, 0] = 448  # fixes the scale of every block to 1
    values, scale = mxfp8.quantize(x)
    assert (scale == 127).all()
    distance = (x.double().abs()[..., None] - table).abs()
    nearest = distance.amin(-1, keepdim=True)
    is_nearest = distance == nearest
    even_first = is_nearest.double() + (is_nearest & (torch.arange(127) % 2 == 0)).double()
    expected = table[even_first.argmax(-1)]
    assert torch.equal(values.double().abs(), expected)
    assert torch.equal(values.double().sign(), x.double().sign() * (expected != 0))


def test_a_block_of_zeros_comes_back_as_zeros():
    values, scale = mxfp8.quantize(torch.zeros(3, 64, dtype=torch.bfloat16))
    assert torch.equal(scale, torch.zeros(3, 2, dtype=torch.uint8))
    assert torch.equal(mxfp8.dequantize(values, scale, torch.float32), torch.zeros(3, 64))


def test_every_code_at_every_scale_has_its_value():
    codes = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).view(8, 32)
    is_number = ~codes.float().isnan()
    magnitudes = torch.tensor([*e4m3_values(), math.nan] * 2, dtype=torch.float64).view(8, 32)
    sign = torch.where(torch.arange(256) < 128, 1.0, -1.0).view(8, 32).double()
    for byte in (0, 1, 100, 127, 128, 246):
        scale = torch.full((8, 1), byte, dtype=torch.uint8)
        found = mxfp8.dequantize(codes, scale, torch.float32).double()
        expected = (sign * magnitudes * 2.0 ** (byte - 127)).float().double()
        assert torch.equal(found[is_number], expected[is_number])


def test_what_mxfp8_can_hold_survives_a_round_trip():
    codes = torch.randint(0, 127, (50, 64)).to(torch.uint8).view(torch.float8_e4m3fn)
    codes.view(torch.uint8)[:, ::32] = 126  # 448: this scale is the one a quantiser finds
    scale = torch.randint(20, 240, (50, 2)).to(torch.uint8)
    x = mxfp8.dequantize(codes, scale, torch.bfloat16)
    values, found_scale = mxfp8.quantize(x)
    assert torch.equal(found_scale, scale)
    assert torch.equal(values.view(torch.uint8), codes.view(torch.uint8))


def test_quantising_twice_changes_no_value():
    x = torch.randn(300, 96).bfloat16()
    once = mxfp8.dequantize(*mxfp8.quantize(x), torch.bfloat16)
    assert torch.equal(mxfp8.dequantize(*mxfp8.quantize(once), torch.bfloat16), once)


def test_each_block_has_its_own_scale_along_the_last_dimension():
    x = torch.randn(2, 3, 96).bfloat16()
    x[0, 1, 32:64] *= 2.0**20
    values, scale = mxfp8.quantize(x)
    for i in range(2):
        for j in range(3):
            for b in range(3):
                part = mxfp8.quantize(x[i, j, 32 * b : 32 * b + 32])
                found = values[i, j, 32 * b : 32 * b + 32]
                assert torch.equal(found.view(torch.uint8), part[0].view(torch.uint8))
                assert scale[i, j, b] == part[1].item()


def test_gaussian_weights_lose_2_66_percent():
    x = torch.randn(2000, 256, generator=torch.Generator().manual_seed(0)).mul(0.02).bfloat16()
    error = mxfp8.dequantize(*mxfp8.quantize(x), torch.float32) - x.float()
    relative = error.norm() / x.float().norm()
    assert relative.item() == pytest.approx(0.0266, abs=2e-4)


def test_a_slice_of_a_larger_tensor_quantises_like_its_copy():
    x = torch.randn(6, 128).bfloat16()
    for part in (x[::2], x[:, 32:96], x.T.contiguous().T):
        found, wanted = mxfp8.quantize(part), mxfp8.quantize(part.clone())
        assert torch.equal(found[0].view(torch.uint8), wanted[0].view(torch.uint8))
        assert torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_weights_are_refused(bad):
    with pytest.raises(ValueError, match="1 of 32 values are NaN or infinite"):
        mxfp8.quantize(block_of(1.0, bad))


def test_only_bf16_in_whole_blocks_is_quantised():
    with pytest.raises(TypeError, match="quantise from BF16 only"):
        mxfp8.quantize(torch.zeros(1, 32))
    with pytest.raises(ValueError, match="K=33 is no multiple of 32"):
        mxfp8.quantize(torch.zeros(1, 33, dtype=torch.bfloat16))


def test_a_nan_scale_is_refused():
    values, scale = mxfp8.quantize(block_of(1.0))
    with pytest.raises(ValueError, match="255 means NaN"):
        mxfp8.dequantize(values, torch.full_like(scale, 255), torch.float32)


def test_pairs_of_a_table_that_do_not_fit_are_refused():
    x = torch.zeros(3, 64).bfloat16()
    out = mxfp8.quantize(x)
    with pytest.raises(TypeError, match="QuantizeTable: x is torch"):
        mxfp8.QuantizeTable([(x.float(), out)])
    with pytest.raises(ValueError, match=r"out has shape \(3, 64\), needs \(2, 64\)"):
        mxfp8.QuantizeTable([(x[:2], out)])
    with pytest.raises(ValueError, match="columns of x have stride 3, need 1"):
        mxfp8.QuantizeTable([(x.view(64, 3).T, out)])
    table = mxfp8.QuantizeTable([(x, out)])
    out.scale.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="the memory of part 0 has moved"):
        table.launch(0, 1)


def test_cuts_between_blocks_add_up_to_the_hash_of_the_whole():
    weight = mxfp8.quantize(torch.randn(2, 5, 256).bfloat16())
    whole = mxfp8.hash_tensor(weight, name="w", unit=16, unit_scale=4)
    parts = []
    for rows in (slice(0, 2), slice(2, 5)):
        for start in (0, 128):
            cut = mxfp8.MXFP8Tensor(
                weight.values[:, rows, start : start + 128],
                weight.scale[:, rows, start // 32 : start // 32 + 4],
            )
            options = {"offsets": (0, rows.start, start), "shape": weight.shape}
            parts += mxfp8.hash_parts(cut, name="w", **options, unit=16, unit_scale=4)
    table = HashTable(parts)
    table.launch(0, len(parts))
    assert combine(table.read()) == whole
    of_values = tensor_hash(weight.values, name="w", unit=16)
    assert whole == combine((of_values, tensor_hash(weight.scale, name="w_scale_inv", unit=4)))
    with pytest.raises(ValueError, match=r"w_scale_inv: .* cuts units of 4"):
        mxfp8.hash_parts(mxfp8.quantize(torch.randn(2, 96).bfloat16()), name="w", unit_scale=4)
