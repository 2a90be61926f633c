import math

import numpy as np
import pytest

from m3rl.completion_metrics import (
    completion_metrics,
    eval_metrics,
    generation_metrics,
    reward_metrics,
    staleness_metrics,
)
from tests.m3rl.completions import completion, group, group_of_rewards

NAN = float("nan")


# BR-041
def test_length_statistics_count_tokens_and_not_the_mask():
    whole = completion(4)
    cut = completion(8, finish_reason="length", loss_mask=np.zeros(8, np.bool_))
    got = generation_metrics([whole, cut])
    assert got["gen/response_len_min"] == 4
    assert got["gen/response_len_max"] == 8
    assert got["gen/response_len_mean"] == 6
    assert got["gen/truncated_frac"] == 0.5
    assert got["gen/stop_frac"] == 0.5
    assert got["gen/finished_len_mean"] == 4
    assert got["gen/loss_tokens"] == 4


# BR-041
def test_a_tool_mask_changes_the_loss_tokens_only():
    plain = generation_metrics([completion(4)])
    masked = completion(4, loss_mask=np.array([True, False, False, True]))
    tooled = generation_metrics([masked])
    assert plain.pop("gen/loss_tokens") == 4
    assert tooled.pop("gen/loss_tokens") == 2
    assert plain == tooled


def test_there_is_no_finished_length_when_nothing_finished():
    assert "gen/finished_len_mean" not in generation_metrics(
        [completion(4, finish_reason="length")]
    )


def test_reward_statistics_by_hand():
    groups = [
        group_of_rewards(1.0, 1.0, environment="a"),
        group_of_rewards(0.0, 0.5, environment="a"),
        group_of_rewards(1.0, 0.0, environment="b"),
    ]
    got = reward_metrics(groups)
    assert got["reward/mean"] == pytest.approx(3.5 / 6)
    assert got["reward/std"] == pytest.approx(math.sqrt(3.25 / 6 - (3.5 / 6) ** 2))
    assert (got["reward/min"], got["reward/max"]) == (0.0, 1.0)
    assert got["reward/solved_frac"] == 0.5
    assert got["reward/solve_all_frac"] == pytest.approx(1 / 3)
    assert got["reward/solve_none_frac"] == pytest.approx(1 / 3)
    assert got["reward/mixed_frac"] == pytest.approx(1 / 3)
    assert got["reward/by_env/a/mean"] == 0.625
    assert got["reward/by_env/b/mean"] == 0.5


# BR-079
def test_failed_scores_enter_no_mean_and_have_shares_of_their_own():
    failed = [
        completion(reward=NAN, reward_status=status) for status in ("error", "nonfinite", "timeout")
    ]
    got = reward_metrics([group(*failed, completion(reward=1.0))])
    assert got["reward/mean"] == 1.0
    assert got["reward/verifier_error_frac"] == 0.5
    assert got["reward/verifier_timeout_frac"] == 0.25
    assert got["reward/solve_all_frac"] == 1.0


# BR-079
def test_where_every_score_failed_there_is_no_mean_instead_of_a_zero():
    got = reward_metrics([group(completion(reward=NAN, reward_status="error"))])
    assert got == {"reward/verifier_error_frac": 1.0, "reward/verifier_timeout_frac": 0.0}


def test_parts_of_a_reward_have_means_of_their_own():
    parts = [{"format": 1.0, "answer": 0.5}, {"format": 0.0}]
    got = reward_metrics([group(*[completion(reward_parts=p) for p in parts])])
    assert got["reward/part/format/mean"] == 0.5
    assert got["reward/part/answer/mean"] == 0.5


def test_staleness_is_a_mean_over_tokens():
    fresh = completion(4, version_spans=np.array([[0, 7]]))
    mixed = completion(4, version_spans=np.array([[0, 5], [3, 7]]))
    got = staleness_metrics([fresh, mixed], version=7)
    assert got == {"data/staleness_mean": 6 / 8, "data/staleness_max": 2.0}


def test_repetition_is_more_than_half_of_the_4_grams_again():
    looping = completion(12, completion_ids=np.array([1, 2] * 6, np.int32))
    telling = completion(12)
    assert generation_metrics([looping, telling])["gen/repetition_frac"] == 0.5


def test_thinking_is_counted_up_to_its_end_marker():
    thought = completion(5, completion_ids=np.array([1, 2, 9, 4, 5], np.int32))
    got = generation_metrics([thought, completion(5)], think_end_id=9)
    assert got["gen/thinking_len_mean"] == 1.5


def test_accuracy_is_the_share_of_whole_solutions():
    groups = [group_of_rewards(r) for r in (1.0, 0.8, 1.0, 0.0)]
    got = eval_metrics("held_out", groups)
    assert got["eval/held_out/accuracy"] == 0.5
    assert got["eval/held_out/reward_mean"] == pytest.approx(0.7)
    assert got["eval/held_out/verifier_error_frac"] == 0.0
    assert not any("pass_at" in key for key in got)


def test_pass_at_k_is_the_share_of_prompts_with_any_solution():
    groups = [group_of_rewards(1.0, 0.0), group_of_rewards(0.5, 0.0)]
    got = eval_metrics("x", groups)
    assert got["eval/x/avg_at_2"] == 0.25
    assert got["eval/x/pass_at_2"] == 0.5


def test_a_step_without_completions_has_no_numbers_about_them():
    assert completion_metrics([], version=3) == {}
    assert eval_metrics("x", []) == {}
