import numpy as np
import pytest
import torch

from m3rl.grpo.replay import RoutingStats, recorded_routing

MODEL = {"num_layers": 2, "topk": 2, "num_experts": 4}


def test_records_stand_at_their_tokens_and_the_rest_holds_valid_distinct_experts():
    record = np.array([[[3, 2], [1, 3]], [[2, 0], [3, 1]]], np.uint8)  # a row of 3 tokens
    laid_out = recorded_routing([None, record], np.array([4, 3]), 4, **MODEL)
    assert laid_out.is_recorded_T.tolist() == [False] * 4 + [True, True, False, False]
    assert laid_out.ids_LTA[0, 4:6].tolist() == [[3, 2], [2, 0]]
    assert laid_out.ids_LTA[1, 4:6].tolist() == [[1, 3], [3, 1]]
    assert laid_out.ids_LTA[:, [0, 1, 2, 3, 6, 7]].unique(dim=1).tolist() == [[[0, 1]], [[0, 1]]]


def test_a_record_of_another_length_or_model_is_refused():
    with pytest.raises(ValueError, match=r"row 0 has shape \(3, 2, 2\).*needs \(2, 2, 2\)"):
        recorded_routing([np.zeros((3, 2, 2), np.uint8)], np.array([3]), 3, **MODEL)
    with pytest.raises(ValueError, match="names expert 4 of 4"):
        recorded_routing([np.full((2, 2, 2), 4, np.uint8)], np.array([3]), 3, **MODEL)


def test_load_and_agreement_by_hand():
    record = np.array([[[0, 1]], [[2, 3]]], np.uint8)
    laid_out = recorded_routing([record], np.array([3]), 4, num_layers=1, topk=2, num_experts=4)
    stats = RoutingStats.zeros(1, 4)
    own = torch.tensor([[1, 0], [2, 1], [0, 1], [3, 3]])  # the last token is padding
    stats.add(
        0,
        own_ids_TA=own,
        used_ids_TA=own,
        is_real_T=torch.tensor([True, True, True, False]),
        record=laid_out,
    )
    # Experts 0..3 got 2, 3, 1, 0 tokens. Order within a token does not matter: 2 of 2, then 1 of 2.
    metrics = stats.metrics(is_replayed=True)
    assert metrics["m3/expert_load_max_vio"] == pytest.approx(1.0)
    assert metrics["m3/expert_load_cv"] == pytest.approx(np.std([2, 3, 1, 0]) / 1.5)
    assert metrics["m3/dead_expert_frac"] == 0.25
    assert metrics["m3/router_agreement"] == 0.75
    assert metrics["m3/router_replay_coverage"] == pytest.approx(4 / 6)
    assert stats.metrics(is_replayed=False)["m3/router_replay_coverage"] == 0.0
    assert "m3/router_agreement" not in RoutingStats.zeros(1, 4).metrics(is_replayed=True)
