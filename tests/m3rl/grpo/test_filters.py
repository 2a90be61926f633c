import numpy as np
import pytest

from m3rl.grpo.filters import has_signal
from tests.m3rl.completions import completion, group


def of(*completions):
    return group(*[completion(sample_index=i, **fields) for i, fields in enumerate(completions)])


RIGHT, WRONG = {"reward": 1.0}, {"reward": 0.0}


@pytest.mark.parametrize(
    ("completions", "expected"),
    [
        ([RIGHT, WRONG, WRONG], True),
        ([RIGHT, RIGHT, RIGHT], False),
        ([WRONG, WRONG, WRONG], False),
        # Ten times 0.1 has a computed deviation near 1e-17; the rewards are equal all the same.
        ([{"reward": 0.1}] * 10, False),
        # Unscored, failed and aborted ones are in no comparison.
        ([RIGHT, {"reward": float("nan")}], False),
        ([RIGHT, WRONG | {"finish_reason": "abort"}], False),
        ([RIGHT, WRONG | {"finish_reason": "error"}], False),
        ([RIGHT, WRONG | {"finish_reason": "length"}], True),
        # Nothing was said: there is no token to train on.
        ([RIGHT | {"length": 0}, WRONG | {"length": 0}], False),
        ([], False),
    ],
)
def test_a_group_teaches_when_scored_completions_differ_and_one_has_tokens(completions, expected):
    assert has_signal(of(*completions), "keep") is expected


def test_masked_truncated_completions_count_in_the_comparison_but_teach_nothing():
    cut = WRONG | {"finish_reason": "length"}
    assert has_signal(of(RIGHT, cut), "mask")
    assert not has_signal(of(RIGHT | {"finish_reason": "length"}, cut), "mask")
    silent = of(RIGHT, cut)
    silent.completions[0].loss_mask = np.zeros_like(silent.completions[0].loss_mask)
    assert not has_signal(silent, "mask")
