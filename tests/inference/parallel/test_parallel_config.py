import dataclasses

import pytest

from inference.config import ConfigError, ModelConfig
from inference.parallel.config import ParallelConfig
from tests.tiny_models import model_config, tiny_config

M3 = model_config(
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
    )
)


def changed(**values: int) -> ModelConfig:
    return dataclasses.replace(M3, **values)


def test_ranks_are_numbered_tp_first_and_expert_groups_are_runs_of_ranks():
    config = ParallelConfig(tp=4, dp=2, ep=4)
    assert (config.world, config.width_ranks) == (8, 2)
    assert [config.tp_rank(r) for r in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [config.dp_rank(r) for r in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [config.expert_group(r) for r in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [config.width_rank(r) for r in range(8)] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert config.experts(128, 5) == range(64, 96)


def test_every_rank_is_an_expert_group_unless_told_otherwise():
    assert ParallelConfig(tp=2, dp=4).expert_groups == 8


@pytest.mark.parametrize("quantization", ["none", "mxfp8", "mxfp8_released"])
@pytest.mark.parametrize(("tp", "dp"), [(1, 8), (2, 4), (4, 2), (8, 1), (4, 4)])
def test_m3_fits_on_every_usual_machine(tp: int, dp: int, quantization: str):
    ParallelConfig(tp, dp).check(M3, quantization)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ParallelConfig(tp=3), r"tp=3 does not divide num_attention_heads=64; use one of \[1, 2, "),
        (ParallelConfig(dp=3), r"ep=3 \(tp=1, dp=3\) does not divide num_local_experts=128; no ep"),
        (ParallelConfig(tp=8, dp=32), r"ep=256 .*=128; use one of \[32, 64, 128\]"),
    ],
)  # fmt: skip
def test_what_does_not_divide_names_what_does(config: ParallelConfig, message: str):
    with pytest.raises(ConfigError, match=message):
        config.check(M3)


def test_more_ranks_than_kv_heads_must_be_a_multiple_of_them():
    heads = {"num_key_value_heads": 6, "index_n_heads": 6, "num_attention_heads": 48}
    model = changed(**heads, num_local_experts=96)
    with pytest.raises(ConfigError, match=r"tp=4 neither divides .*use one of \[1, 2, 3, 6, 12"):
        ParallelConfig(tp=4).check(model)
    ParallelConfig(tp=12).check(model)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"vocab_size": 97}, r"tp=2 does not divide vocab_size=97; use one of \[1\]"),
        ({"dense_intermediate_size": 63}, "2 ranks that cannot split dense_intermediate_size=63"),
        ({"shared_intermediate_size": 63}, "2 ranks that cannot split shared_intermediate_size=63"),
    ],
)
def test_what_tp_cannot_split_is_named(values: dict[str, int], message: str):
    with pytest.raises(ConfigError, match=message):
        ParallelConfig(tp=2).check(changed(**values))


def test_no_rank_gets_a_part_of_an_mxfp8_group():
    model = changed(intermediate_size=96, shared_intermediate_size=96)
    config = ParallelConfig(tp=4, ep=2)
    config.check(model)
    with pytest.raises(ConfigError, match=r"size=96 in whole MXFP8 groups of 32; use one of \[4\]"):
        config.check(model, "mxfp8")
    with pytest.raises(ConfigError, match=r"tp=4 .* shared_intermediate_size=96 in whole MXFP8"):
        ParallelConfig(tp=4).check(model, "mxfp8_released")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tp": 0}, "tp=0 must be at least 1"),
        ({"tp": 4, "dp": 2, "ep": 6}, r"ep=6 does not divide .* use one of \[2, 4, 8\]"),
        ({"tp": 2, "dp": 2, "ep": 1}, r"use one of \[2, 4\]"),
    ],
)
def test_sizes_that_make_no_sense_are_refused_at_once(values: dict[str, int], message: str):
    with pytest.raises(ConfigError, match=message):
        ParallelConfig(**values)
