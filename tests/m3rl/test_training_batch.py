"""From groups to a batch, as the configuration says."""

import numpy as np
import pytest

from m3rl.config import Config
from m3rl.training_batch import BatchMaker
from m3rl.types import Group, Prompt
from tests.m3rl.completions import completion


class FakeRanks:
    """A reference policy that gives every trained token half the probability μ gave it."""

    def __init__(self):
        self.batches = []

    def reference_logprobs(self, batch):
        self.batches.append(batch)
        return np.where(batch.loss_mask_BS, batch.behaviour_logprobs_BS - np.log(2), 0.0)


def group(ordinal, *completions):
    made = [
        completion(
            prompt_ordinal=ordinal,
            sample_index=i,
            logprobs=np.full(fields.get("length", 3), -1.0, np.float32),
            **fields,
        )
        for i, fields in enumerate(completions)
    ]
    return Group(Prompt(ordinal, np.zeros(2, np.int32), "", "env", {}), made)


def maker(*words, ranks=None):
    config = Config.load("configs/tiny_cpu.yaml", ["grpo.advantage=dr_grpo", *words])
    ranks = FakeRanks() if ranks is None else ranks
    return BatchMaker(config, ranks.reference_logprobs)


RIGHT, WRONG = {"reward": 1.0}, {"reward": 0.0}


def test_by_default_rewards_stay_what_they_are_and_the_reference_is_not_asked():
    ranks = FakeRanks()
    batch, metrics = maker(ranks=ranks).make([group(0, RIGHT, WRONG)])
    np.testing.assert_array_equal(batch.advantages_B, np.float32([0.5, -0.5]))
    assert batch.kl_coef is None
    assert ranks.batches == []
    assert not [name for name in metrics if "penalty" in name or name.startswith("policy/")]


def test_long_completions_lose_reward_before_they_are_compared_and_keep_it_in_the_record():
    # max_tokens 8, buffer 4: 6 tokens lose half of 0.4, 8 tokens all of it.
    given = group(0, RIGHT, RIGHT | {"length": 6}, WRONG | {"length": 8, "finish_reason": "length"})
    made = maker("grpo.overlong.buffer=4", "grpo.overlong.penalty=0.4")
    batch, metrics = made.make([given])
    shaped = np.array([1.0, 0.8, -0.4])
    np.testing.assert_allclose(batch.advantages_B, shaped - shaped.mean(), atol=1e-7)
    assert metrics["reward/overlong_penalty"] == pytest.approx(-0.6 / 3)
    assert [c.reward for c in given.completions] == [1.0, 1.0, 0.0]


# BR-033
def test_lengths_alone_make_no_signal_of_a_group_that_is_right_throughout():
    solved = group(0, RIGHT, RIGHT | {"length": 8})
    batch, metrics = maker("grpo.overlong.buffer=4").make([solved, group(1, RIGHT, WRONG)])
    assert {sample[0] for sample in batch.sample_ids} == {1}
    assert metrics["adv/zero_frac"] == 0.5
    kept, _ = maker("grpo.overlong.buffer=4", "grpo.skip_zero_variance=false").make([solved])
    np.testing.assert_allclose(kept.advantages_B, [0.5, -0.5])


IN_REWARD = ["grpo.kl.coef=0.1", "grpo.kl.place=reward", "grpo.kl.estimator=k1"]


def test_the_kl_is_taken_off_rewards_summed_over_the_tokens_of_each_completion():
    given = group(0, RIGHT, WRONG | {"length": 5}, WRONG | {"length": 0})
    made = maker(*IN_REWARD)
    batch, metrics = made.make([given])
    shaped = np.array([1.0, 0.0, 0.0]) - 0.1 * np.log(2) * np.array([3, 5, 0])
    np.testing.assert_allclose(batch.advantages_B, (shaped - shaped.mean())[:2], atol=1e-6)
    assert metrics["policy/kl_ref_k1"] == pytest.approx(np.log(2))
    assert metrics["policy/kl_ref_k3"] == pytest.approx(0.5 - 1 + np.log(2))
    assert metrics["reward/kl_penalty"] == pytest.approx(-0.1 * np.log(2) * 8 / 2)
    assert metrics["policy/kl_coef"] == 0.1
    # It acts through the reward alone.
    assert batch.kl_coef is None
    assert made.reference_s > 0


def test_masked_completions_have_their_kl_too_since_they_are_in_the_baseline():
    cut = WRONG | {"finish_reason": "length", "length": 8}
    ranks = FakeRanks()
    batch, _ = maker(*IN_REWARD, "grpo.truncated=mask", ranks=ranks).make([group(0, RIGHT, cut)])
    assert batch.sample_ids == [(0, 0)]
    assert ranks.batches[0].sample_ids == [(0, 0), (0, 1)]
    shaped = np.array([1.0, 0.0]) - 0.1 * np.log(2) * np.array([3, 8])
    np.testing.assert_allclose(batch.advantages_B, [shaped[0] - shaped.mean()], atol=1e-6)


def test_the_reference_is_not_asked_about_groups_that_teach_nothing():
    ranks = FakeRanks()
    batch, metrics = maker(*IN_REWARD, ranks=ranks).make([group(0, RIGHT, RIGHT)])
    assert batch.sample_ids == ranks.batches == []
    assert metrics["data/train_rows"] == 0
    assert "policy/kl_ref_k3" not in metrics


def test_an_adaptive_coefficient_travels_with_the_batch_and_moves_with_the_measure():
    made = maker("grpo.kl={coef: 0.1, target: 0.05, gain: 0.5}")
    batch, _ = made.make([group(0, RIGHT, WRONG)])
    assert batch.kl_coef == 0.1
    made.kl.update(1.0)
    batch, metrics = made.make([group(1, RIGHT, WRONG)])
    assert batch.kl_coef == metrics["policy/kl_coef"] == pytest.approx(0.11)


def test_what_teaches_something_follows_the_rule_for_truncated_ones():
    cut = group(0, RIGHT | {"finish_reason": "length"}, WRONG | {"finish_reason": "length"})
    assert maker().has_signal(cut)
    assert not maker("grpo.truncated=mask").has_signal(cut)
