import math
from dataclasses import replace

import numpy as np
import pytest

from m3rl.grpo.shaping import overlong_penalty, reward_kl
from m3rl.types import TrainBatch


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    # DAPO's own numbers: at most 20,480 tokens, the last 4,096 of them punished.
    [
        (0, 0.0),
        (16384, 0.0),
        (16385, -1 / 4096),
        (18432, -0.5),
        (20479, -4095 / 4096),
        (20480, -1.0),
        (30000, -1.0),
    ],
)
def test_the_soft_punishment_falls_evenly_over_the_buffer(num_tokens, expected):
    actual = overlong_penalty(num_tokens, max_tokens=20480, buffer=4096, penalty=1.0)
    assert actual == pytest.approx(expected, abs=0)
    scaled = overlong_penalty(num_tokens, max_tokens=20480, buffer=4096, penalty=0.3)
    assert scaled == pytest.approx(0.3 * expected)


def test_without_a_buffer_only_what_is_beyond_the_limit_is_punished():
    assert overlong_penalty(8, max_tokens=8, buffer=0, penalty=1.0) == 0.0
    assert overlong_penalty(9, max_tokens=8, buffer=0, penalty=1.0) == -1.0


def batch():
    # [p | a b] and [p | a tool]; the tool's token is no choice of the policy.
    return TrainBatch(
        sample_ids=[(3, 0), (3, 1)],
        ids_BS=np.zeros((2, 3), np.int64),
        length_B=np.array([3, 3]),
        loss_mask_BS=np.array([[False, True, True], [False, True, False]]),
        behaviour_logprobs_BS=np.float32([[0, -1.0, -2.0], [0, -0.5, 0.0]]),
        advantages_B=np.zeros(2, np.float32),
        temperature=1.0,
        denominator=3.0,
    )


REFERENCE = np.float32([[7, -1.5, -1.75], [7, -1.0, 7]])


def test_the_kl_of_a_reward_sums_over_the_trained_tokens_of_each_row():
    k1 = reward_kl(batch(), REFERENCE, "k1")
    assert k1.by_sample == pytest.approx({(3, 0): 0.5 - 0.25, (3, 1): 0.5})
    k3 = reward_kl(batch(), REFERENCE, "k3")
    terms = [math.exp(d) - 1 - d for d in (-0.5, 0.25, -0.5)]
    assert k3.by_sample == pytest.approx({(3, 0): terms[0] + terms[1], (3, 1): terms[2]})
    assert k1.mean_k1 == k3.mean_k1 == pytest.approx(0.75 / 3)
    assert k1.mean_k3 == k3.mean_k3 == pytest.approx(sum(terms) / 3)


def test_a_kl_that_is_not_finite_names_its_sample():
    broken = replace(batch(), behaviour_logprobs_BS=np.float32([[0, -1, -2], [0, np.nan, 0]]))
    with pytest.raises(ValueError, match=r"sample \(3, 1\) .* is not finite"):
        reward_kl(broken, REFERENCE, "k1")
