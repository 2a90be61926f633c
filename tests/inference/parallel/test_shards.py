"""What each rank holds: all of the model together, and all of its own parameters."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from inference.models.minimax_m3 import MiniMaxM3
from inference.models.weights import published_tensors
from inference.parallel.config import ParallelConfig, local_config
from inference.parallel.shards import Shard, runtime_shards
from tests.tiny_models import model_config, tiny_config

MODEL = model_config(tiny_config(vocab_size=96, num_attention_heads=8, shared_intermediate_size=32))
"""2 KV heads, 8 experts, MLPs of 48, 32 and 16."""
CONFIGS = [
    ParallelConfig(tp, dp, dp * d)
    for tp in (1, 2, 4, 8)
    for dp in (1, 2)
    for d in range(1, tp + 1)
    if tp % d == 0 and dp * d <= 8
]
IDS = [f"tp{c.tp}-dp{c.dp}-ep{c.ep}" for c in CONFIGS]


def cut(tensor: Tensor, shard: Shard) -> Tensor:
    return tensor[tuple(slice(*bounds) for bounds in shard.bounds)]


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_ranks_together_hold_every_element_as_often_as_it_is_replicated(config: ParallelConfig):
    shards = [runtime_shards(MODEL, config, rank) for rank in range(config.world)]
    kv_copies = config.dp * max(1, config.tp // MODEL.num_key_value_heads)
    for spec in published_tensors(MODEL):
        count = torch.zeros(spec.shape, dtype=torch.int64)
        for held in shards:
            if spec.name in held:
                cut(count, held[spec.name]).add_(1)
        module = spec.name.split(".")[-2]
        if spec.role == "expert":
            copies = 1
        elif module in ("k_proj", "v_proj", "index_q_proj"):
            copies = kv_copies
        elif module in ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"):
            copies = config.dp
        else:
            copies = config.world
        assert (count == copies).all(), spec.name


@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_shards_fill_every_parameter_of_a_rank_once(config: ParallelConfig):
    local = local_config(MODEL, config)
    state = MiniMaxM3(local, torch.float32, "cpu").state_dict()
    for rank in range(config.world):
        held = len(config.experts(MODEL.num_local_experts, rank))
        params = {
            name: param[:held] if ".experts.w" in name else param for name, param in state.items()
        }
        params["lm_head.weight"] = state["lm_head.weight"][: MODEL.vocab_size // config.tp]
        for param in params.values():
            param.zero_()
        for name, shard in runtime_shards(MODEL, config, rank).items():
            view = shard.placement.view(params)
            assert view.shape == tuple(stop - start for start, stop in shard.bounds), name
            view += 1
        assert [name for name, param in params.items() if not (param == 1).all()] == []


def test_the_rectangles_of_m3_at_tp_8():
    # 64 query heads and 4 KV heads of 128: rank 3 has query heads 24..31, which read KV head 1.
    model = model_config(
        tiny_config(
            hidden_size=6144,
            num_attention_heads=64,
            num_key_value_heads=4,
            head_dim=128,
            vocab_size=200064,
            intermediate_size=3072,
            dense_intermediate_size=12288,
            shared_intermediate_size=3072,
            num_local_experts=128,
            num_experts_per_tok=4,
            num_hidden_layers=2,
        )
    )
    shards = runtime_shards(model, ParallelConfig(tp=8, ep=4), 3)
    bounds = {name: shard.bounds for name, shard in shards.items()}
    attention, moe = "model.layers.1.self_attn", "model.layers.1.block_sparse_moe"
    assert bounds[f"{attention}.q_proj.weight"] == ((3072, 4096), (0, 6144))
    assert bounds[f"{attention}.k_proj.weight"] == ((128, 256), (0, 6144))
    assert bounds[f"{attention}.v_proj.weight"] == ((128, 256), (0, 6144))
    assert bounds[f"{attention}.index_q_proj.weight"] == ((128, 256), (0, 6144))
    assert bounds[f"{attention}.index_k_proj.weight"] == ((0, 128), (0, 6144))
    assert bounds[f"{attention}.o_proj.weight"] == ((0, 6144), (3072, 4096))
    assert bounds["model.layers.0.mlp.down_proj.weight"] == ((0, 6144), (4608, 6144))
    assert bounds[f"{moe}.shared_experts.up_proj.weight"] == ((1152, 1536), (0, 6144))
    assert bounds["lm_head.weight"] == ((75024, 100032), (0, 6144))
    assert bounds["model.embed_tokens.weight"] == ((0, 200064), (0, 6144))
    # Expert group 1 of 4 is ranks 2 and 3: experts 32..63, rank 3 the second half of their width.
    experts = Counter(name.split(".")[-3] for name in bounds if ".experts." in name)
    assert experts == {str(e): 3 for e in range(32, 64)}
    assert bounds[f"{moe}.experts.40.w1.weight"] == ((1536, 3072), (0, 6144))
    assert bounds[f"{moe}.experts.40.w2.weight"] == ((0, 6144), (1536, 3072))
    assert shards[f"{moe}.experts.40.w3.weight"].placement.index == (8, slice(1536, 3072))
