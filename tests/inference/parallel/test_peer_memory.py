"""Collectives through common memory: four processes and their kernels, in Triton's interpreter."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from inference.kernels.add_rows import reference as add_rows
from inference.parallel import peer_memory
from inference.parallel.config import ParallelConfig
from inference.parallel.groups import ParallelGroups
from inference.parallel.peer_memory import PeerMemory
from inference.parallel.peer_memory.layout import RELEASED
from inference.parallel.peers import can_share
from tests.inference.parallel import test_experts
from tests.inference.parallel.ranks import Ranks, groups_for

WORLD = 4
MIXED = ParallelConfig(tp=2, dp=2)

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels run in the interpreter only where there is no GPU"
)


def common_memory(rank: int, folder: str, world: int = WORLD) -> PeerMemory:
    """Files that every process maps: the CPU's stand-in for memory mapped from other GPUs."""
    size = peer_memory.memory_bytes(world)
    buffers = [
        torch.from_file(f"{folder}/rank{r}", shared=True, size=size, dtype=torch.uint8)
        for r in range(world)
    ]
    memory = PeerMemory(rank, buffers)
    dist.barrier()
    return memory


def drawn(rank: int, step: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(*shape, generator=generator).to(dtype)


SIZES = ((3, 40), (1, 2), (2, 5000), (7, 40), (1, 3))
"""Less than a tile, and more than two; a launch of few blocks among those of many."""


def sums(rank: int, folder: str, dtype: torch.dtype) -> list[Tensor]:
    memory = common_memory(rank, folder)
    found = []
    for step, shape in enumerate(SIZES):
        x = drawn(rank, step, *shape, dtype=dtype)
        peer_memory.all_reduce(memory, x)
        found.append(x)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sums_are_in_the_order_of_the_ranks_and_rounded_once(
    four_ranks: Ranks, tmp_path: Path, dtype: torch.dtype
):
    found = four_ranks.results(sums, str(tmp_path), dtype)
    for step, shape in enumerate(SIZES):
        wanted = torch.zeros(shape)
        for rank in range(WORLD):
            wanted += drawn(rank, step, *shape, dtype=dtype).float()
        for rank in range(WORLD):
            assert torch.equal(found[rank][step], wanted.to(dtype)), (step, rank)


def gathered(rank: int, folder: str) -> list[list[Tensor]]:
    memory = common_memory(rank, folder)
    found = []
    for step, (rows, width) in enumerate(((3, 5000), (5, 12))):
        x = drawn(rank, step, rows, width, dtype=torch.float16)
        ids = torch.arange(2 * rows, dtype=torch.int32).view(rows, 2) + 100 * rank
        found.append(peer_memory.gather(memory, [x, ids, drawn(rank, step, rows, 2)]))
        found.append(peer_memory.gather(memory, [x]))
    return found


def test_rows_of_all_ranks_arrive_in_their_order(four_ranks: Ranks, tmp_path: Path):
    for found in four_ranks.results(gathered, str(tmp_path)):
        for step, (rows, width) in enumerate(((3, 5000), (5, 12))):
            (x, ids, weights), (again,) = found[2 * step : 2 * step + 2]
            everyone = range(WORLD)
            wanted = [drawn(r, step, rows, width, dtype=torch.float16) for r in everyone]
            assert torch.equal(x, torch.cat(wanted))
            assert torch.equal(again, x)
            assert torch.equal(weights, torch.cat([drawn(r, step, rows, 2) for r in everyone]))
            assert ids[:, 0].tolist() == [
                100 * r + i for r in everyone for i in range(0, 2 * rows, 2)
            ]


def added(rank: int, folder: str, dtype: torch.dtype) -> list[Tensor]:
    memory = common_memory(rank, folder)
    found = []
    for step, (rows, width, own) in enumerate(((2, 5000, 2), (3, 12, 1), (1, 7, 0))):
        parts = drawn(rank, step, WORLD * rows, width, dtype=dtype)
        y = drawn(rank, 50 + step, own, width, dtype=dtype)
        peer_memory.add_parts(memory, parts, y)
        found.append(y)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_parts_are_added_as_rows_are(four_ranks: Ranks, tmp_path: Path, dtype: torch.dtype):
    found = four_ranks.results(added, str(tmp_path), dtype)
    for step, (rows, width, own) in enumerate(((2, 5000, 2), (3, 12, 1), (1, 7, 0))):
        parts = [drawn(r, step, WORLD * rows, width, dtype=dtype) for r in range(WORLD)]
        for rank in range(WORLD):
            wanted = drawn(rank, 50 + step, own, width, dtype=dtype)
            mine = torch.cat([part[rank * rows : rank * rows + rows] for part in parts])
            index = torch.arange(WORLD * rows, dtype=torch.int32).view(WORLD, rows).T[:own]
            add_rows.add_rows(wanted, mine, mine[:0], index)
            assert torch.equal(found[rank][step], wanted), (step, rank)


def repeated(rank: int, folder: str) -> bool:
    """Launches back to back, a rank ahead of the others as often as not."""
    memory = common_memory(rank, folder)
    generator = torch.Generator().manual_seed(rank)
    is_right = True
    for step in range(30):
        width = 1 + (7 * step) % 5 * 1500
        x = torch.full((width,), float(rank + step))
        if torch.rand((), generator=generator) < 0.3:
            time.sleep(0.002)
        peer_memory.all_reduce(memory, x)
        is_right &= bool((x == WORLD * step + 6).all())
        (rows,) = peer_memory.gather(memory, [torch.full((1, width), rank + step)])
        is_right &= rows[:, 0].tolist() == [step, step + 1, step + 2, step + 3]
    return is_right


def test_a_region_is_not_written_while_another_rank_reads_it(four_ranks: Ranks, tmp_path: Path):
    assert four_ranks.results(repeated, str(tmp_path)) == [True] * WORLD


def alone(rank: int, folder: str) -> bool:
    memory = common_memory(rank, folder)
    if rank == 0:
        memory.release()
        peer_memory.all_reduce(memory, torch.ones(5000))
        return bool((memory.flags == RELEASED).any())
    return True


def test_a_released_rank_waits_for_nobody(four_ranks: Ranks, tmp_path: Path):
    assert four_ranks.results(alone, str(tmp_path)) == [True] * WORLD


def test_only_what_is_read_fast_from_others_fits():
    def of(world: int) -> Callable[..., bool]:
        size = peer_memory.memory_bytes(world)
        memory = PeerMemory(0, [torch.zeros(size, dtype=torch.uint8)] * world)
        return lambda *shape: peer_memory.fits(memory, torch.empty(shape, dtype=torch.float16))

    assert of(2)(341, 6144)
    assert not of(2)(342, 6144)
    assert of(8)(48, 6144)
    assert not of(8)(49, 6144)
    assert not of(2)(0, 6144)


def test_what_a_kernel_cannot_read_is_refused():
    memory = PeerMemory(0, [torch.zeros(peer_memory.memory_bytes(2), dtype=torch.uint8)] * 2)
    with pytest.raises(ValueError, match=r"add_parts .* \(2, 3\) .* must be contiguous"):
        peer_memory.add_parts(memory, torch.ones(4, 3), torch.ones(2, 6)[:, ::2])
    with pytest.raises(ValueError, match=r"gather .* torch.float16 .* whole words"):
        peer_memory.gather(memory, [torch.ones(4, 3).half()])


def through_memory(config: ParallelConfig, rank: int, folder: str) -> ParallelGroups:
    """The groups as they are between GPUs that reach one another."""
    dp_rank, tp_rank = config.dp_rank(rank), config.tp_rank(rank)
    tp_memory = common_memory(tp_rank, f"{folder}/group{dp_rank}", config.tp)
    world_memory = common_memory(rank, f"{folder}/world")
    return replace(
        groups_for(config),
        tp_memory=tp_memory if config.tp > 1 else None,
        world_memory=world_memory if config.dp > 1 else None,
    )


def run_experts(
    rank: int, config: ParallelConfig, folder: str, batch: list[tuple[Tensor, ...]], most: int
) -> tuple[Tensor, Tensor, list[int]]:
    groups = through_memory(config, rank, folder)
    y = test_experts.run_rank(rank, config, batch, most, groups=groups)
    parts = groups.gather_over_tp(torch.full((2, 3), float(rank)), "gather")
    memories = (groups.tp_memory, groups.world_memory)
    return y, parts, [int(m.count_B[0]) for m in memories if m is not None]


@pytest.mark.parametrize("config", [ParallelConfig(tp=4), ParallelConfig(dp=4), MIXED], ids=str)
def test_experts_over_ranks_are_those_of_one_rank(
    four_ranks: Ranks, tmp_path: Path, config: ParallelConfig
):
    for name in ["world", *(f"group{i}" for i in range(config.dp))]:
        (tmp_path / name).mkdir()
    batch = test_experts.tokens([5, 1, 13, 2][: config.dp], 1, tuple(range(test_experts.E)))
    wanted = test_experts.of_one_rank(batch)
    found = four_ranks.results(run_experts, config, str(tmp_path), batch, 13)
    for rank, (y, parts, meetings) in enumerate(found):
        torch.testing.assert_close(y, wanted[config.dp_rank(rank)], rtol=1e-5, atol=1e-5)
        first = rank - config.tp_rank(rank)
        assert torch.equal(y, found[first][0]), "tp ranks differ"
        if config.tp > 1:
            assert parts[::2, 0].tolist() == list(range(first, first + config.tp))
        # A sum and a gather over tp; dispatch and combine over all.
        assert meetings == [2] * ((config.tp > 1) + (config.dp > 1))


def test_memory_is_shared_where_each_rank_reaches_all():
    assert can_share([0, 1], [{0, 1}, {0, 1, 2}, {2, 1}])
    assert not can_share([0, 1, 2], [{0, 1, 2}, {0, 1, 2}, {2, 1}])
    assert not can_share([1], [{0, 1}, {0, 1}])


def test_a_rank_that_was_released_waits_for_nobody_again():
    buffers = [torch.zeros(peer_memory.memory_bytes(2), dtype=torch.uint8) for _ in range(2)]
    one, other = PeerMemory(0, buffers), PeerMemory(1, buffers)
    one.release()
    other.release()
    # The other had a launch more in its queue: its flag comes after the release.
    peer_memory.all_reduce(other, torch.ones(8))
    assert (one.flags[:2] == RELEASED).all()
    for _ in range(2):
        peer_memory.all_reduce(one, torch.ones(8))
