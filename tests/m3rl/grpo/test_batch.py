import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m3rl.completion_metrics import completion_metrics
from m3rl.grpo.batch import (
    batch_metrics,
    build_batch,
    micro_batches,
    shard_rows,
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
    max_tokens=st.integers(1, 120),
    num_updates=st.integers(1, 4),
)
def test_every_row_is_trained_on_exactly_once(lengths, num_ranks, max_tokens, num_updates):
    length_B = np.asarray(lengths, np.int64)
    seen = []
    for rows in split_minibatches(len(lengths), num_updates):
        shards = shard_rows(rows, length_B, num_ranks)
        tokens = [int(length_B[shard].sum()) for shard in shards]
        assert max(tokens) - min(tokens) <= length_B[rows].max()
        for shard in shards:
            for micro in micro_batches(shard, length_B, max_tokens):
                assert len(micro) == 1 or len(micro) * length_B[micro].max() <= max_tokens
                seen += micro.tolist()
    assert sorted(seen) == list(range(len(lengths)))


# BR-036
def test_rewards_stay_with_their_sample_through_sharding_and_packing():
    lengths = [9, 1, 5, 3]
    group = make_group(0, [{"ids": [7] * n, "reward": float(n)} for n in lengths])
    batch = build([group])
    centred = np.float32(lengths) - np.mean(lengths)
    for max_tokens in (1, 8, 1000):
        for shard in shard_rows(np.arange(4), batch.length_B, 2):
            for micro in micro_batches(shard, batch.length_B, max_tokens):
                np.testing.assert_array_equal(batch.length_B[micro] - 2, np.take(lengths, micro))
                np.testing.assert_array_equal(batch.advantages_B[micro], centred[micro])
