"""Planned loads of four real ranks: each plans, fills and proves what it holds itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inference.config import EngineConfig
from inference.engine import Engine, Request, SamplingParams, WeightLoadError
from inference.parallel.config import ParallelConfig
from tests.inference.engine import planned
from tests.inference.parallel.ranks import Ranks, groups_for
from tests.inference.parallel.test_parallel_engine import MODEL, RAW
from tests.tiny_models import random_tensors

CONFIGS = [ParallelConfig(tp=4, ep=2), ParallelConfig(tp=2, dp=2), ParallelConfig(dp=4)]


def load_beside(rank: int, config: ParallelConfig, options: dict[str, Any]) -> list[int]:
    """Load seed 1 by a plan, beside generation where there is a shadow; returns the tokens of a
    request that ran during the load."""
    old, new = (random_tensors(RAW, seed, torch.bfloat16) for seed in (0, 1))
    engine = Engine(MODEL, EngineConfig(num_pages=64, **options), groups=groups_for(config))
    engine.load_weights(old.items(), 0)
    plan = engine.plan_load(planned.parts_of(engine, 2))
    half = len(plan.parts) // 2
    places = planned.pointers(plan)
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    engine.add(Request("r", [5, 7, 9 + config.dp_rank(rank), 11, 13], params))
    outputs = engine.step()
    if not engine.has_shadow:
        while engine.has_work:
            outputs += engine.step()
    engine.begin_load(1, plan)
    wire = {
        name: tensor.float() if engine_holds_fp32(engine, name) else tensor
        for name, tensor in new.items()
    }
    planned.fill(plan, wire, 0, half)
    engine.written(0, half)
    while engine.has_work:
        outputs += engine.step()
    planned.fill(plan, wire, half, len(plan.parts))
    engine.written(half, len(plan.parts))
    engine.pause("keep")
    engine.commit()
    engine.resume()
    found = engine.weights_hash()
    engine.load_weights(new.items(), 2)
    assert found == engine.weights_hash()
    assert planned.pointers(engine.plan_load(plan.parts)) == places
    (output,) = outputs
    return output.token_ids.tolist()


def engine_holds_fp32(engine: Engine, name: str) -> bool:
    slots = {slot.name: slot for slot in engine.weight_layout()}
    return name in slots and slots[name].dtype == "float32"


@pytest.mark.parametrize("quantization", ["none", "mxfp8_released"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_ranks_load_their_parts_beside_generation(
    four_ranks: Ranks, config: ParallelConfig, quantization: str
):
    options = {"quantization": quantization}
    alone = four_ranks.results(load_beside, config, options)
    beside = four_ranks.results(load_beside, config, options | {"shadow_weights": True})
    assert beside == alone


def plan_for_another(rank: int, config: ParallelConfig) -> str:
    """What a rank says of a plan that is the next rank's."""
    engine = Engine(MODEL, EngineConfig(num_pages=8), groups=groups_for(config))
    names = [slot.name for slot in engine.weight_layout()]
    mine = planned.parts_of(engine)
    moved = [
        (
            name,
            tuple((start + 8, stop + 8) for start, stop in bounds) if "q_proj" in name else bounds,
        )
        for name, bounds in mine
    ]
    assert names == [name for name, _ in mine]
    with pytest.raises(WeightLoadError) as error:
        engine.plan_load(moved)
    return str(error.value)


def test_a_rank_plans_only_for_its_own_part(four_ranks: Ranks):
    for message in four_ranks.results(plan_for_another, ParallelConfig(tp=4)):
        assert "q_proj" in message
        assert "which is what this engine holds" in message
