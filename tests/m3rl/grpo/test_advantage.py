import math

import numpy as np
import pytest

from m3rl.grpo.advantage import ADVANTAGE_KINDS, group_advantages


def test_one_right_of_four_gives_minus_one_three_times_and_three_over_root_three():
    result = group_advantages([0, 0, 0, 1], ["a"] * 4, kind="grpo", eps=0.0)
    np.testing.assert_allclose(result.values_B, np.array([-1, -1, -1, 3]) / np.sqrt(3), rtol=1e-6)


def test_std_is_the_population_std():
    # Rewards 1 and 3: population std 1, sample std sqrt(2).
    result = group_advantages([1, 3], ["a", "a"], kind="grpo", eps=0.0)
    np.testing.assert_array_equal(result.values_B, np.float32([-1, 1]))


def test_dr_grpo_only_centres_and_rloo_leaves_the_sample_out():
    rewards = [0.0, 0.0, 0.0, 1.0]
    centred = group_advantages(rewards, [7] * 4, kind="dr_grpo").values_B
    np.testing.assert_array_equal(centred, np.float32([-0.25, -0.25, -0.25, 0.75]))
    rloo = group_advantages(rewards, [7] * 4, kind="rloo").values_B
    by_hand = [r - np.mean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]
    np.testing.assert_allclose(rloo, by_hand, rtol=1e-6)


# BR-033
@pytest.mark.parametrize("kind", ADVANTAGE_KINDS)
@pytest.mark.parametrize("reward", [0.7, 0.1, 1e9])
def test_equal_rewards_give_exact_zeros_and_are_flagged(kind, reward):
    result = group_advantages([reward] * 10, ["g"] * 10, kind=kind)
    np.testing.assert_array_equal(result.values_B, np.zeros(10, np.float32))
    assert result.is_zero_variance_B.all()
    assert result.num_zero_variance_groups == 1


# BR-033
def test_the_zero_variance_flag_belongs_to_a_group_not_to_the_batch():
    groups = ["mixed"] * 4 + ["flat"] * 4
    result = group_advantages([0, 1, 0, 1, 0.7, 0.7, 0.7, 0.7], groups, kind="grpo")
    assert result.num_groups == 2
    assert result.num_zero_variance_groups == 1
    np.testing.assert_array_equal(result.is_zero_variance_B, [False] * 4 + [True] * 4)
    np.testing.assert_allclose(result.values_B[:4], [-1, 1, -1, 1], rtol=1e-5)


# BR-034
def test_arrival_order_does_not_change_the_advantage_of_a_sample():
    samples = {("P", 0): 1.0, ("P", 1): 0.0, ("Q", 0): 1.0, ("Q", 1): 1.0}
    expected = {("P", 0): 0.5, ("P", 1): -0.5, ("Q", 0): 0.0, ("Q", 1): 0.0}
    rng = np.random.default_rng(0)
    for _ in range(20):
        order = list(samples)
        rng.shuffle(order)
        result = group_advantages(
            [samples[s] for s in order], [s[0] for s in order], kind="dr_grpo"
        )
        assert dict(zip(order, result.values_B.tolist(), strict=True)) == expected


def test_arrival_order_does_not_change_a_single_bit():
    rng = np.random.default_rng(1)
    rewards = rng.normal(size=9)
    straight = group_advantages(rewards, [0] * 9, kind="grpo").values_B
    for _ in range(10):
        order = rng.permutation(9)
        shuffled = group_advantages(rewards[order], [0] * 9, kind="grpo").values_B
        np.testing.assert_array_equal(shuffled, straight[order])


def test_a_group_of_one_has_nothing_to_compare_with_and_gets_zero():
    for kind in ("grpo", "dr_grpo", "rloo"):
        result = group_advantages([5.0], ["alone"], kind=kind)
        assert result.values_B.tolist() == [0.0]
        assert result.is_zero_variance_B.tolist() == [True]


def test_an_unscored_sample_is_refused_by_name():
    with pytest.raises(ValueError, match=r"sample 1 in group 'b' is nan"):
        group_advantages([1.0, float("nan")], ["a", "b"], kind="grpo")


def test_an_unknown_kind_names_the_known_ones():
    with pytest.raises(ValueError, match="use one of"):
        group_advantages([1.0], ["a"], kind="gae")  # type: ignore[arg-type]


def test_batch_std_divides_centred_rewards_by_their_deviation_over_the_batch():
    # Centred: -1, 1 and -3, 3; mean square (1 + 1 + 9 + 9) / 4 = 5.
    result = group_advantages([0, 2, 10, 16], ["a", "a", "b", "b"], kind="batch_std", eps=0.0)
    np.testing.assert_allclose(result.values_B, np.array([-1, 1, -3, 3]) / np.sqrt(5), rtol=1e-6)


# BR-033
def test_batch_std_keeps_exact_zeros_for_a_flat_group_which_still_counts_in_the_batch():
    rewards, groups = [0, 1, 0.7, 0.7], ["a", "a", "b", "b"]
    result = group_advantages(rewards, groups, kind="batch_std", eps=0.0)
    # Mean square (1/4 + 1/4 + 0 + 0) / 4 = 1/8.
    np.testing.assert_allclose(result.values_B, np.array([-1, 1, 0, 0]) / 2 * np.sqrt(8), rtol=1e-6)
    assert result.is_zero_variance_B.tolist() == [False, False, True, True]


def test_maxrl_divides_by_the_mean_reward_so_that_rare_successes_count_most():
    rare = group_advantages([0, 0, 0, 1], [0] * 4, kind="maxrl").values_B
    np.testing.assert_allclose(rare, [-1, -1, -1, 3])
    common = group_advantages([0, 1, 1, 1], [0] * 4, kind="maxrl").values_B
    np.testing.assert_allclose(common, [-1, 1 / 3, 1 / 3, 1 / 3], rtol=1e-6)


def test_maxrl_without_any_success_gives_zeros_and_refuses_negative_rewards():
    nothing = group_advantages([0.0] * 4, [0] * 4, kind="maxrl")
    np.testing.assert_array_equal(nothing.values_B, np.zeros(4, np.float32))
    with pytest.raises(ValueError, match=r"sample 1 in group 'g' is -0\.5; grpo\.advantage: maxrl"):
        group_advantages([1.0, -0.5], ["g", "g"], kind="maxrl")


@pytest.mark.parametrize("kind", ADVANTAGE_KINDS)
def test_all_kinds_against_plain_loops_whatever_the_order(kind):
    rng = np.random.default_rng(1)
    rewards = rng.integers(0, 5, 24) / 4
    groups = np.repeat(np.arange(4), 6)
    order = rng.permutation(24)
    actual = group_advantages(rewards[order], groups[order].tolist(), kind=kind, eps=1e-4).values_B
    members = {
        g: [float(r) for r, h in zip(rewards, groups, strict=True) if h == g] for g in groups
    }
    centred = [r - sum(m) / len(m) for m in members.values() for r in m]
    batch_std = math.sqrt(sum(c * c for c in centred) / len(centred))
    expected = []
    for i in order:
        m, r = members[groups[i]], float(rewards[i])
        mean = sum(m) / len(m)
        std = math.sqrt(sum((x - mean) ** 2 for x in m) / len(m))
        expected.append(
            {
                "grpo": (r - mean) / (std + 1e-4),
                "dr_grpo": r - mean,
                "rloo": r - (sum(m) - r) / (len(m) - 1),
                "batch_std": (r - mean) / (batch_std + 1e-4),
                "maxrl": (r - mean) / mean,
            }[kind]
        )
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ADVANTAGE_KINDS)
def test_no_reward_gives_no_advantage(kind):
    assert len(group_advantages([], [], kind=kind).values_B) == 0
