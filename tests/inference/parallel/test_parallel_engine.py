"""Engines on four real ranks against one that holds the whole model."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from inference.config import ConfigError, EngineConfig, ModelConfig
from inference.engine import Engine, Request, SamplingParams, WeightLoadError
from inference.engine import engine as engine_module
from inference.kernels.tensor_hash import combine
from inference.parallel.config import ParallelConfig
from inference.parallel.groups import ParallelError
from tests.inference.engine.engines import poison_pages
from tests.inference.parallel.ranks import Ranks, groups_for
from tests.inference.parallel.test_experts import CONFIGS, IDS
from tests.tiny_models import model_config, random_checkpoint, random_tensors, tiny_config

RAW = tiny_config(
    vocab_size=96,
    num_attention_heads=8,
    intermediate_size=128,
    dense_intermediate_size=128,
    shared_intermediate_size=128,
    num_hidden_layers=3,
)
"""2 KV heads, so four tp ranks replicate them; 8 experts; every rank has whole blocks of 32."""
MODEL = model_config(RAW)
IDLE_EXPERT = 5


@dataclass(frozen=True)
class Plan:
    """What the dp groups are given; prompts by length."""

    lengths: Sequence[Sequence[int]]
    max_tokens: int = 8
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def request(group: int, number: int, length: int, plan: Plan) -> Request:
    seed = 100 * group + number
    ids = np.random.default_rng(seed).integers(3, MODEL.vocab_size, length).tolist()
    params = SamplingParams(
        max_tokens=plan.max_tokens + number,
        temperature=float(number % 2),
        seed=seed,
        ignore_eos=True,
        routing=True,
        blocks=True,
    )
    return Request(f"{group}.{number}", ids, params)


def weights(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    tensors = random_tensors(RAW, 0, dtype)
    for name, tensor in tensors.items():
        if name.endswith("e_score_correction_bias"):
            tensor[IDLE_EXPERT] = -100.0
    return tensors


def make_engine(plan: Plan, config: ParallelConfig | None) -> Engine:
    options = {"num_pages": 64, "capture_routing": True, "capture_blocks": True} | plan.options
    groups = None if config is None else groups_for(config)
    engine = Engine(MODEL, EngineConfig(**options), groups=groups)
    poison_pages(engine)
    engine.load_weights(
        weights(torch.bfloat16 if "quantization" in options else torch.float32).items(), 0
    )
    return engine


Found = dict[str, dict[str, Any]]


def run_to_end(engine: Engine, requests: Sequence[Request]) -> Found:
    for each in requests:
        engine.add(each)
    found: Found = {}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            fields = ("token_ids", "logprobs", "routing", "blocks")
            found[output.request_id] = {name: getattr(output, name) for name in fields}
        engine._scheduler.check()
    return found


def run_rank(rank: int, config: ParallelConfig, plan: Plan) -> Found:
    group = config.dp_rank(rank)
    lengths = plan.lengths[group]
    requests = [request(group, i, length, plan) for i, length in enumerate(lengths)]
    return run_to_end(make_engine(plan, config), requests)


def run_one(plan: Plan, config: ParallelConfig) -> Found:
    requests = [
        request(group, i, length, plan)
        for group in range(config.dp)
        for i, length in enumerate(plan.lengths[group])
    ]
    return run_to_end(make_engine(plan, None), requests)


def assert_ranks_agree_with_one(ranks: Ranks, config: ParallelConfig, plan: Plan) -> Found:
    wanted = run_one(plan, config)
    for rank, found in enumerate(ranks.results(run_rank, config, plan)):
        group = config.dp_rank(rank)
        assert sorted(found) == [f"{group}.{i}" for i in range(len(plan.lengths[group]))]
        kv_heads = kv_heads_of(config, rank)
        for name, ours in found.items():
            theirs = wanted[name]
            assert ours["token_ids"].tolist() == theirs["token_ids"].tolist(), (rank, name)
            np.testing.assert_allclose(ours["logprobs"], theirs["logprobs"], rtol=0, atol=1e-5)
            np.testing.assert_array_equal(ours["routing"], theirs["routing"])
            # Ranks with copies of a KV head have chosen the same blocks, those of the one engine.
            np.testing.assert_array_equal(ours["blocks"], theirs["blocks"][:, :, kv_heads])
    return wanted


def kv_heads_of(config: ParallelConfig, rank: int) -> slice:
    heads, tp, part = MODEL.num_key_value_heads, config.tp, config.tp_rank(rank)
    count = max(1, heads // tp)
    first = part * heads // tp
    return slice(first, first + count)


EVEN = [[9, 14, 3], [6, 11, 8], [5, 5, 13], [12, 2, 7]]


@pytest.mark.parametrize("quantization", ["none", "mxfp8", "mxfp8_released"])
@pytest.mark.parametrize("config", CONFIGS, ids=IDS)
def test_every_division_of_four_ranks_generates_what_one_does(
    four_ranks: Ranks, config: ParallelConfig, quantization: str
):
    options = {} if quantization == "none" else {"quantization": quantization}
    # A step holds 12 tokens: prompts come in chunks, beside decodes.
    plan = Plan(EVEN, options={"max_tokens_per_step": 12, **options})
    wanted = assert_ranks_agree_with_one(four_ranks, config, plan)
    used = np.unique(np.concatenate([found["routing"].ravel() for found in wanted.values()]))
    assert used.tolist() == [e for e in range(8) if e != IDLE_EXPERT]


DP_CONFIGS = [config for config in CONFIGS if config.dp > 1]


@pytest.mark.parametrize("is_async", [False, True], ids=["in order", "ahead"])
@pytest.mark.parametrize("config", DP_CONFIGS, ids=[IDS[CONFIGS.index(c)] for c in DP_CONFIGS])
def test_groups_without_requests_compute_padding(
    four_ranks: Ranks, config: ParallelConfig, is_async: bool
):
    plan = Plan([[], [7, 3], [], [4]], options={"async_scheduling": is_async})
    assert_ranks_agree_with_one(four_ranks, config, plan)


@pytest.mark.parametrize("is_async", [False, True], ids=["in order", "ahead"])
def test_groups_that_run_out_of_pages_at_different_times(four_ranks: Ranks, is_async: bool):
    # 8 pages of 4 tokens: the three requests of group 0 are preempted, those of group 1 fit.
    options = {"num_pages": 8, "async_scheduling": is_async}
    plan = Plan([[9, 9, 9], [3]], max_tokens=10, options=options)
    assert_ranks_agree_with_one(four_ranks, ParallelConfig(tp=2, dp=2), plan)


def hashes(rank: int, config: ParallelConfig, plan: Plan) -> dict[str, tuple[Any, int]]:
    engine = make_engine(plan, config)
    found = engine.weights_hash()
    return {slot.name: (slot.bounds, found[slot.name]) for slot in engine.weight_layout()}


@pytest.mark.parametrize("quantization", ["none", "mxfp8_released"])
def test_hashes_of_the_parts_add_up_to_the_hash_of_the_whole(four_ranks: Ranks, quantization: str):
    plan = Plan(EVEN, options={} if quantization == "none" else {"quantization": quantization})
    wanted = make_engine(plan, None).weights_hash()
    config = ParallelConfig(tp=4, ep=2)
    parts: dict[str, dict[Any, int]] = {name: {} for name in wanted}
    for held in four_ranks.results(hashes, config, plan):
        for name, (bounds, found) in held.items():
            # Copies hash alike, so they are one entry.
            assert parts[name].setdefault(bounds, found) == found, name
    assert {name: combine(found.values()) for name, found in parts.items()} == wanted


def write_outside(rank: int, config: ParallelConfig) -> str:
    engine = make_engine(Plan([]), config)
    engine.begin_load(1)
    name = "model.layers.1.self_attn.o_proj.weight"
    whole = tuple((0, size) for size in random_tensors(RAW, 0)[name].shape)
    with pytest.raises(WeightLoadError) as error:
        engine.write(name, whole, torch.zeros(32, 128))
    return str(error.value)


def test_a_rank_takes_only_its_own_part_of_a_weight(four_ranks: Ranks):
    messages = four_ranks.results(write_outside, ParallelConfig(tp=4))
    for rank, message in enumerate(messages):
        mine = ((0, 32), (32 * rank, 32 * rank + 32))
        assert f"outside of {mine}, which is what this engine holds" in message


def drain(rank: int, config: ParallelConfig, plan: Plan) -> Found:
    engine = make_engine(plan, config)
    group = config.dp_rank(rank)
    for i, length in enumerate(plan.lengths[group]):
        engine.add(request(group, i, length, plan))
    held = engine.step()
    engine.pause("drain")
    held += engine.step()
    engine.resume()
    while engine.has_work:
        held += engine.step()
    return {o.request_id: {"token_ids": o.token_ids.tolist()} for o in held}


def test_groups_drain_together_though_one_has_less_to_do(four_ranks: Ranks):
    plan = Plan([[9, 4], [3], [], [5]])
    config = ParallelConfig(dp=4)
    wanted = run_one(plan, config)
    merged: Found = {}
    for found in four_ranks.results(drain, config, plan):
        merged |= found
    assert merged.keys() == wanted.keys()
    for name, found in merged.items():
        assert found["token_ids"] == wanted[name]["token_ids"].tolist()


def from_disk(rank: int, config: ParallelConfig, folder: str) -> tuple[int, dict[str, int]]:
    read: list[str] = []
    original = engine_module.read_checkpoint

    def recording(*args: Any, **kwargs: Any) -> Any:
        for name, tensor in original(*args, **kwargs):
            read.append(name)
            yield name, tensor

    with patch.object(engine_module, "read_checkpoint", recording):
        engine = Engine.from_pretrained(
            folder, EngineConfig(num_pages=8), groups=groups_for(config)
        )
    return len([name for name in read if ".experts." in name]), engine.weights_hash()


def test_a_rank_reads_only_its_own_experts_of_a_checkpoint(four_ranks: Ranks, tmp_path: Path):
    random_checkpoint(tmp_path, RAW, 0)
    config = ParallelConfig(tp=2, dp=2)
    whole = Engine.from_pretrained(tmp_path, EngineConfig(num_pages=8)).weights_hash()
    found = four_ranks.results(from_disk, config, str(tmp_path))
    assert [count for count, _ in found] == [2 * 2 * 3] * 4
    experts = [name for name in whole if ".experts." in name]
    merged = {name: value for _, held in found for name, value in held.items() if name in experts}
    assert merged == {name: whole[name] for name in experts}


def make_on(rank: int, config: ParallelConfig, model: ModelConfig) -> None:
    Engine(model, EngineConfig(num_pages=8), groups=groups_for(config))


def test_a_division_that_does_not_fit_is_refused_with_those_that_do(four_ranks: Ranks):
    narrow = dataclasses.replace(MODEL, num_local_experts=6)
    answers = four_ranks.run(make_on, ParallelConfig(tp=4), narrow)
    message = (
        "ConfigError: ep=4 (tp=4, dp=1) does not divide num_local_experts=6; use one of [1, 2]"
    )
    assert answers == [("error", message)] * 4


def die_in_a_step(rank: int, config: ParallelConfig, plan: Plan, victim: int) -> str:
    engine = make_engine(plan, config)
    for i, length in enumerate(plan.lengths[config.dp_rank(rank)]):
        engine.add(request(config.dp_rank(rank), i, length, plan))
    engine.step()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while engine.has_work:
            engine.step()
    except ParallelError as error:
        return str(error)
    return "ended well"


@pytest.mark.parametrize("config", [ParallelConfig(tp=4), ParallelConfig(tp=2, dp=2)], ids=str)
def test_a_rank_that_dies_is_named_by_the_engines_of_all_others(
    tmp_path: Path, config: ParallelConfig
):
    ranks = Ranks(4, tmp_path)
    try:
        answers = ranks.run(die_in_a_step, config, Plan(EVEN, max_tokens=20), 2)
    finally:
        ranks.close()
    assert answers.pop(2) == ("died", -signal.SIGKILL)
    for kind, message in answers:
        assert kind == "ok", message
        assert "was not completed: rank 2 is gone, the process ended" in message


def without_seed(rank: int, config: ParallelConfig) -> str:
    engine = make_engine(Plan(EVEN), config)
    engine.add(Request("greedy", [5, 6], SamplingParams(temperature=0.0)))
    try:
        engine.add(Request("drawn", [5, 6], SamplingParams()))
    except ValueError as error:
        return str(error)
    finally:
        engine.abort()
        engine.step()
    return "taken"


def test_a_request_that_the_tp_ranks_would_draw_differently_is_refused(four_ranks: Ranks):
    for message in four_ranks.results(without_seed, ParallelConfig(tp=4)):
        assert message.startswith("request 'drawn' has no seed; each of the 4 tp ranks would")


def with_other_pages(rank: int, config: ParallelConfig) -> str:
    try:
        make_engine(Plan(EVEN, options={"num_pages": 64 + (rank == 2)}), config)
    except ParallelError as error:
        return str(error)
    return "made"


def test_engines_that_are_not_configured_alike_are_refused(four_ranks: Ranks):
    for message in four_ranks.results(with_other_pages, ParallelConfig(tp=4)):
        assert "configuration must be the same on all ranks; that of rank 0 is" in message
        assert message.endswith("of rank 2 another one")


def over_nccl(rank: int, config: ParallelConfig) -> str:
    groups = groups_for(config)
    with patch("torch.distributed.get_backend", return_value="nccl"):
        try:
            Engine(MODEL, EngineConfig(), groups=groups)
        except ConfigError as error:
            return str(error)
    return "made"


def test_an_engine_on_the_cpu_does_not_talk_over_nccl(four_ranks: Ranks):
    for message in four_ranks.results(over_nccl, ParallelConfig(tp=4)):
        assert message.startswith("device='cpu', but the ranks talk over NCCL; use device='cuda'")
