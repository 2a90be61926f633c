"""The Triton kernels of MXFP8 write the bytes of the reference."""

import pytest
import torch

from inference.kernels import mxfp8
from inference.kernels.mxfp8 import MXFP8Tensor, QuantizeTable, kernel, reference, table_kernel


def quantized(x: torch.Tensor, device: torch.device) -> MXFP8Tensor:
    """By the kernel; on the CPU again."""
    out = MXFP8Tensor(
        torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=device),
        torch.empty((*x.shape[:-1], x.shape[-1] // 32), dtype=torch.uint8, device=device),
    )
    kernel.quantize(x.to(device), *out)
    return MXFP8Tensor(out.values.cpu(), out.scale.cpu())


def assert_same_bytes(found, wanted) -> None:
    assert torch.equal(found[0].view(torch.uint8), wanted[0].view(torch.uint8))
    assert torch.equal(found[1], wanted[1])


def magnitudes() -> torch.Tensor:
    """All finite BF16 numbers, positive and negative, [2040, 32]."""
    bits = torch.arange(0x7F80, dtype=torch.int32)
    return torch.cat([bits, bits | 0x8000]).to(torch.int16).view(torch.bfloat16).view(-1, 32)


def test_blocks_of_neighbouring_numbers_quantise_as_the_reference_says(kernel_device):
    x = magnitudes()
    assert_same_bytes(quantized(x, kernel_device), reference.quantize(x))


def test_numbers_far_below_the_largest_of_their_block_round_as_the_reference_says(kernel_device):
    """Every number of 12 binades, zeros and ties among them, under a large first one."""
    x = magnitudes()[:1020].view(-1)[0x3C00:0x4200].view(-1, 16)
    x = torch.cat([x, -x], 1)
    for largest in (440.0, 300.0, 2.0**20, 3e38):
        x[:, 3] = largest
        assert_same_bytes(quantized(x, kernel_device), reference.quantize(x))


@pytest.mark.parametrize("shape", [(1, 32), (3, 96), (5, 7, 64), (130, 32), (0, 64)])
def test_shapes_that_fill_no_program_quantise_and_come_back(kernel_device, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    wanted = reference.quantize(x)
    found = quantized(x, kernel_device)
    assert_same_bytes(found, wanted)
    back = kernel.dequantize(*(part.to(kernel_device) for part in found), torch.float32)
    assert torch.equal(back.cpu(), reference.dequantize(*wanted, torch.float32))


def test_every_code_at_every_scale_has_its_value(kernel_device):
    codes = torch.arange(256).to(torch.uint8).view(8, 32).expand(255, 8, 32)
    values = codes.reshape(-1, 32).view(torch.float8_e4m3fn)
    scale = torch.arange(255).to(torch.uint8).repeat_interleave(8)[:, None]
    found = kernel.dequantize(
        values.to(kernel_device), scale.to(kernel_device), torch.float32
    ).cpu()
    wanted = reference.dequantize(values, scale, torch.float32)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num())


def test_a_rectangle_of_a_parameter_is_written_and_nothing_around_it(kernel_device):
    """Rows 3 to 8 and columns 32 to 96 of expert 1, from a slice of a larger tensor."""
    values = torch.zeros(2, 10, 128, dtype=torch.uint8, device=kernel_device)
    scale = torch.full((2, 10, 4), 77, dtype=torch.uint8, device=kernel_device)
    source = torch.randn(12, 160).bfloat16().to(kernel_device)
    x = source[2:7, 64:128]
    inside = (1, slice(3, 8), slice(32, 96))
    kernel.quantize(
        x, values.view(torch.float8_e4m3fn)[inside], scale[(1, slice(3, 8), slice(1, 3))]
    )
    wanted = reference.quantize(x.cpu())
    expected = torch.zeros(2, 10, 128, dtype=torch.uint8)
    expected[inside] = wanted[0].view(torch.uint8)
    expected_scale = torch.full((2, 10, 4), 77, dtype=torch.uint8)
    expected_scale[1, 3:8, 1:3] = wanted[1]
    assert torch.equal(values.cpu(), expected)
    assert torch.equal(scale.cpu(), expected_scale)


def test_a_source_of_any_strides_is_read_and_an_output_without_rows_refused(kernel_device):
    x = torch.randn(64, 6).bfloat16().T
    assert_same_bytes(quantized(x, kernel_device), reference.quantize(x.contiguous()))
    values, scale = torch.empty(64, 6), torch.empty(6, 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match="columns of values have stride 6, need 1"):
        kernel.quantize(
            x.to(kernel_device),
            values.to(torch.float8_e4m3fn).to(kernel_device).T,
            scale.to(kernel_device),
        )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_block_that_is_not_finite_has_a_scale_above_the_largest_usable(kernel_device, bad):
    x = torch.ones(3, 64).bfloat16()
    x[1, 40] = bad
    x[2, 40] = 448 * 2.0**7  # the largest that may be served
    scale = quantized(x, kernel_device).scale
    assert (scale > mxfp8.MAX_SCALE).tolist() == [[False, False], [False, True], [False, False]]
    assert scale[2, 1] == mxfp8.MAX_SCALE


def places_for(x: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> list:
    """(source, values, scale): two experts with gate and up rows joined, a rectangle, one block, a
    source that is not aligned to 16 bytes and an empty one."""
    codes = values.view(torch.float8_e4m3fn)
    cut = (slice(2, 9), slice(32, 96)), (slice(2, 9), slice(1, 3))
    return [
        (x[0, :4, :128], codes[0, :4], scale[0, :4]),
        (x[1:3, :6, 32:160], codes[1:3, 4:10], scale[1:3, 4:10]),
        (x[3, :7, 64:128], codes[(3, *cut[0])], scale[(3, *cut[1])]),
        (x[3, 9, :32], codes[4, 0, 96:], scale[4, 0, 3:]),
        (x[4, :3, 5:133], codes[4, 4:7], scale[4, 4:7]),
        (x[4, :0, :128], codes[4, :0], scale[4, :0]),
    ]


def test_a_table_writes_the_references_bytes_and_nothing_around_them(kernel_device, monkeypatch):
    monkeypatch.setattr(table_kernel, "BLOCK", 16)
    monkeypatch.setattr(table_kernel, "CHUNK", 8)
    x = torch.randn(5, 10, 160, generator=torch.Generator().manual_seed(2)).bfloat16()
    wanted = torch.zeros(5, 12, 128).to(torch.uint8), torch.full((5, 12, 4), 77).to(torch.uint8)
    found = [part.to(kernel_device, copy=True) for part in wanted]
    pairs = places_for(x.to(kernel_device), *found)
    tables = table_kernel.tables(pairs)
    assert sorted(tables) == [1, 16]
    flags = torch.zeros(len(pairs), dtype=torch.int32, device=kernel_device)
    for first, last in ((0, 1), (1, 5), (5, 6)):
        table_kernel.quantize(tables, first, last, flags)
    for source, *out in places_for(x, *wanted):
        mxfp8.quantize_into(source, MXFP8Tensor(*out))
    assert_same_bytes([part.cpu() for part in found], wanted)


def test_a_table_quantises_all_numbers_as_the_reference_says(kernel_device):
    x = magnitudes()[::3].contiguous()
    out = quantized(torch.zeros_like(x), kernel_device)
    out = MXFP8Tensor(out.values.to(kernel_device), out.scale.to(kernel_device))
    table = table_kernel.tables([(x.to(kernel_device), *out)])
    table_kernel.quantize(table, 0, 1, torch.zeros(1, dtype=torch.int32, device=kernel_device))
    assert_same_bytes([part.cpu() for part in out], reference.quantize(x))


def test_a_range_of_pairs_is_quantised_on_either_device(kernel_device):
    x = torch.randn(5, 10, 160).bfloat16()
    values = torch.zeros(2, 5, 12, 128, dtype=torch.uint8)
    scale = torch.zeros(2, 5, 12, 4, dtype=torch.uint8)
    for source, *out in places_for(x, values[1], scale[1]):
        mxfp8.quantize_into(source, MXFP8Tensor(*out))
    on_device = values[0].to(kernel_device), scale[0].to(kernel_device)
    places = places_for(x.to(kernel_device), *on_device)
    table = QuantizeTable([(source, MXFP8Tensor(*out)) for source, *out in places])
    table.launch(0, 3)
    assert not on_device[0][4].any()
    table.launch(3, len(table))
    assert torch.equal(on_device[0].cpu(), values[1])
    assert torch.equal(on_device[1].cpu(), scale[1])


@pytest.mark.parametrize("bad", [float("nan"), -float("inf"), 452 * 2.0**7])
def test_a_table_flags_the_pairs_that_may_not_be_served(kernel_device, bad):
    """By the kernel, and by the table on either device."""
    x = torch.ones(5, 10, 160).bfloat16()
    x[2, 3, 64], x[4, 2, 9], x[1] = bad, bad, 448 * 2.0**7
    values = torch.zeros(5, 12, 128, dtype=torch.uint8, device=kernel_device)
    scale = torch.zeros(5, 12, 4, dtype=torch.uint8, device=kernel_device)
    pairs = places_for(x.to(kernel_device), values, scale)
    flags = torch.zeros(len(pairs), dtype=torch.int32, device=kernel_device)
    table_kernel.quantize(table_kernel.tables(pairs), 0, len(pairs), flags)
    assert flags.tolist() == [0, 1, 0, 0, 1, 0]
    table = QuantizeTable([(source, MXFP8Tensor(*out)) for source, *out in pairs])
    table.launch(0, 4)
    assert table.flags.tolist() == [0, 1, 0, 0, 0, 0]
    table.launch(4, 6)
    assert table.flags.tolist() == [0, 1, 0, 0, 1, 0]
    table.reset()
    table.launch(2, 4)
    assert not table.flags.any()


@pytest.mark.gpu
def test_the_public_calls_run_the_kernels_on_cuda(cuda):
    x = torch.randn(300, 96).bfloat16()
    found = mxfp8.quantize(x.to(cuda))
    assert_same_bytes([part.cpu() for part in found], reference.quantize(x))
    for dtype in (torch.float32, torch.bfloat16):
        back = mxfp8.dequantize(*found, dtype)
        assert torch.equal(back.cpu(), reference.dequantize(*reference.quantize(x), dtype))
    x[7, 5] = torch.nan
    with pytest.raises(ValueError, match="1 of 28800 values are NaN or infinite"):
        mxfp8.quantize(x.to(cuda))
