import math

import pytest
import torch

from inference.kernels.sample_logprob import SampledTokens, sample_logprob
from inference.kernels.sample_logprob.reference import gumbel_noise, keep_top


def sample(logits: torch.Tensor, **options: object) -> SampledTokens:
    """Sample with neutral settings but for `options`: one value for all rows or one for each."""
    rows = len(logits)
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seeds": 0}
    settings |= {"positions": list(range(rows))} | options
    tensors = {}
    for name, value in settings.items():
        dtype = torch.int64 if name in ("top_k", "seeds", "positions") else torch.float32
        column = value if isinstance(value, list) else [value] * rows
        tensors[f"{name}_R"] = torch.tensor(column, dtype=dtype)
    return sample_logprob(logits, **tensors)


def test_the_logprob_is_that_of_the_distribution_sampled_from():
    """Logits 2, 1, 0 at temperature 0.5, token 0: -0.1429; raw -0.4076; not -0.8152."""
    out = sample(torch.tensor([[2.0, 1.0, 0.0]]).repeat(50, 1), temperature=0.5)
    is_first = out.ids_R == 0
    assert is_first.any()
    torch.testing.assert_close(
        out.logprobs_R[is_first][0], torch.tensor(-0.1429), rtol=0, atol=5e-5
    )
    torch.testing.assert_close(
        out.raw_logprobs_R[is_first][0], torch.tensor(-0.4076), rtol=0, atol=5e-5
    )


def test_at_temperature_1_without_cuts_both_logprobs_are_one():
    out = sample(torch.randn(40, 33) * 3)
    assert torch.equal(out.logprobs_R, out.raw_logprobs_R)


def test_temperature_0_is_argmax_with_the_raw_logprob_and_ignores_cuts():
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [5.0, 1.0, 2.0, 5.0]])
    out = sample(logits, temperature=0.0, top_k=1, top_p=0.1, min_p=0.9)
    assert out.ids_R.tolist() == [1, 0]
    expected = logits.log_softmax(-1)[torch.arange(2), torch.tensor([1, 0])]
    assert torch.equal(out.logprobs_R, expected)
    assert torch.equal(out.raw_logprobs_R, expected)


def test_a_row_draws_the_same_in_any_batch():
    logits = torch.randn(12, 50)
    options = {
        "temperature": [0.0, 0.7, 1.0, 1.3] * 3,
        "top_k": [0, 5, 0] * 4,
        "top_p": [1.0, 0.8, 1.0, 0.5] * 3,
        "min_p": [0.0, 0.0, 0.1] * 4,
        "seeds": list(range(12)),
        "positions": list(range(100, 112)),
    }
    together = sample(logits, **options)
    for row in range(12):
        alone = sample(logits[row : row + 1], **{k: [v[row]] for k, v in options.items()})
        for mine, theirs in zip(alone, together, strict=True):
            assert torch.equal(mine[0], theirs[row])


def test_seeds_and_positions_draw_independently():
    logits = torch.zeros(1000, 1000)
    for options in ({"positions": 7, "seeds": list(range(1000))}, {"positions": list(range(1000))}):
        ids = sample(logits, **options).ids_R
        # 1000 draws of 1000 equal tokens leave 1000 / e unseen; three standard deviations.
        assert abs(1000 - len(ids.unique()) - 1000 / math.e) < 30
    swapped = sample(torch.zeros(2, 1 << 16), seeds=[3, 4], positions=[4, 3]).ids_R
    assert swapped[0] != swapped[1]


def test_draws_follow_the_softmax():
    """Chi-square of 20000 draws over 8 tokens: 7 degrees of freedom, 24.3 at one in a thousand."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -2.0, 1.5, -0.5])
    for temperature in (0.7, 1.0, 1.5):
        ids = sample(logits.repeat(20000, 1), temperature=temperature, seeds=5).ids_R
        expected = (logits / temperature).double().softmax(-1) * 20000
        counts = torch.bincount(ids, minlength=8).double()
        assert ((counts - expected) ** 2 / expected).sum() < 24.3


def test_draws_follow_the_truncated_softmax():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5])
    out = sample(logits.repeat(20000, 1), top_k=3, seeds=9)
    expected = torch.tensor([2.0, 1.0, 0.5]).double().softmax(-1) * 20000
    counts = torch.bincount(out.ids_R, minlength=5).double()
    assert counts[[2, 3]].sum() == 0
    assert ((counts[[0, 1, 4]] - expected) ** 2 / expected).sum() < 13.8
    torch.testing.assert_close(out.logprobs_R.unique().exp().sum(), torch.tensor(1.0))


def test_noise_is_standard_gumbel():
    noise = gumbel_noise(torch.arange(200), torch.arange(200), 1000)
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)
    for threshold in (-1.0, 0.0, 2.0, 6.0):
        share = (noise <= threshold).double().mean().item()
        assert share == pytest.approx(math.exp(-math.exp(-threshold)), abs=0.004)


def kept(logits: list[float], top_k: int, top_p: float) -> list[int]:
    out = keep_top(torch.tensor([logits]), torch.tensor([top_k]), torch.tensor([top_p]))
    return out[0].isfinite().nonzero().flatten().tolist()


def test_top_k_keeps_exactly_k_and_ties_go_to_the_lower_id():
    assert kept([0.0, 3.0, 1.0, 3.0, 1.0], 1, 1.0) == [1]
    assert kept([0.0, 3.0, 1.0, 3.0, 1.0], 3, 1.0) == [1, 2, 3]
    assert kept([0.0, 3.0, 1.0], 9, 1.0) == [0, 1, 2]
    assert kept([0.0, 3.0, 1.0], 0, 1.0) == [0, 1, 2]


def test_top_p_keeps_the_shortest_run_that_reaches_p():
    logits = [math.log(p) for p in (0.1, 0.5, 0.15, 0.25)]
    assert kept(logits, 0, 0.49) == [1]
    assert kept(logits, 0, 0.51) == [1, 3]
    assert kept(logits, 0, 0.74) == [1, 3]
    assert kept(logits, 0, 0.76) == [1, 2, 3]
    assert kept(logits, 0, 0.91) == [0, 1, 2, 3]
    assert kept(logits, 0, 1e-9) == [1]


def test_top_p_acts_on_what_top_k_left():
    logits = [math.log(p) for p in (0.1, 0.5, 0.15, 0.25)]
    # Of the two best, renormalised: 2/3 and 1/3. Without top-k 0.6 would take both.
    assert kept(logits, 2, 0.6) == [1]
    assert kept(logits, 0, 0.6) == [1, 3]


def test_temperature_acts_before_the_cuts():
    # At temperature 2 the shares 0.8, 0.2 become 2/3, 1/3, and 0.7 needs both.
    logits = torch.tensor([[math.log(0.8), math.log(0.2)]])
    ids = sample(logits.repeat(300, 1), temperature=2.0, top_p=0.7, seeds=1).ids_R
    assert set(ids.tolist()) == {0, 1}
    ids = sample(logits.repeat(300, 1), temperature=1.0, top_p=0.7, seeds=1).ids_R
    assert set(ids.tolist()) == {0}


def test_min_p_cuts_below_a_share_of_the_best():
    logits = torch.tensor([[math.log(p) for p in (0.5, 0.26, 0.04, 0.2)]])
    out = sample(logits.repeat(500, 1), min_p=0.5, seeds=2)
    assert set(out.ids_R.tolist()) == {0, 1}
    expected = torch.tensor([0.5 / 0.76, 0.26 / 0.76]).log()[out.ids_R]
    torch.testing.assert_close(out.logprobs_R, expected)


def test_cuts_of_one_row_leave_the_others_alone():
    logits = torch.randn(1, 30).repeat(200, 1)
    plain = sample(logits, seeds=3)
    mixed = sample(logits, seeds=3, top_k=[2, 0] * 100, top_p=[0.5, 1.0] * 100)
    for mine, theirs in zip(plain, mixed, strict=True):
        assert torch.equal(mine[1::2], theirs[1::2])
    assert len(mixed.ids_R[::2].unique()) <= 2


def test_cuts_equal_a_row_by_row_oracle():
    torch.manual_seed(0)
    rows, vocab = 40, 25
    logits = torch.randn(rows, vocab) * 2
    temperature = (torch.rand(rows) + 0.5).tolist()
    top_k = torch.randint(0, vocab, (rows,)).tolist()
    top_p = (torch.rand(rows) * 0.9 + 0.1).tolist()
    min_p = (torch.rand(rows) * 0.3).tolist()
    out = sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for row in range(rows):
        scaled = (logits[row].double() / temperature[row]).tolist()
        order = sorted(range(vocab), key=lambda v, s=scaled: (-s[v], v))
        order = order[: top_k[row]] if top_k[row] else order
        weight = {v: math.exp(scaled[v]) for v in order}
        total, mass, nucleus = sum(weight.values()), 0.0, []
        for v in order:
            if mass / total < top_p[row]:
                nucleus.append(v)
            mass += weight[v]
        support = [v for v in nucleus if weight[v] >= min_p[row] * weight[nucleus[0]]]
        chosen = int(out.ids_R[row])
        assert chosen in support
        expected = math.log(weight[chosen] / sum(weight[v] for v in support))
        assert float(out.logprobs_R[row]) == pytest.approx(expected, abs=1e-5)


def test_tokens_ruled_out_by_minus_infinity_are_never_drawn():
    logits = torch.full((300, 6), -torch.inf)
    logits[:, 4] = -1e4
    logits[:150, 2] = -1e4
    ids = sample(logits, seeds=4).ids_R
    assert set(ids[:150].tolist()) == {2, 4}
    assert set(ids[150:].tolist()) == {4}


def test_a_nan_row_reports_nan_and_leaves_the_others_alone():
    logits = torch.randn(3, 9)
    expected = sample(logits)
    logits[1, 4] = torch.nan
    out = sample(logits)
    assert out.logprobs_R.isnan().tolist() == [False, True, False]
    assert out.raw_logprobs_R.isnan().tolist() == [False, True, False]
    assert 0 <= int(out.ids_R[1]) < 9
    assert torch.equal(out.ids_R[[0, 2]], expected.ids_R[[0, 2]])


def test_no_rows_draw_nothing():
    out = sample(torch.zeros(0, 9))
    assert out.ids_R.shape == out.logprobs_R.shape == (0,)


def test_bf16_logits_and_misshapen_settings_are_refused():
    with pytest.raises(TypeError, match="logits_RV is bfloat16, needs float32"):
        sample(torch.zeros(2, 9).bfloat16())
    with pytest.raises(ValueError, match=r"seeds_R has shape \(3,\), needs \(2,\)"):
        sample(torch.zeros(2, 9), seeds=[1, 2, 3])
