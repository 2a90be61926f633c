"""Copies of a table, by the kernel in the interpreter where there is no GPU."""

import pytest
import torch
from torch import Tensor

from inference.kernels import copy_table_kernel, tables
from inference.kernels.copy_table import CopyTable
from inference.kernels.tables import boxes

DTYPES = [torch.float32, torch.bfloat16, torch.uint8]


def octets(*shape: int) -> Tensor:
    """Random bytes."""
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def bytes_of(tensor: Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


def rectangles(whole: Tensor) -> list[Tensor]:
    """Parts of [6, 8, 64] whose rows begin at 16 bytes, at an element, and all in one piece."""
    return [
        whole[0:2, 1:7, 16:48],
        whole[2:4, :, 3:30],
        whole[4],
        whole[5, 0, :5],
        whole[5, 1:1],
        whole[5, 3:4, 16:32],
        whole[5, 7, 63],
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rectangles_are_copied_and_nothing_around_them(dtype, kernel_device, monkeypatch):
    monkeypatch.setattr(copy_table_kernel, "BLOCK", 64)
    monkeypatch.setattr(copy_table_kernel, "CHUNK", 32)
    source = octets(6, 8, 64 * dtype.itemsize).view(dtype).to(kernel_device)
    found = octets(6, 8, 64 * dtype.itemsize).view(dtype).to(kernel_device)
    wanted = found.clone()
    for part, out in zip(rectangles(source), rectangles(wanted), strict=True):
        out.copy_(part)
    pairs = list(zip(rectangles(source), rectangles(found), strict=True))
    tables_of_pairs = copy_table_kernel.tables(pairs)
    assert {16, dtype.itemsize} <= set(tables_of_pairs)
    copy_table_kernel.copy(tables_of_pairs, 0, len(pairs))
    assert bytes_of(found) == bytes_of(wanted)


def test_rows_of_other_strides_and_a_range_of_pairs(kernel_device):
    source, out = octets(9, 128).to(kernel_device), torch.zeros(3, 4, 64, dtype=torch.uint8)
    out = out.to(kernel_device)
    pairs = [(source[3 * i : 3 * i + 3, 32 : 32 + 16 * i], out[:, i, : 16 * i]) for i in range(3)]
    copy_table_kernel.copy(copy_table_kernel.tables(pairs), 2, 3)
    assert not out[:, :2].any()
    assert torch.equal(out[:, 2, :32], source[6:9, 32:64])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_range_of_pairs_is_copied_on_either_device(dtype, kernel_device):
    source = octets(6, 8, 64 * dtype.itemsize).view(dtype).to(kernel_device)
    out = torch.zeros(6, 8, 64, dtype=dtype, device=kernel_device)
    table = CopyTable(list(zip(rectangles(source), rectangles(out), strict=True)))
    table.launch(0, 2)
    assert not out[4].any()
    table.launch(2, len(table))
    for part, copied in zip(rectangles(source), rectangles(out), strict=True):
        assert bytes_of(part) == bytes_of(copied)


def test_pairs_that_do_not_fit_are_refused():
    rows = torch.zeros(4, 6)
    with pytest.raises(TypeError, match="source is float32, needs bfloat16"):
        CopyTable([(rows, rows.bfloat16())])
    with pytest.raises(ValueError, match=r"source has shape \(4, 6\), needs \(4, 5\)"):
        CopyTable([(rows, rows[:, :5])])
    with pytest.raises(ValueError, match="columns of out have stride 4, need 1"):
        CopyTable([(rows, torch.zeros(6, 4).T)])
    table = CopyTable([(rows, rows.clone())])
    rows.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="the memory of part 0 has moved"):
        table.launch(0, 1)


def walk(box: tables.Box) -> list[tuple[int, ...]]:
    """The places of its units, one a map, in order."""
    return [
        tuple(
            start + sum(i * step[m] for i, step in zip((i_0, i_1, i_2), box.strides, strict=True))
            for m, start in enumerate(box.starts)
        )
        for i_0 in range(box.sizes[0])
        for i_1 in range(box.sizes[1])
        for i_2 in range(box.sizes[2])
    ]


@pytest.mark.parametrize("limit", [1 << 31, 30, 2])
def test_boxes_walk_every_loop_once_and_in_order(limit, monkeypatch):
    monkeypatch.setattr(tables, "MAX_UNITS", limit)
    sizes = (2, 3, 1, 2, 2, 3)
    strides = [(1000, 36), (100, 12), (7, 5), (50, 6), (10, 3), (3, 1)]
    wanted = [
        (5 + sum(i * s for i, (s, _) in zip(index, strides, strict=True)), place)
        for place, index in enumerate(torch.cartesian_prod(*map(torch.arange, sizes)).tolist())
    ]
    found = [place for box in boxes(sizes, (5, 0), strides) for place in walk(box)]
    assert found == wanted
    assert list(boxes((3, 0, 2), (0,), [(1,)] * 3)) == []
