import numpy as np
import pytest
import torch

from m3rl.grpo.replay import ChoiceStats, recorded_blocks, recorded_experts

CPU = torch.device("cpu")
EXPERTS = {"num_layers": 2, "topk": 2, "num_experts": 4, "device": CPU}
BLOCKS = {"num_layers": 1, "num_heads": 2, "topk_blocks": 2, "block_size": 2, "device": CPU}


def stats_of(num_layers, num_experts):
    return ChoiceStats.zeros(num_layers, num_experts, CPU)


def metrics(stats, experts=True, blocks=True):
    return stats.metrics(replays_experts=experts, replays_blocks=blocks)


def test_records_stand_at_their_tokens_and_own_choices_fill_the_rest():
    record = np.array([[[3, 2], [1, 3]], [[2, 0], [3, 1]]], np.uint8)  # a row of 3 tokens
    laid_out = recorded_experts([None, record], [4, 3], **EXPERTS)
    assert laid_out.is_recorded_T.tolist() == [False] * 4 + [True, True, False]
    own_TA = torch.tensor([[0, 1]] * 7, dtype=torch.int32)
    assert laid_out.instead_of(0, own_TA).tolist() == [[0, 1]] * 4 + [[3, 2], [2, 0], [0, 1]]
    assert laid_out.instead_of(1, own_TA).tolist() == [[0, 1]] * 4 + [[1, 3], [3, 1], [0, 1]]


def test_a_record_of_another_length_or_model_is_refused():
    with pytest.raises(ValueError, match=r"row 0 has shape \(3, 2, 2\).*needs \(2, 2, 2\)"):
        recorded_experts([np.zeros((3, 2, 2), np.uint8)], [3], **EXPERTS)
    with pytest.raises(ValueError, match="names expert 4 of 4"):
        recorded_experts([np.full((2, 2, 2), 4, np.uint8)], [3], **EXPERTS)


def blocks_of(*tokens):
    """[tokens, 1 layer, 2 heads, 2] with the same blocks for both heads."""
    return np.array([[[blocks, blocks]] for blocks in tokens], np.int32)


def test_blocks_stand_at_their_tokens_and_own_choices_fill_the_rest():
    record = blocks_of([0, -1], [0, -1], [0, 1])  # a row of 4 tokens
    laid_out = recorded_blocks([record, None], [4, 1], **BLOCKS)
    assert laid_out.is_recorded_T.tolist() == [True, True, True, False, False]
    own_TKB = torch.tensor([[[1, -1]] * 2] * 5, dtype=torch.int32)
    used_TKB = laid_out.instead_of(0, own_TKB)
    assert used_TKB[:, 1].tolist() == [[0, -1], [0, -1], [0, 1], [1, -1], [1, -1]]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (blocks_of([0, -1], [0, 1], [0, 1]), r"gives token 1 the blocks .*it sees 0\.\.0"),
        (blocks_of([0, -1], [0, -1], [-1, -1]), r"gives token 2 the blocks .*it sees 0\.\.1"),
        (blocks_of([0, -1]), r"row 0 has shape \(1, 1, 2, 2\).*needs \(3, 1, 2, 2\)"),
    ],
)
def test_blocks_of_another_row_are_refused(record, message):
    with pytest.raises(ValueError, match=message):
        recorded_blocks([record], [4], **BLOCKS)


def test_load_and_agreement_by_hand():
    record = np.array([[[0, 1]], [[2, 3]]], np.uint8)
    laid_out = recorded_experts([record], [3], **EXPERTS | {"num_layers": 1})
    stats = stats_of(1, 4)
    own = torch.tensor([[1, 0], [2, 1], [0, 1]])
    stats.add_experts(0, own, own, laid_out)
    # Experts 0..3 got 2, 3, 1, 0 tokens. Order within a token does not matter: 2 of 2, then 1 of 2.
    found = metrics(stats)
    assert found["m3/expert_load_max_vio"] == pytest.approx(1.0)
    assert found["m3/expert_load_cv"] == pytest.approx(np.std([2, 3, 1, 0]) / 1.5)
    assert found["m3/dead_expert_frac"] == 0.25
    assert found["m3/router_agreement"] == 0.75
    assert found["m3/router_replay_coverage"] == pytest.approx(4 / 6)
    assert metrics(stats, experts=False)["m3/router_replay_coverage"] == 0.0
    assert metrics(stats_of(1, 4)) == {}
    assert "m3/block_agreement" not in found


def test_agreement_of_blocks_by_hand():
    laid_out = recorded_blocks([blocks_of([0, -1], [0, -1], [0, 1])], [4], **BLOCKS)
    own = torch.tensor([[0, -1], [0, -1], [1, -1], [0, 1]])[:, None].expand(-1, 2, -1)
    stats = stats_of(0, 4)
    stats.add_blocks(0, own, laid_out)
    # Of 1 + 1 + 2 recorded blocks a head the own choice has 1 + 1 + 1; it made 5 with the last.
    assert metrics(stats) == {"m3/block_agreement": 6 / 8, "m3/block_replay_coverage": 8 / 10}
    assert metrics(stats, blocks=False)["m3/block_replay_coverage"] == 0.0
