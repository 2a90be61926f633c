"""What changed in weights: the reference against a loop, the kernels against the reference."""

import pytest
import torch
from torch import Tensor

from inference.kernels.changed_values import (
    PLACE_DTYPE,
    ChangedTable,
    OverwriteTable,
    kernel,
    num_tiles,
    reference,
)
from inference.kernels.changed_values.reference import BITS

TILE = 64
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8]


def octets(*shape: int) -> Tensor:
    """Random bytes."""
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def parts_of(whole: Tensor) -> list[Tensor]:
    """Parts of [6, 8, 96]: rows that begin at 16 bytes or at an element, in one piece, of tiles
    that are full or not, and none."""
    return [
        whole[0:2, 1:7, 16:48],
        whole[2:4, :, 3:30],
        whole[4],
        whole[5, 0, :5],
        whole[5, 1:1],
        whole[5, 3:5, 16:80],
        whole[5, 7, 63],
    ]


def bits_of(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8)


def changed(whole: Tensor, share: float) -> Tensor:
    """With some of its bits turned."""
    bits = whole.clone().view(BITS[whole.element_size()])
    turned = torch.rand(bits.shape) < share
    bits[turned] ^= 1
    return bits.view(whole.dtype)


def entries_by_loop(now: Tensor, before: Tensor) -> tuple[list[int], list[int], list[int]]:
    """(counts of tiles, places, values as integers), element by element."""
    pairs = zip(
        *(t.contiguous().view(-1).view(BITS[t.element_size()]).tolist() for t in (now, before)),
        strict=True,
    )
    counts, places, values = [0] * num_tiles(now.numel(), TILE), [], []
    for at, (new, old) in enumerate(pairs):
        if new != old:
            counts[at // TILE] += 1
            places.append(at % TILE)
            values.append(new)
    return counts, places, values


def packed(table, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Counts, places and values of all parts, through a table or the kernels alone."""
    counts = torch.full((table.first_tiles[-1],), -7, dtype=torch.int32, device=device)
    table.count(0, len(table), counts)
    starts = torch.zeros(counts.numel() + 1, dtype=torch.int64, device=device)
    starts[1:] = counts.cumsum(0)
    total = int(starts[-1])
    places = torch.full((total,), -7, dtype=PLACE_DTYPE, device=device)
    values = torch.full((total,), 7, dtype=BITS[table.item_bytes], device=device)
    table.take(0, len(table), starts, places, values)
    return counts, places, values


class KernelTable(ChangedTable):
    """The kernels, in the interpreter where there is no GPU."""

    def __init__(self, pairs) -> None:
        super().__init__(pairs, TILE)
        made = kernel.Changed(pairs, self.first_tiles, TILE)
        self.count, self.take = made.count, made.take


class KernelOverwrite(OverwriteTable):
    def __init__(self, outs) -> None:
        super().__init__(outs, TILE)
        self._kernel, self._on_cuda = kernel.Overwrite(outs, TILE), True


@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_entries_are_the_changed_elements_in_order(dtype, share):
    before = octets(6, 8, 96 * dtype.itemsize).view(dtype)
    now = changed(before, share)
    pairs = list(zip(parts_of(now), parts_of(before), strict=True))
    wanted = [entries_by_loop(*pair) for pair in pairs]
    counts, places, values = packed(ChangedTable(pairs, TILE), torch.device("cpu"))
    assert counts.tolist() == [one for each in wanted for one in each[0]]
    assert places.tolist() == [one for each in wanted for one in each[1]]
    assert values.tolist() == [one for each in wanted for one in each[2]]
    for part, copy in zip(parts_of(now), parts_of(before), strict=True):
        assert torch.equal(bits_of(part), bits_of(copy))


@pytest.mark.parametrize(
    ("dtype", "share"),
    [*((dtype, 0.1) for dtype in DTYPES), (torch.float32, 0.0), (torch.uint8, 1.0)],
)
def test_the_kernels_find_pack_and_write_what_the_reference_does(
    dtype, share, kernel_device, monkeypatch
):
    monkeypatch.setattr(kernel, "MAX_CHUNK", 32)
    monkeypatch.setattr(kernel, "ENTRIES", 8)
    before = octets(6, 8, 96 * dtype.itemsize).view(dtype)
    now, held = changed(before, share), before.clone()
    wanted = packed(
        ChangedTable(list(zip(parts_of(now), parts_of(held), strict=True)), TILE),
        torch.device("cpu"),
    )
    there = [tensor.to(kernel_device, copy=True) for tensor in (now, before, before)]
    table = KernelTable(list(zip(parts_of(there[0]), parts_of(there[1]), strict=True)))
    found = packed(table, kernel_device)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one.cpu(), other)
    assert torch.equal(there[1].cpu().view(torch.uint8), held.view(torch.uint8))
    spread = KernelOverwrite(parts_of(there[2]))
    spread.launch(0, len(spread), *found)
    assert torch.equal(there[2].cpu().view(torch.uint8), held.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_entries_are_written_into_memory_of_other_strides_part_by_part(dtype, kernel_device):
    before = octets(6, 8, 96 * dtype.itemsize).view(dtype).to(kernel_device)
    now = changed(before.cpu(), 0.2).to(kernel_device)
    pairs = list(zip(parts_of(now), parts_of(before.clone()), strict=True))
    table = ChangedTable(pairs, TILE)
    counts, places, values = packed(table, kernel_device)
    wide = octets(6, 8, 101 * dtype.itemsize).view(dtype).to(kernel_device)
    around = wide.clone()
    wide[:, :, 3:99], around[:, :, 3:99] = before, before
    outs = parts_of(wide[:, :, 3:99])
    spread = OverwriteTable(outs, TILE)
    for first, last in ((0, 2), (2, 3), (3, len(outs))):
        tiles = spread.tiles(first, last)
        begin, end = int(counts[: tiles.start].sum()), int(counts[: tiles.stop].sum())
        spread.launch(first, last, counts[tiles], places[begin:end], values[begin:end])
    for out, part in zip(parts_of(around[:, :, 3:99]), parts_of(now), strict=True):
        out.copy_(part)
    assert torch.equal(bits_of(wide), bits_of(around))


def test_entries_that_lie_outside_of_their_part_are_not_written(kernel_device):
    """A damaged message changes the part at most."""
    memory = torch.zeros(40, dtype=torch.uint8, device=kernel_device)
    spread = KernelOverwrite([memory[8:28]])
    counts = torch.tensor([900], dtype=torch.int32, device=kernel_device)
    places = torch.tensor([3, 19, 20, -1, 31], dtype=PLACE_DTYPE, device=kernel_device)
    values = torch.tensor([1, 2, 3, 4, 5], dtype=torch.uint8, device=kernel_device)
    spread.launch(0, 1, counts, places, values)
    assert memory.nonzero()[:, 0].tolist() == [11, 27]


def test_a_place_takes_two_bytes_without_a_sign():
    now, before = torch.zeros(1 << 16), torch.zeros(1 << 16)
    now[[0, 32767, 32768, 65535]] = -0.0
    _, places, values = packed(ChangedTable([(now, before)]), torch.device("cpu"))
    assert places.tolist() == [0, 32767, -32768, -1]
    assert values.tolist() == [-(1 << 31)] * 4, "bits count, not values"
    out = torch.zeros(1 << 16)
    counts = torch.tensor([4], dtype=torch.int32)
    reference.overwrite(out, counts, places, values, 1 << 16)
    assert out.view(torch.int32).nonzero()[:, 0].tolist() == [0, 32767, 32768, 65535]


def test_parts_that_do_not_fit_are_refused():
    rows = torch.zeros(4, 6)
    with pytest.raises(TypeError, match="before is bfloat16, needs float32"):
        ChangedTable([(rows, rows.bfloat16())])
    with pytest.raises(TypeError, match="elements of 4 and 2 bytes in one table"):
        OverwriteTable([rows, rows.bfloat16()])
    with pytest.raises(ValueError, match="columns of a part have stride 6, need 1"):
        OverwriteTable([rows.T])
    with pytest.raises(ValueError, match=r"a part of shape \(1, 1, 4, 6\) is too large"):
        OverwriteTable([rows[None, None]])
    with pytest.raises(ValueError, match="tile=48, needs a power of two up to 65536"):
        OverwriteTable([rows], 48)
    with pytest.raises(ValueError, match=r"counts has shape \(2,\), needs \(1,\)"):
        OverwriteTable([rows]).launch(0, 1, torch.zeros(2), rows, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_of_full_size_on_cuda(cuda, dtype):
    before = octets(3, 700, 320 * dtype.itemsize).view(dtype)
    now = changed(before, 0.01)
    wanted = packed(
        ChangedTable([(now[:, :, 32:288], before[:, :, 32:288].clone())]), torch.device("cpu")
    )
    there = before.to(cuda)
    pair = (now.to(cuda)[:, :, 32:288], there.clone()[:, :, 32:288])
    found = packed(ChangedTable([pair]), cuda)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one.cpu(), other.cpu())
    spread = OverwriteTable([there[:, :, 32:288]])
    spread.launch(0, 1, *found)
    same = there.cpu()[:, :, 32:288].contiguous(), now[:, :, 32:288].contiguous()
    assert torch.equal(*(each.view(torch.uint8) for each in same))
