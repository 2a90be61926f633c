"""The hash kernel against the reference, in the interpreter where there is no GPU."""

import random

import pytest
import torch
from torch import Tensor

from inference.kernels.mix64 import as_int64
from inference.kernels.tensor_hash import HashPart, HashTable, hash_part, kernel, reference
from inference.kernels.tensor_hash import tensor_hash as public_tensor_hash

DTYPES_AND_UNITS = [
    (dtype, unit)
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8)
    for unit in (1, 2, 4, 8, 16)
    if unit * dtype.itemsize <= 16
]


def octets(*shape: int) -> Tensor:
    """Random bytes."""
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def expect_equal(*parts: HashPart) -> None:
    """The kernel's sums, modulo 2^64, are the reference's."""
    sums = torch.zeros(len(parts), dtype=torch.int64, device=parts[0].tensor.device)
    kernel.add(kernel.tables(parts), 0, len(parts), sums, None)
    wanted = [
        as_int64(reference.tensor_hash(p.tensor.cpu(), p.salt, p.offsets, p.shape, p.unit))
        for p in parts
    ]
    assert sums.tolist() == wanted


@pytest.mark.parametrize(("dtype", "unit"), DTYPES_AND_UNITS)
def test_every_dtype_and_unit_hashes_as_the_reference(dtype, unit, kernel_device):
    tensor = octets(5, 12, 32 * dtype.itemsize).view(dtype).to(kernel_device)
    shape = tuple(tensor.shape)
    expect_equal(
        hash_part(tensor, name="w", unit=unit),
        hash_part(tensor[2:4], name="w", offsets=(2, 0, 0), shape=shape, unit=unit),
        hash_part(tensor[:, 3:10], name="w", offsets=(0, 3, 0), shape=shape, unit=unit),
        hash_part(tensor[..., 16:], name="w", offsets=(0, 0, 16), shape=shape, unit=unit),
        hash_part(tensor[1, 2], name="w", offsets=(16,), shape=(64,), unit=unit),
    )


@pytest.mark.parametrize(("dtype", "unit"), DTYPES_AND_UNITS)
def test_units_that_are_not_aligned_or_in_pieces_hash_as_the_reference(dtype, unit, kernel_device):
    tensor = octets(6, 40 * dtype.itemsize).view(dtype).to(kernel_device)
    expect_equal(
        hash_part(tensor[:, 1:33], name="w", unit=unit),
        hash_part(tensor[:, 3:35], name="w", offsets=(1, 32), shape=(9, 64), unit=unit),
        hash_part(tensor[:, ::2][:, :16], name="w", unit=unit),
        hash_part(tensor[:, :32].T.contiguous().T, name="w", unit=unit),
        hash_part(tensor.flatten()[1:225].view(7, 32), name="w", unit=unit),
    )


@pytest.mark.parametrize("salt", [0, 1 << 63, (1 << 64) - 1])
def test_every_bit_of_the_salt_counts(salt, kernel_device):
    expect_equal(hash_part(torch.randn(5, device=kernel_device), name="w")._replace(salt=salt))


@pytest.mark.parametrize("shape", [(), (7,), (1, 1), (13, 9), (5, 6, 7), (1, 8, 1, 3)])
def test_rectangles_and_layouts_hash_as_the_reference(shape, kernel_device):
    rng = random.Random(0)
    tensor = torch.randn(shape).to(kernel_device)
    parts = []
    for _ in range(8):
        cut = tuple(slice(*sorted(rng.choices(range(size + 1), k=2))) for size in shape)
        offsets = tuple(part.start for part in cut)
        parts.append(hash_part(tensor[cut], name="w", offsets=offsets, shape=shape))
    parts.append(hash_part(tensor.permute(tuple(reversed(range(len(shape))))), name="w"))
    expect_equal(*parts)


def test_more_dimensions_than_a_row_of_the_table_walks(kernel_device):
    tensor = torch.randn(3, 4, 5, 6, 8).to(kernel_device)
    shape = tuple(tensor.shape)
    for unit in (1, 4):
        cut = tensor[:, 1:3, ::2, 1:, :4]
        expect_equal(hash_part(cut, name="w", offsets=(0, 1, 0, 1, 0), shape=shape, unit=unit))


def test_parts_longer_than_a_tile_add_up(kernel_device, monkeypatch):
    monkeypatch.setattr(kernel, "BLOCK", 64)
    monkeypatch.setattr(kernel, "CHUNK", 32)
    tensor = torch.randn(19, 24).to(kernel_device)
    expect_equal(
        *(
            hash_part(cut, name=f"w{unit}", offsets=offsets, shape=(19, 24), unit=unit)
            for cut, offsets in ((tensor, (0, 0)), (tensor[3:, 8:20], (3, 8)))
            for unit in (1, 4)
        )
    )


def test_places_beyond_32_bits_are_told_apart(kernel_device):
    row, column = torch.randn(1, 2, device=kernel_device), torch.randn(3, 1, device=kernel_device)
    expect_equal(
        *(
            hash_part(row, name="w", offsets=(at, 0), shape=(1 << 40, 2))
            for at in (0, 1 << 31, (1 << 40) - 1)
        ),
        hash_part(column, name="w", offsets=(2, 1 << 35), shape=(5, 1 << 36)),
    )


def test_a_range_of_parts_adds_to_its_own_sums_only(kernel_device):
    tensors = [torch.randn(3, 8), torch.zeros(0, 8), octets(32), torch.randn(5).bfloat16()]
    parts = [
        hash_part(tensor.to(kernel_device), name="w", unit=unit)
        for tensor, unit in zip(tensors, (1, 2, 16, 1), strict=True)
    ]
    tables = kernel.tables(parts)
    assert len(tables) == 3
    sums = torch.zeros(4, dtype=torch.int64, device=kernel_device)
    for first, last in ((1, 3), (1, 2), (2, 3), (3, 3)):
        kernel.add(tables, first, last, sums, None)
    of_bytes = reference.tensor_hash(tensors[2], parts[2].salt, (0,), (32,), 16)
    assert sums.tolist() == [0, 0, as_int64(2 * of_bytes), 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_what_is_not_finite_sets_the_flag_of_its_part(dtype, bad, kernel_device):
    tensor = torch.randn(4, 64).to(dtype)
    tensor[0, :2] = torch.tensor([1.0, -1.0]).mul(torch.finfo(dtype).max).to(dtype)
    damaged = tensor.clone()
    damaged[2, 37] = float("nan") if dtype == torch.float8_e4m3fn else bad
    parts = [
        hash_part(t.to(kernel_device), name="w", unit=unit, check_finite=check)
        for unit in (1, 4, 16 // dtype.itemsize)
        for t, check in ((tensor, True), (damaged, True), (damaged, False))
    ]
    parts.append(hash_part(octets(64).fill_(0xFF).to(kernel_device), name="w", unit=16))
    sums = torch.zeros(len(parts), dtype=torch.int64, device=kernel_device)
    flags = torch.zeros_like(sums)
    tables = kernel.tables(parts)
    kernel.add(tables, 0, len(parts), sums, flags)
    assert flags.tolist() == [0, 1, 0] * 3 + [0]
    assert sums[0] != sums[1]


@pytest.mark.parametrize(("dtype", "unit"), [(torch.float32, 1), (torch.bfloat16, 8)])
def test_a_large_weight_on_the_gpu(dtype, unit, cuda):
    weight = torch.randn(3001, 6144).to(dtype)
    on_gpu = weight.to(cuda)
    cut = (slice(5, 2000), slice(16, 4000))
    options = {"name": "w", "offsets": (5, 16), "shape": (3001, 6144), "unit": unit}
    for part, on_cpu, kwargs in (
        (on_gpu, weight, {"name": "w", "unit": unit}),
        (on_gpu[cut], weight[cut], options),
    ):
        assert public_tensor_hash(part, **kwargs) == public_tensor_hash(on_cpu, **kwargs)


def test_a_table_can_be_captured_in_a_graph(cuda):
    tensors = [torch.randn(300, 64, device=cuda).to(torch.bfloat16) for _ in range(5)]
    table = HashTable([hash_part(t, name="w", unit=8, check_finite=True) for t in tensors])
    table.launch(0, 5)
    before = table.read()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        table.reset()
        table.launch(0, 5)
    tensors[3][7, 9] = torch.nan
    graph.replay()
    after = table.read()
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, True, True, False, True]
    assert after[3] == public_tensor_hash(tensors[3].cpu(), name="w", unit=8)
    assert table.flags.tolist() == [0, 0, 0, 1, 0]
