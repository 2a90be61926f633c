"""Experts over four real ranks against one rank that holds them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from inference.kernels.expert_gemm import expert_gemm
from inference.parallel import exchange
from inference.parallel.config import ParallelConfig
from inference.parallel.groups import ParallelGroups
from inference.parallel.moe import ParallelExperts
from tests.inference.parallel.ranks import Ranks, groups_for

E, C, I, A, SHARED = 8, 12, 8, 3, 16
ACT = {"alpha": 1.702, "limit": 7.0}

CONFIGS = [
    ParallelConfig(tp=tp, dp=4 // tp, ep=4 // tp * d)
    for tp in (1, 2, 4)
    for d in range(1, tp + 1)
    if tp % d == 0
]
"""All ways to divide four ranks."""
IDS = [f"tp{c.tp}-dp{c.dp}-ep{c.ep}" for c in CONFIGS]


@dataclass
class Weights:
    w13: Tensor
    w2: Tensor
    shared: tuple[Tensor, Tensor]

    @classmethod
    def random(cls) -> Weights:
        generator = torch.Generator().manual_seed(1)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

        shared = (draw(2 * SHARED, C), draw(C, SHARED))
        return cls(draw(E, 2 * I, C), draw(E, C, I), shared)

    def of_rank(self, config: ParallelConfig, rank: int) -> Weights:
        held, width = config.experts(E, rank), config.width_rank(rank)
        experts = slice(held.start, held.stop)
        tp_rank = config.tp_rank(rank)
        gate_up, down = self.shared
        return Weights(
            torch.cat(
                [_part(half, 1, config.width_ranks, width) for half in self.w13.chunk(2, 1)], 1
            )[experts],
            _part(self.w2, 2, config.width_ranks, width)[experts],
            (
                torch.cat([_part(half, 0, config.tp, tp_rank) for half in gate_up.chunk(2)]),
                _part(down, 1, config.tp, tp_rank),
            ),
        )


def _part(tensor: Tensor, dim: int, parts: int, part: int) -> Tensor:
    return tensor.chunk(parts, dim)[part]


def tokens(counts: Sequence[int], seed: int, experts: Sequence[int]) -> list[tuple[Tensor, ...]]:
    """(x, ids, weights) of each dp group; `experts` are those that anybody is routed to."""
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for count in counts:
        choice = torch.rand(count, len(experts), generator=generator).argsort(1)[:, :A]
        ids = torch.tensor(experts, dtype=torch.int32)[choice].contiguous()
        ids[torch.rand(ids.shape, generator=generator) < 0.1] = -1
        x = torch.randn(count, C, generator=generator)
        drawn.append((x, ids, torch.rand(ids.shape, generator=generator)))
    return drawn


def run_rank(
    rank: int,
    config: ParallelConfig,
    batch: list[tuple[Tensor, ...]],
    max_tokens: int,
    form: str = "fixed",
    groups: ParallelGroups | None = None,
) -> Tensor:
    weights = Weights.random().of_rank(config, rank)
    x, ids, route = batch[config.dp_rank(rank)]

    def expert_sum(x: Tensor, ids: Tensor, route: Tensor, *, with_shared: bool) -> Tensor:
        shared = weights.shared if with_shared else None
        return expert_gemm(x, weights.w13, weights.w2, ids, route, **ACT, shared=shared)

    def shared_sum(x: Tensor) -> Tensor:
        none = torch.full((len(x), 1), -1, dtype=torch.int32)
        return expert_gemm(
            x, weights.w13, weights.w2, none, torch.ones(len(x), 1), **ACT, shared=weights.shared
        )

    experts = ParallelExperts(groups or groups_for(config), E)
    least = -1 if form == "counted" else 1 << 40
    with patch.multiple(exchange, COUNT_BYTES=least, COUNT_ROWS=least):
        return experts(x, ids, route, expert_sum, shared_sum, max_tokens=max_tokens)


def of_one_rank(batch: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """What `run_rank` is to give in each dp group."""
    one = Weights.random()
    return [
        expert_gemm(x, one.w13, one.w2, ids, route, **ACT, shared=one.shared)
        for x, ids, route in batch
    ]


BATCHES = {
    "even": ([6, 6, 6, 6], range(E)),
    "ragged": ([5, 1, 13, 2], range(E)),
    "expert 6 is nobody's": ([4, 7, 3, 5], (0, 1, 2, 3, 4, 5, 7)),
    "all to three experts": ([9, 2, 3, 3], (4, 5, 6)),
    "groups without tokens": ([0, 6, 0, 1], range(E)),
    "nobody has tokens": ([0, 0, 0, 0], range(E)),
}


@pytest.mark.parametrize("form", ["fixed", "counted"])
@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_every_division_of_four_ranks_equals_one_rank(
    four_ranks: Ranks, config: ParallelConfig, form: str
):
    for seed, (name, (counts, experts)) in enumerate(BATCHES.items()):
        batch = tokens(counts[: config.dp], seed, tuple(experts))
        # A decode step is padded to the size of a captured graph: more rows than anybody has.
        max_tokens = max(counts[: config.dp]) + seed % 3
        of_group = of_one_rank(batch)
        found = four_ranks.results(run_rank, config, batch, max_tokens, form)
        for rank, y in enumerate(found):
            wanted = of_group[config.dp_rank(rank)]
            torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5, msg=f"{name}, rank {rank}")
            assert torch.equal(y, found[rank - config.tp_rank(rank)]), "tp ranks differ"


@pytest.mark.parametrize("form", ["fixed", "counted"])
def test_the_same_tokens_give_the_same_bits(four_ranks: Ranks, form: str):
    config = ParallelConfig(tp=2, dp=2)
    batch = tokens([13, 4], 3, tuple(range(E)))
    first, again = (four_ranks.results(run_rank, config, batch, 13, form) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def count_arrivals(rank: int, config: ParallelConfig, ids: list[Tensor]) -> list[float]:
    """First element (its number) of every token that arrives at this rank in the counted form."""
    own = ids[rank]
    x = torch.arange(len(own)).float()[:, None] + 100 * rank
    own_exchange = exchange.ExpertExchange(groups_for(config), E)
    arrived = own_exchange.dispatch(x.repeat(1, 2), own, torch.ones(own.shape)).received()
    return sorted(arrived.x_RC[:, 0].tolist())


def test_a_token_travels_once_to_each_rank_that_holds_any_of_its_experts(four_ranks: Ranks):
    # Two experts a rank: the two choices of token 0 of rank 0 lie on one rank, those of 1 on two.
    ids = [[[0, 1], [0, 2]], [[7, 6]], [[-1, -1]], [[3, 4], [5, -1]]]
    tensors = [torch.tensor(rows, dtype=torch.int32) for rows in ids]
    found = four_ranks.results(count_arrivals, ParallelConfig(dp=4), tensors)
    assert found == [[0, 1], [1, 300], [300, 301], [100]]


def counted_pays(rank: int, config: ParallelConfig) -> list[bool]:
    own = exchange.ExpertExchange(groups_for(config), 8)
    return [own.prefers_counted(rows, 1, 12288) for rows in (1, 128, 8192)]


def test_counts_are_exchanged_only_where_that_saves_enough(four_ranks: Ranks):
    # A top-1 token reaches one of four ranks: 3/4 of 3 · 8192 rows stay where they are, both ways.
    found = four_ranks.results(counted_pays, ParallelConfig(dp=4))
    assert found == [[False, False, True]] * 4


def too_few_rows(rank: int, config: ParallelConfig, batch: list[tuple[Tensor, ...]]) -> Tensor:
    return run_rank(rank, config, batch, 1)


def test_more_tokens_than_the_fixed_form_has_rows_are_refused(four_ranks: Ranks):
    batch = tokens([5, 5, 5, 5], 0, tuple(range(E)))
    for kind, message in four_ranks.run(too_few_rows, ParallelConfig(dp=4), batch):
        assert (kind, message) == ("error", "ValueError: 5 tokens do not fit into num_rows=1")
