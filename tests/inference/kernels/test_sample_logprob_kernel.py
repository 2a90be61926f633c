"""The sampling kernels against the reference, in the interpreter where there is no GPU."""

import pytest
import torch
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


def test_equal_sums_go_to_the_lowest_id(kernel_device):
    logits = torch.zeros(2, VOCAB, device=kernel_device)
    logits[0, [700, 1300, 2400]] = 2.0
    logits[1, [5, 6, 2400]] = 2.0
    assert draw(logits, temperature=0.0).ids_R.tolist() == [700, 5]


def test_a_near_tie_is_decided_by_the_fp64_sums(kernel_device):
    """Ids whose sums agree to 1e-6, in different groups: FP32 noise cannot tell them apart."""
    noise = reference.gumbel_noise(torch.tensor([3]), torch.tensor([0]), VOCAB)[0]
    chosen = [900, 1700, 2300]
    sums = torch.tensor([30.0 - 1e-6, 30.0, 30.0 - 1e-6], dtype=torch.float64)
    logits = torch.zeros(1, VOCAB)
    logits[0, chosen] = (sums - noise[chosen]).float()
    logits = logits.to(kernel_device)
    wanted = reference.sample_logprob(logits, **settings(1, kernel_device, seeds=3))
    assert wanted.ids_R.item() in chosen
    assert torch.equal(draw(logits, seeds=3).ids_R, wanted.ids_R)


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
    logits[1, 1500] = bad
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


def test_rows_may_lie_apart_and_no_rows_draw_nothing(kernel_device):
    wide = torch.randn(3, 700, device=kernel_device)
    wanted = draw(wide[:, :500].contiguous())
    for mine, theirs in zip(draw(wide[:, :500]), wanted, strict=True):
        assert torch.equal(mine, theirs)
    assert draw(wide[:0]).ids_R.shape == (0,)


def test_fp32_noise_keeps_its_bound_at_every_place():
    """The same formula in torch, at places near 0, 1/16, 1/2 and 1 and at random ones."""
    bits = [mix64(torch.arange(1, 100_001) * as_int64(GOLDEN)) >> 12 & (1 << 52) - 1]
    for centre in (0, 1 << 20, 1 << 48, 1 << 51, (1 << 52) - (1 << 48), (1 << 52) - 1):
        near = centre + torch.arange(-500, 500)
        bits.append(near[(near >= 0) & (near < 1 << 52)])
    bits = torch.cat(bits)
    rest = ((1 << 53) - 1 - 2 * bits).double() * 2.0**-53
    exact = -torch.log(-torch.log(rest))
    is_low = bits < 1 << 51
    part = (torch.where(is_low, bits, (1 << 52) - 1 - bits).float() + 0.5) * 2.0**-52
    log = -torch.log(torch.where(is_low, 1 - part, part))
    series = part * (1 + part * (0.5 + part * (0.33333334 + part * (0.25 + part * 0.2))))
    found = -torch.log(torch.where(is_low & (part < 0.0625), series, log))
    assert (found.double() - exact).abs().max() < 0.1 * kernel.NOISE_ERROR.value


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
