"""Parts of a layer on numbers worked out by hand."""

import math

import pytest
import torch

from inference.layers.linear import MLP
from inference.layers.moe import MoE
from inference.layers.rope import rope_table
from tests.tiny_models import model_config, tiny_config

FP32_CPU = {"dtype": torch.float32, "device": torch.device("cpu")}
# g · sigmoid(1.702 g) · (u + 1) with g at most 7 and u within ±7
ACTIVATION = [((1.0, 0.5), 1.26869), ((10.0, -10.0), -41.99972), ((-3.0, 2.0), -0.05421)]


# BR-065
def test_the_mlp_computes_the_clamped_swiglu():
    mlp = MLP(2, 1, alpha=1.702, limit=7.0, beta=1.0, **FP32_CPU)
    mlp.gate_up_proj.weight.copy_(torch.eye(2))
    mlp.down_proj.weight.copy_(torch.tensor([[1.0], [0.5]]))
    for inputs, expected in ACTIVATION:
        out = mlp(torch.tensor([inputs]))[0].tolist()
        assert out == pytest.approx([expected, 0.5 * expected], abs=1e-5)


def moe_of_two():
    """Hidden size 2; expert 0 returns the activation in dim 0, expert 1 ten times it in dim 1."""
    config = model_config(
        tiny_config(
            hidden_size=2,
            intermediate_size=1,
            shared_intermediate_size=1,
            num_local_experts=2,
            num_experts_per_tok=2,
            routed_scaling_factor=2.0,
        )
    )
    moe = MoE(config, **FP32_CPU)
    moe.gate.weight.zero_()
    moe.e_score_correction_bias.zero_()
    moe.experts.w13.copy_(torch.eye(2).expand(2, 2, 2))
    moe.experts.w2.copy_(torch.tensor([[[1.0], [0.0]], [[0.0], [10.0]]]))
    moe.shared_experts.gate_up_proj.weight.copy_(torch.eye(2))
    moe.shared_experts.down_proj.weight.zero_()
    return moe


# BR-065
def test_routed_experts_compute_the_clamped_swiglu():
    moe = moe_of_two()  # equal scores: both experts weigh 2.0 / 2
    for inputs, expected in ACTIVATION:
        out, ids = moe(torch.tensor([inputs]))
        assert out[0].tolist() == pytest.approx([expected, 10 * expected], abs=1e-4)
        assert sorted(ids[0].tolist()) == [0, 1]


# BR-065
def test_the_shared_expert_is_added_once_and_unscaled():
    moe = moe_of_two()
    moe.experts.w2.zero_()
    moe.shared_experts.down_proj.weight.copy_(torch.tensor([[1.0], [3.0]]))
    out, _ = moe(torch.tensor([[1.0, 0.5]]))
    assert out[0].tolist() == pytest.approx([1.26869, 3 * 1.26869], abs=1e-4)


# BR-068
def test_the_bias_moves_the_choice_but_not_the_weights():
    moe = moe_of_two()
    moe.topk = 1
    moe.gate.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    inputs = torch.tensor([[1.0, 0.5]])
    out, ids = moe(inputs)
    assert ids.tolist() == [[0]]
    moe.e_score_correction_bias.copy_(torch.tensor([0.0, 0.5]))
    out, ids = moe(inputs)
    assert ids.tolist() == [[1]]
    assert out[0].tolist() == pytest.approx([0.0, 2.0 * 10 * 1.26869], abs=1e-4)


def test_the_rotary_exponent_counts_the_rotated_dims():
    table = rope_table(rotary_dim=4, theta=10000.0, num_positions=6, device="cpu")
    for position in range(6):
        angles = [position * 1.0, position * 0.01]  # 10000^0 and 10000^(-2/4)
        expected = [math.cos(a) for a in angles] + [math.sin(a) for a in angles]
        assert table[position].tolist() == pytest.approx(expected, abs=1e-6)
