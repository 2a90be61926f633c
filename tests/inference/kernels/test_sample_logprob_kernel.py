"""The sampling kernels against the reference, in the interpreter where there is no GPU."""

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from inference.kernels.mix64 import GOLDEN, as_int64, mix64
from inference.kernels.sample_logprob import SampledTokens, kernel, reference, sample_logprob

VOCAB = 2500
"""Three chunks, the last one partly empty."""


def settings(num_rows: int, device: torch.device, **options: object) -> dict[str, Tensor]:
    """Neutral settings but for `options`: one value for all rows or one for each."""
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seeds": 0}
    values |= {"positions": list(range(num_rows))} | options
    tensors = {}
    for name, value in values.items():
        dtype = torch.int64 if name in ("top_k", "seeds", "positions") else torch.float32
        column = value if isinstance(value, list) else [value] * num_rows
        tensors[f"{name}_R"] = torch.tensor(column, dtype=dtype, device=device)
    return tensors


def draw(logits: Tensor, has_cuts: bool | None = None, **options: object) -> SampledTokens:
    return kernel.sample_logprob(
        logits, *settings(len(logits), logits.device, **options).values(), has_cuts
    )


def assert_equal(found: SampledTokens, wanted: SampledTokens) -> None:
    assert torch.equal(found.ids_R, wanted.ids_R)
    assert torch.equal(found.is_finite_R, wanted.is_finite_R)
    # Sums of some thousand terms in another order, and logarithms good to 2^-22.
    for name in ("logprobs_R", "raw_logprobs_R"):
        torch.testing.assert_close(
            getattr(found, name), getattr(wanted, name), atol=1e-5, rtol=1e-6, equal_nan=True
        )


@pytest.mark.parametrize("vocab", [1, 127, 1024, VOCAB])
def test_the_kernel_is_the_reference(vocab, kernel_device):
    torch.manual_seed(vocab)
    logits = (torch.randn(9, vocab) * 3).to(kernel_device)
    options = {
        "temperature": [1.0, 0.7, 0.0, 1.3, 100.0, 0.01, 1.0, 0.0, 2.5],
        "seeds": [0, 1, -1, 1 << 62, -(1 << 63), 5, 6, 7, (1 << 63) - 1],
        "positions": [0, 1, 2, 1 << 40, 4, 5, 6, 7, 8],
    }
    wanted = reference.sample_logprob(logits, **settings(9, kernel_device, **options))
    assert_equal(draw(logits, False, **options), wanted)


def test_many_draws_are_those_of_the_reference(kernel_device):
    logits = torch.randn(1, 300).repeat(30, 1).to(kernel_device)
    options = {"seeds": list(range(30)), "temperature": [0.5, 1.0] * 15}
    wanted = reference.sample_logprob(logits, **settings(30, kernel_device, **options))
    assert len(wanted.ids_R.unique()) > 10
    assert_equal(draw(logits, **options), wanted)


@pytest.mark.parametrize(("temperature", "level"), [(0.0, 2.0), (1.0, 1e20)])
def test_equal_sums_go_to_the_lowest_id(temperature, level, kernel_device):
    """Sums of 1e20 are equal whatever the noise."""
    logits = torch.zeros(2, VOCAB, device=kernel_device)
    # Id 1154 is in a later tile than 1128, but at a lower place of it.
    logits[0, [1128, 1154, 2400]] = level
    logits[1, [5, 6, 2400]] = level
    assert draw(logits, temperature=temperature).ids_R.tolist() == [1128, 5]


def test_loose_bounds_open_as_many_groups_as_it_takes(kernel_device):
    """Three likely tokens: noise of all sizes wins, and the largest bound is not always its."""
    logits = torch.full((25, 4096), -30.0)
    logits[:, [17, 1300, 3100]] = torch.tensor([3.0, 3.1, 2.9])
    logits = logits.to(kernel_device)
    seeds = list(range(25))
    wanted = reference.sample_logprob(logits, **settings(25, kernel_device, seeds=seeds))
    assert wanted.ids_R.unique().tolist() == [17, 1300, 3100]
    assert torch.equal(draw(logits, False, seeds=seeds).ids_R, wanted.ids_R)


@pytest.mark.parametrize("level", [30.0, 1e5])
def test_near_ties_are_decided_by_the_fp64_sums(level, kernel_device):
    """Sums that agree but for the rounding of the logits, and bounds that are close."""
    noise = reference.gumbel_noise(torch.arange(3), torch.zeros(3, dtype=torch.int64), 4096)
    sums = torch.where(noise > 4.0, level, level - 100.0)
    logits = (0.7 * (sums - noise)).float().to(kernel_device)
    options = {"temperature": 0.7, "seeds": list(range(3)), "positions": 0}
    wanted = reference.sample_logprob(logits, **settings(3, kernel_device, **options))
    assert torch.equal(draw(logits, False, **options).ids_R, wanted.ids_R)


def test_minus_infinity_is_never_drawn_and_counts_as_not_finite(kernel_device):
    logits = torch.full((3, VOCAB), -torch.inf, device=kernel_device)
    logits[:2, 2100] = 1.0
    logits[1, 40] = 1.0
    out = draw(logits[:2], seeds=4)
    assert out.ids_R[0] == 2100
    assert out.ids_R[1].item() in (40, 2100)
    assert out.logprobs_R.tolist() == pytest.approx([0.0, -0.6931472])
    assert out.is_finite_R.tolist() == [False, False]
    assert draw(logits[2:]).logprobs_R.isnan().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_is_told_and_leaves_the_others_alone(bad, kernel_device):
    logits = torch.randn(3, VOCAB, device=kernel_device)
    expected = draw(logits)
    assert expected.is_finite_R.all()
    logits[1, 2450] = bad
    out = draw(logits)
    assert out.is_finite_R.tolist() == [True, False, True]
    assert out.logprobs_R[1].isnan()
    assert 0 <= int(out.ids_R[1]) < VOCAB
    for mine, theirs in zip(out, expected, strict=True):
        assert torch.equal(mine[[0, 2]], theirs[[0, 2]])


def test_a_row_is_the_same_in_any_batch(kernel_device):
    logits = torch.randn(10, VOCAB, device=kernel_device)
    together = draw(logits, seeds=list(range(10)))
    for row in (0, 9):
        alone = draw(logits[row : row + 1], seeds=[row], positions=[row])
        for mine, theirs in zip(alone, together, strict=True):
            assert torch.equal(mine[0], theirs[row])


@pytest.mark.parametrize("has_cuts", [None, True])
def test_cuts_are_those_of_the_reference(has_cuts, kernel_device):
    torch.manual_seed(1)
    logits = (torch.randn(6, VOCAB) * 2).to(kernel_device)
    options = {
        "temperature": [1.0, 0.7, 0.0, 1.3, 0.9, 0.0],
        "top_k": [0, 5, 3, 0, 50, 0],
        "top_p": [1.0, 0.8, 0.1, 0.5, 1.0, 1.0],
        "min_p": [0.0, 0.0, 0.9, 0.0, 0.1, 0.5],
    }
    wanted = reference.sample_logprob(logits, **settings(6, kernel_device, **options))
    assert_equal(draw(logits, has_cuts, **options), wanted)


@pytest.mark.parametrize("has_cuts", [False, True])
def test_rows_may_lie_column_by_column(has_cuts, kernel_device):
    logits = torch.randn(500, 3, device=kernel_device).T
    options = {"top_k": 7} if has_cuts else {}
    found = draw(logits, has_cuts, **options)
    for mine, theirs in zip(found, draw(logits.contiguous(), has_cuts, **options), strict=True):
        assert torch.equal(mine, theirs)


def test_rows_may_lie_apart_and_no_rows_draw_nothing(kernel_device):
    wide = torch.randn(3, 700, device=kernel_device)
    wanted = draw(wide[:, :500].contiguous())
    for mine, theirs in zip(draw(wide[:, :500]), wanted, strict=True):
        assert torch.equal(mine, theirs)
    assert draw(wide[:0]).ids_R.shape == (0,)


@triton.jit
def _bounds_kernel(x_ptr, high_ptr, bounds_ptr, scale, FAST: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    high = tl.load(high_ptr + o).to(tl.uint32)
    tl.store(bounds_ptr + o, kernel._bounds(tl.load(x_ptr + o), scale, high, FAST) + 32.0)


@pytest.mark.parametrize("temperature", [1.0, 0.3, 7.0])
def test_bounds_are_above_the_sums_and_close_where_noise_is_large(temperature, kernel_device):
    """At places u near 0, 1/2 and 1 and at random ones, with logits of all sizes."""
    torch.manual_seed(2)
    bits = [mix64(torch.arange(1, 16_385) * as_int64(GOLDEN)) >> 12 & (1 << 52) - 1]
    for centre in (0, 1 << 25, 1 << 51, (1 << 52) - 1):
        near = centre + torch.arange(-1024, 1024) * 1023
        bits.append(near[(near >= 0) & (near < 1 << 52)])
    bits = torch.cat(bits)[:20480]
    x = torch.randn(len(bits)) * torch.tensor([1.0, 30.0, 1e4, 1e6]).repeat(len(bits) // 4)
    rest = ((1 << 53) - 1 - 2 * bits).double() * 2.0**-53
    exact = (x / temperature).double() - torch.log(-torch.log(rest))
    exact = exact.to(kernel_device) / math.log(2)
    high = bits >> 20
    found = torch.empty(len(bits), device=kernel_device)
    scale = (torch.tensor(math.log2(math.e)) / torch.tensor(temperature)).item()
    _bounds_kernel[(len(bits) // 1024,)](
        x.to(kernel_device),
        high.to(kernel_device),
        found,
        scale,
        FAST=kernel_device.type == "cuda",
        BLOCK=1024,
    )
    above = found.double() - exact
    error = kernel.BOUND_ERROR.value + kernel.RELATIVE_ERROR.value * exact.abs()
    assert (above > -0.5 * error).all()
    is_close = ((bits < 1 << 42) & (bits > 1 << 34)).to(kernel_device)
    assert is_close.any()
    assert (above < 1e-3 + error)[is_close].all()


@pytest.mark.parametrize("rows", [1, 7, 130])
def test_m3_vocabulary_on_the_gpu(rows, cuda):
    torch.manual_seed(rows)
    logits = torch.randn(rows, 200064, device=cuda) * 3
    options = {
        "temperature": torch.tensor([0.7, 1.0, 0.0, 1.2]).repeat(rows)[:rows].tolist(),
        "seeds": list(range(rows)),
    }
    rows_of = settings(rows, cuda, **options)
    found = sample_logprob(logits, **rows_of, has_cuts=False)
    wanted = reference.sample_logprob(logits, **rows_of)
    assert torch.equal(found.ids_R, wanted.ids_R)
    torch.testing.assert_close(found.logprobs_R, wanted.logprobs_R, atol=2e-5, rtol=0)
    torch.testing.assert_close(found.raw_logprobs_R, wanted.raw_logprobs_R, atol=2e-5, rtol=0)


def test_a_graph_draws_by_new_positions(cuda):
    logits = torch.randn(4, 200064, device=cuda)
    rows = settings(4, cuda)
    sample_logprob(logits, **rows, has_cuts=False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sample_logprob(logits, **rows, has_cuts=False)
    for position in (5, 6):
        rows["positions_R"].fill_(position)
        graph.replay()
        wanted = reference.sample_logprob(logits, **rows)
        assert torch.equal(out.ids_R, wanted.ids_R)
