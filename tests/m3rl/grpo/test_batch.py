import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m3rl.completion_metrics import completion_metrics
from m3rl.grpo.batch import (
    batch_metrics,
    build_batch,
    pack_rows,
    plan_micro_batches,
    shard_rows,
    sharding_metrics,
    split_minibatches,
)
from m3rl.types import Completion, Group, Prompt


def make_group(ordinal, completions, prompt_ids=(5, 6)):
    prompt_ids = np.asarray(prompt_ids, np.int32)
    group = Group(Prompt(ordinal, prompt_ids, "", "task", {}), [])
    for index, fields in enumerate(completions):
        ids = np.asarray(fields.pop("ids"), np.int32)
        defaults = {
            "prompt_ordinal": ordinal,
            "sample_index": index,
            "group_id": f"g{ordinal}",
            "prompt_ids": prompt_ids,
            "completion_ids": ids,
            "text": "",
            "logprobs": -np.arange(1, len(ids) + 1, dtype=np.float32),
            "loss_mask": np.ones(len(ids), bool),
            "finish_reason": "stop",
            "version_spans": np.array([[0, 0]]),
            "seed": 0,
            "reward_status": "ok",
        }
        group.completions.append(Completion(**(defaults | fields)))
    return group


def build(groups, **options):
    defaults = {
        "temperature": 1.0,
        "advantage": "dr_grpo",
        "skip_zero_variance": True,
        "truncated": "keep",
    }
    return build_batch(groups, **(defaults | options))


# BR-027
def test_masks_and_logprobs_speak_about_the_token_they_stand_at():
    # [5 6 | 7] and [5 6 | 8 9]: nothing crosses from one row into the next.
    group = make_group(0, [{"ids": [7], "reward": 1.0}, {"ids": [8, 9], "reward": 0.0}])
    batch = build([group])
    np.testing.assert_array_equal(batch.ids_BS, [[5, 6, 7, 0], [5, 6, 8, 9]])
    np.testing.assert_array_equal(batch.length_B, [3, 4])
    np.testing.assert_array_equal(batch.loss_mask_BS, [[0, 0, 1, 0], [0, 0, 1, 1]])
    np.testing.assert_array_equal(batch.behaviour_logprobs_BS, [[0, 0, -1, 0], [0, 0, -1, -2]])
    np.testing.assert_array_equal(batch.advantages_B, [0.5, -0.5])
    assert batch.denominator == 3


# BR-039
def test_masks_come_from_lengths_when_pad_is_eos_and_pad_is_sampled():
    # 0 is what rows are padded with; 2 is the end token. Both are sampled here, and trained on.
    group = make_group(
        0, [{"ids": [0, 0, 2], "reward": 1.0}, {"ids": [2, 2, 2, 2, 2], "reward": 0.0}]
    )
    batch = build([group])
    np.testing.assert_array_equal(
        batch.loss_mask_BS, [[0, 0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 1]]
    )
    assert batch.denominator == 8


def test_tokens_the_policy_did_not_sample_are_not_trained_on_and_not_counted():
    mask = np.array([True, False, True])
    group = make_group(
        0,
        [
            {"ids": [7, 8, 9], "reward": 1.0, "loss_mask": mask},
            {"ids": [7], "reward": 0.0},
        ],
    )
    batch = build([group])
    np.testing.assert_array_equal(batch.loss_mask_BS[0], [0, 0, 1, 0, 1])
    np.testing.assert_array_equal(batch.behaviour_logprobs_BS[0], [0, 0, -1, 0, -3])
    assert batch.denominator == 3


# BR-034
def test_rows_are_sorted_by_sample_id_whatever_order_they_arrive_in():
    rng = np.random.default_rng(0)
    for _ in range(20):
        groups = [
            make_group(p, [{"ids": [10 * p + g], "reward": float(g)} for g in range(3)])
            for p in range(3)
        ]
        rng.shuffle(groups)
        for group in groups:
            rng.shuffle(group.completions)
        batch = build(groups)
        assert batch.sample_ids == [(p, g) for p in range(3) for g in range(3)]
        np.testing.assert_array_equal(batch.ids_BS[:, 2], [0, 1, 2, 10, 11, 12, 20, 21, 22])
        np.testing.assert_array_equal(batch.advantages_B, np.float32([-1, 0, 1] * 3))


# BR-033
def test_groups_of_equal_rewards_leave_no_token_in_the_batch():
    flat = make_group(0, [{"ids": [7, 8], "reward": 0.7} for _ in range(4)])
    mixed = make_group(1, [{"ids": [7], "reward": float(i % 2)} for i in range(4)])
    alone = build([flat])
    assert alone.denominator == 0
    assert alone.sample_ids == []
    assert batch_metrics([flat], alone, advantage="grpo")["adv/zero_frac"] == 1.0
    both = build([flat, mixed])
    assert {s[0] for s in both.sample_ids} == {1}
    assert both.denominator == 4
    assert batch_metrics([flat, mixed], both, advantage="grpo")["adv/zero_frac"] == 0.5


def test_groups_of_equal_rewards_stay_when_asked_for_with_advantage_zero():
    flat = make_group(0, [{"ids": [7, 8], "reward": 0.7} for _ in range(4)])
    batch = build([flat], skip_zero_variance=False, advantage="grpo")
    assert batch.denominator == 8
    np.testing.assert_array_equal(batch.advantages_B, np.zeros(4, np.float32))


# BR-017, BR-079
def test_unscored_and_aborted_completions_are_in_no_baseline_and_are_counted():
    group = make_group(
        0,
        [
            {"ids": [7], "reward": 1.0},
            {"ids": [7], "reward": 0.0},
            {"ids": [7], "reward": float("nan"), "reward_status": "timeout"},
            {"ids": [7], "reward": 100.0, "finish_reason": "abort"},
        ],
    )
    batch = build([group])
    assert batch.sample_ids == [(0, 0), (0, 1)]
    np.testing.assert_array_equal(batch.advantages_B, [0.5, -0.5])
    assert batch_metrics([group], batch, advantage="grpo")["data/unscored_completions"] == 2


def test_a_group_with_one_survivor_is_dropped_and_counted():
    group = make_group(0, [{"ids": [7], "reward": 1.0}, {"ids": [7], "reward": float("nan")}])
    batch = build([group], skip_zero_variance=False)
    assert batch.sample_ids == []
    assert batch_metrics([group], batch, advantage="grpo")["data/dropped_groups"] == 1


# BR-041
@pytest.mark.parametrize("with_tool_mask", [False, True])
def test_length_statistics_do_not_read_the_masked_copy(with_tool_mask):
    # 4 tokens ended by stop, 8 cut by length and masked out of the loss.
    cut_mask = np.ones(8, bool)
    cut_mask[2:4] = not with_tool_mask
    group = make_group(
        0,
        [
            {"ids": [7] * 4, "reward": 1.0},
            {"ids": [7] * 8, "reward": 0.0, "finish_reason": "length", "loss_mask": cut_mask},
        ],
    )
    batch = build([group], truncated="mask")
    metrics = completion_metrics([group], version=0)
    metrics |= batch_metrics([group], batch, advantage="grpo")
    assert metrics["gen/response_len_min"] == 4
    assert metrics["gen/response_len_max"] == 8
    assert metrics["gen/response_len_mean"] == 6
    assert metrics["gen/truncated_frac"] == 0.5
    assert metrics["gen/finished_len_mean"] == 4
    assert metrics["data/loss_tokens"] == 4
    # The cut completion still counts in its group's baseline.
    np.testing.assert_array_equal(batch.advantages_B, [0.5])


def test_routing_follows_its_sample():
    routing = np.full((3, 1, 2), 3, np.uint8)
    group = make_group(
        0, [{"ids": [7, 8], "reward": 1.0}, {"ids": [7, 8], "reward": 0.0, "routing": routing}]
    )
    batch = build([group])
    assert batch.routing is not None
    assert batch.routing[0] is None
    assert batch.routing[1] is routing


# BR-034
def test_completions_of_another_prompt_are_refused():
    group = make_group(0, [{"ids": [7], "reward": 1.0}, {"ids": [8], "reward": 0.0}])
    group.completions[1].prompt_ordinal = 3
    with pytest.raises(ValueError, match="by prompt_ordinal, not by position"):
        build([group])
    group.completions[1].prompt_ordinal = 0
    group.completions[1].prompt_ids = np.array([5, 7], np.int32)
    with pytest.raises(ValueError, match=r"sample \(0, 1\) was generated from"):
        build([group])


# BR-027
def test_a_shifted_logprob_array_is_refused():
    group = make_group(0, [{"ids": [7, 8], "reward": 1.0}, {"ids": [8], "reward": 0.0}])
    group.completions[0].logprobs = group.completions[0].logprobs[1:]
    with pytest.raises(ValueError, match="must be equally many"):
        build([group])


def test_a_sample_that_comes_twice_is_refused():
    group = make_group(0, [{"ids": [7], "reward": 1.0}, {"ids": [8], "reward": 0.0}])
    group.completions[1].sample_index = 0
    with pytest.raises(ValueError, match="occurs twice"):
        build([group])


def test_greedy_completions_cannot_be_trained_on():
    with pytest.raises(ValueError, match=r"rollout\.temperature above 0"):
        build([], temperature=0.0)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), max_size=40),
    num_ranks=st.integers(1, 5),
    max_tokens=st.integers(50, 120),
    num_updates=st.integers(1, 4),
)
def test_every_row_is_trained_on_exactly_once_in_equally_many_micro_batches(
    lengths, num_ranks, max_tokens, num_updates
):
    length_B = np.asarray(lengths, np.int64)
    seen = []
    for rows in split_minibatches(len(lengths), num_updates):
        plan = plan_micro_batches(rows, length_B, num_ranks, max_tokens)
        assert len(plan) == num_ranks
        assert len({len(packed) for packed in plan}) == 1
        tokens = [int(sum(length_B[micro].sum() for micro in packed)) for packed in plan]
        assert max(tokens) - min(tokens) <= length_B[rows].max()
        for packed in plan:
            full = [int(length_B[micro].sum()) for micro in packed]
            assert max(full) <= max_tokens
            assert full == sorted(full, reverse=True)
            # First fit leaves at most one micro-batch half empty.
            assert sum(0 < n <= max_tokens // 2 for n in full) <= 1
            seen += np.concatenate(packed).tolist()
    assert sorted(seen) == list(range(len(lengths)))


def test_rows_go_into_the_first_micro_batch_with_room_longest_first():
    length_B = np.array([3, 6, 5, 2, 4, 1])
    packed = pack_rows(np.arange(6), length_B, 10)
    # 6 | 5; 4 fits the first, 3 the second; 2 the second; 1 makes a third.
    assert [p.tolist() for p in packed] == [[1, 4], [0, 2, 3], [5]]


def test_a_row_longer_than_a_micro_batch_says_what_to_raise():
    with pytest.raises(ValueError, match=r"row 1 has 11 tokens .*raise it to 11"):
        pack_rows(np.arange(3), np.array([4, 11, 2]), 10)


def test_a_rank_without_rows_has_empty_micro_batches_that_count_as_padding():
    length_B = np.array([7, 6, 5])
    plan = plan_micro_batches(np.arange(3), length_B, 2, 8)
    assert [[p.tolist() for p in packed] for packed in plan] == [[[0], []], [[1], [2]]]
    metrics = sharding_metrics([np.arange(3)], length_B, 2, 8)
    assert metrics["perf/padding_frac"] == pytest.approx(1 / 19)
    assert metrics["perf/seqlen_imbalance"] == pytest.approx(11 / 9)
    # Rounds of 7 | 6 and 0 | 5: 7 + 5 tokens of time on two ranks, 18 of them worked.
    assert metrics["perf/rank_wait_frac"] == pytest.approx(1 - 18 / 24)
    alone = sharding_metrics([np.arange(2), np.arange(2, 3)], length_B, 1, 8)
    assert alone["perf/rank_wait_frac"] == 0
    assert sharding_metrics([], length_B, 2, 8) == {}


def test_padding_of_a_long_tailed_distribution_of_lengths_is_next_to_nothing():
    rng = np.random.default_rng(0)
    length_B = np.minimum(rng.lognormal(7.5, 1.0, 512).astype(int) + 64, 16384)
    for num_ranks in (1, 8):
        metrics = sharding_metrics([np.arange(512)], length_B, num_ranks, 16384)
        assert metrics["perf/padding_frac"] < 1e-4
        assert metrics["perf/seqlen_imbalance"] < 1.01
        # The ranks wait for one another in every micro-batch but do so in vain in the last alone.
        assert metrics["perf/rank_wait_frac"] <= 0.03


# BR-036
def test_rewards_stay_with_their_sample_through_sharding_and_packing():
    lengths = [9, 1, 5, 3]
    group = make_group(0, [{"ids": [7] * n, "reward": float(n)} for n in lengths])
    batch = build([group])
    centred = np.float32(lengths) - np.mean(lengths)
    for max_tokens in (11, 16, 1000):
        for shard in shard_rows(np.arange(4), batch.length_B, 2):
            for micro in pack_rows(shard, batch.length_B, max_tokens):
                np.testing.assert_array_equal(batch.length_B[micro] - 2, np.take(lengths, micro))
                np.testing.assert_array_equal(batch.advantages_B[micro], centred[micro])
