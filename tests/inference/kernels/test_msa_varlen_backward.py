import math
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from inference.kernels.msa_varlen import reference
from inference.kernels.msa_varlen.backward import BackwardLaunch, choose_launch, msa_varlen_backward
from inference.kernels.msa_varlen.backward_lists_kernel import list_queries
from inference.kernels.packing import Packing

SCALE = 0.3
LAUNCHES = {
    "one-pass": BackwardLaunch(slab=64, heads=2, unit=64, rows=16, num_warps=4, num_stages=1),
    "passes-and-units": BackwardLaunch(
        slab=13, heads=1, unit=8, rows=16, num_warps=4, num_stages=1
    ),
    "wide-tiles": BackwardLaunch(slab=20, heads=2, unit=1, rows=32, num_warps=4, num_stages=2),
}


@dataclass
class Case:
    """Packed samples with random choices; gradients in FP64 by autograd of the reference."""

    lengths: tuple[int, ...]
    block_size: int = 8
    group: int = 2
    head_dim: int = 16
    topk: int = 3
    first: int = 0
    num_queries: int | None = None
    num_kv_heads: int = 2
    dtype: torch.dtype = torch.float32
    seed: int = 0
    packing: Packing = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.packing = Packing.of(self.lengths, "cpu", self.first, self.num_queries)
        num_queries, num_tokens = self.packing.num_queries, self.packing.num_tokens
        num_heads = self.num_kv_heads * self.group
        queries, keys = (num_queries, num_heads), (num_tokens, self.num_kv_heads)
        self.q, self.k, self.v, self.grad = (
            torch.randn(*rows, self.head_dim, generator=generator).to(self.dtype)
            for rows in (queries, keys, keys, queries)
        )
        self.blocks = torch.full((num_queries, self.num_kv_heads, self.topk), -1).int()
        for query, position in enumerate(self.positions()):
            own = position // self.block_size
            for head in range(self.num_kv_heads):
                others = torch.randperm(own, generator=generator)[: self.topk - 1].tolist()
                chosen = sorted([*others, own])
                self.blocks[query, head, : len(chosen)] = torch.tensor(chosen)

    def positions(self) -> list[int]:
        first = self.packing.first
        return self.packing.positions_T[first : first + self.packing.num_queries].tolist()

    def lse(self) -> Tensor:
        """[Q, H] FP64, key by key."""
        starts = self.packing.starts_B1.tolist()
        start_of = [start for start, stop in pairwise(starts) for _ in range(start, stop)]
        out = torch.empty(self.q.shape[:2], dtype=torch.float64)
        for query, position in enumerate(self.positions()):
            start = start_of[self.packing.first + query]
            for head in range(self.q.shape[1]):
                kv_head = head // self.group
                blocks = self.blocks[query, kv_head].tolist()
                keys = [
                    start + key for key in range(position + 1) if key // self.block_size in blocks
                ]
                logits = self.k[keys, kv_head].double() @ self.q[query, head].double() * SCALE
                out[query, head] = logits.logsumexp(0) if keys else -math.inf
        return out

    def expected(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        leaves = [x.double().requires_grad_() for x in (self.q, self.k, self.v)]
        out = reference.msa_varlen(*leaves, self.blocks, self.packing, SCALE, self.block_size)
        return out.detach(), torch.autograd.grad(out, leaves, self.grad.double())

    def gradients(self, device: torch.device, launch: BackwardLaunch | None) -> tuple[Tensor, ...]:
        out, _ = self.expected()
        packing = Packing.of(self.lengths, device, self.first, self.num_queries)
        # A part of a wider projection.
        wide = torch.full((*self.q.shape[:1], self.q.shape[1] + 2, self.head_dim), torch.nan)
        wide = wide.to(self.dtype)
        wide[:, :-2] = self.q
        found = msa_varlen_backward(
            wide.to(device)[:, :-2],
            self.k.to(device),
            self.v.to(device),
            out.to(self.dtype).to(device),
            self.lse().float().to(device),
            self.grad.to(device),
            self.blocks.to(device),
            packing,
            scale=SCALE,
            block_size=self.block_size,
            launch=launch,
        )
        return tuple(x.cpu() for x in found)


def assert_like_reference(case: Case, device: torch.device, launch, tolerance: float = 2e-6):
    _, wanted = case.expected()
    for name, found, want in zip("qkv", case.gradients(device, launch), wanted, strict=True):
        assert found.dtype == case.dtype
        assert found.shape == want.shape
        # dQ of a query that sees one key is 0 in exact arithmetic.
        error = (found.double() - want).norm() / want.norm().clamp(min=1)
        assert error <= tolerance, f"d{name}: {error}"


@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)
@pytest.mark.parametrize("lengths", [(1,), (7, 8, 9), (40, 1, 16)], ids=str)
def test_gradients_are_those_of_the_reference(kernel_device, lengths, launch) -> None:
    assert_like_reference(Case(lengths), kernel_device, launch)


@pytest.mark.parametrize(
    "shape",
    [
        {"block_size": 16, "group": 4, "head_dim": 32},
        {"block_size": 4, "group": 3, "head_dim": 24},
        {"num_kv_heads": 1, "topk": 1},
    ],
    ids=str,
)
def test_shapes(kernel_device, shape) -> None:
    assert_like_reference(Case((37, 18), **shape), kernel_device, LAUNCHES["passes-and-units"])


@pytest.mark.parametrize(("first", "num_queries"), [(0, 5), (11, 20), (33, 12)])
def test_queries_are_a_range_of_the_tokens(kernel_device, first, num_queries) -> None:
    case = Case((12, 33), first=first, num_queries=num_queries)
    assert_like_reference(case, kernel_device, LAUNCHES["passes-and-units"])


def test_fp16_is_rounded_once_for_each_block_of_dq(kernel_device) -> None:
    # Weights, their gradients and the parts of dQ are rounded to FP16: eps 2^-11 each.
    case = Case((40, 9), dtype=torch.float16)
    assert_like_reference(case, kernel_device, LAUNCHES["passes-and-units"], 3 * 2**-11)


def test_a_query_that_sees_nothing_has_no_gradient_and_no_nan(kernel_device) -> None:
    case = Case((24, 20))
    case.blocks[3] = -1
    case.blocks[30, 0] = -1
    case.blocks[5, 1] = torch.tensor([2, -1, -1])  # in the future
    assert_like_reference(case, kernel_device, LAUNCHES["passes-and-units"])
    dq, _, _ = case.gradients(kernel_device, LAUNCHES["one-pass"])
    for nothing in (dq[3], dq[30, :2], dq[5, 2:]):
        assert (nothing == 0).all()


def test_blocks_that_the_sample_does_not_have_are_ignored(kernel_device) -> None:
    case = Case((12, 20))
    case.blocks[:12, :, 2] = -1
    without = case.gradients(kernel_device, LAUNCHES["one-pass"])
    case.blocks[:12, :, 2] = 2  # would be the next sample's first
    with_them = case.gradients(kernel_device, LAUNCHES["one-pass"])
    assert all(torch.equal(*pair) for pair in zip(without, with_them, strict=True))


def test_a_block_chosen_by_none_has_zero_gradients(kernel_device) -> None:
    case = Case((40,))
    case.blocks[case.blocks == 1] = -1
    assert_like_reference(case, kernel_device, LAUNCHES["passes-and-units"])
    _, dk, dv = case.gradients(kernel_device, LAUNCHES["passes-and-units"])
    assert (dk[8:16] == 0).all()
    assert (dv[8:16] == 0).all()


def sink_case() -> Case:
    """Every query of a sample chooses its first block and its own."""
    case = Case((50, 23))
    for query, position in enumerate(case.positions()):
        own = position // case.block_size
        case.blocks[query] = torch.tensor([0, own, -1] if own else [0, -1, -1])
    return case


@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)
def test_a_block_that_everybody_chose_is_cut_into_units(kernel_device, launch) -> None:
    assert_like_reference(sink_case(), kernel_device, launch)


@pytest.mark.parametrize("make", [sink_case, lambda: Case((40, 1, 16))])
def test_repeated_calls_give_the_same_bits(kernel_device, make) -> None:
    case, launch = make(), LAUNCHES["passes-and-units"]
    first, second = (case.gradients(kernel_device, launch) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_a_packed_sample_has_the_gradients_that_it_has_alone(kernel_device) -> None:
    alone, packed = Case((19,), seed=1), Case((14, 19, 5))
    sample = slice(14, 33)
    for name in ("q", "k", "v", "grad", "blocks"):
        getattr(packed, name)[sample] = getattr(alone, name)
    launch = LAUNCHES["one-pass"]
    for have, want in zip(
        packed.gradients(kernel_device, launch),
        alone.gradients(kernel_device, launch),
        strict=True,
    ):
        assert torch.equal(have[sample], want)


def test_far_logits_do_not_overflow(kernel_device) -> None:
    """A block of fewer keys than the tile has, and rows that are no query, have logits of 0."""
    case = Case((21, 5), block_size=4, head_dim=16, seed=3)
    # Every logit is about -190, its base-2 exponential far from FP32's range.
    case.q, case.k = case.q * 0.01 + 6.3, case.k * 0.01 - 6.3
    _, wanted = case.expected()
    for have, want in zip(
        case.gradients(kernel_device, LAUNCHES["passes-and-units"]), wanted, strict=True
    ):
        # Such logits have an FP32 spacing of 2^-16 or 2^-15, and what they give cancels in dK.
        assert (have.double() - want).norm() <= 2e-2 * want.norm()


def test_lists_ascend_and_units_cover_them() -> None:
    case = sink_case()
    lists = list_queries(case.blocks, case.packing, case.block_size, slab=30, tile=4, unit=8)
    num_pages, rows = lists.num_pages, lists.row_start_X1.tolist()
    units = lists.units_U8[: lists.unit_start_X1[-1]].tolist()
    covered = []
    for row, length, first_token, num_keys, head, *_ in units:
        assert length in (4, 8)
        assert row % 4 == 0
        (index,) = {i for i, (start, stop) in enumerate(pairwise(rows)) if start <= row < stop}
        page, slab = index % num_pages, index // num_pages // case.num_kv_heads
        assert index // num_pages % case.num_kv_heads == head
        assert [first_token, num_keys] == case.packing.pages(8).tokens_P2[page].tolist()
        tokens = lists.tokens_L[row : row + length].tolist()
        queries = [token for token in tokens if token >= 0]
        assert queries == sorted(queries)
        assert tokens[len(queries) :] == [-1] * (length - len(queries))
        assert all(token // 30 == slab for token in queries)
        covered += range(row, row + length)
    assert sorted(covered) == list(range(rows[-1]))
    # Each choice stands in its own row.
    chosen = (case.blocks >= 0).nonzero()
    row_of = lists.row_QKB[tuple(chosen.T)]
    assert row_of.unique().numel() == len(chosen)
    assert (lists.tokens_L[row_of.long()] == chosen[:, 0]).all()
    assert (lists.row_QKB[case.blocks < 0] == -1).all()


def test_a_pass_of_the_chosen_launch_takes_a_gibibyte() -> None:
    q = torch.empty(40_000, 64, 128, dtype=torch.bfloat16, device="meta")
    blocks = torch.empty(40_000, 4, 16, dtype=torch.int32, device="meta")
    launch = choose_launch(q, blocks)
    assert (launch.slab, launch.heads, launch.unit) == (13_334, 1, 256)
    assert launch.slab * launch.heads * 16 * 16 * 128 * 2 <= 1 << 30
    few = choose_launch(q[:1000], blocks[:1000])
    assert (few.slab, few.heads) == (1000, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_m3_shapes(cuda, dtype) -> None:
    case = Case(
        (700, 1, 900),
        block_size=128,
        group=16,
        head_dim=128,
        topk=4,
        num_kv_heads=4,
        dtype=dtype,
    )
    case.q *= 0.3
    tolerance = 3e-6 if dtype == torch.float32 else 3 * torch.finfo(dtype).eps
    assert_like_reference(case, cuda, None, tolerance)
