"""A load whose parts are agreed on once: proven then, filled by others, counted as they come."""

import pytest
import torch

from inference.config import EngineConfig
from inference.engine import Engine, EngineStateError, Request, WeightLoadError, WeightState
from inference.engine.scoring import prompt_logprobs
from tests.inference.engine import planned
from tests.inference.engine.engines import (
    assert_same,
    empty_engine,
    greedy,
    make_engine,
    prompt,
    run,
    run_alone,
    weights,
)
from tests.tiny_models import model_config, random_tensors, tiny_config

NORM = "model.norm.weight"
WIDE = tiny_config(
    intermediate_size=64,
    dense_intermediate_size=96,
    shared_intermediate_size=32,
    num_hidden_layers=3,
    num_local_experts=4,
)
"""Its widths are multiples of 32."""
EXPERT = "model.layers.1.block_sparse_moe.experts.2.w2.weight"


def test_weights_of_two_versions_have_no_version_and_score_nothing():
    engine = make_engine(seed=0)
    plan = engine.plan_load(planned.parts_of(engine))
    engine.begin_load(1, plan)
    planned.fill(plan, weights(1), 0, len(plan.parts) // 2)
    assert engine.version is None
    with pytest.raises(EngineStateError, match="by whole weights"):
        prompt_logprobs(engine, prompt(12))


@pytest.mark.parametrize("cuts", [1, 2, 5])
@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_a_planned_load_makes_the_engine_a_fresh_one(cuts, step):
    engine = make_engine(seed=0)
    run(engine, [Request("before", prompt(9), greedy(4))])
    plan = engine.plan_load(planned.parts_of(engine, cuts))
    planned.load(engine, plan, weights(1), 1, step)
    assert engine.version == 1
    planned.assert_holds(engine, planned.parameters(make_engine(seed=1)))
    (output,) = run(engine, [Request("r", prompt(9), greedy(16))])
    assert_same(output, run_alone(prompt(9), greedy(16), seed=1))


def without(parts, name):
    return [part for part in parts if part[0] != name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda parts: without(parts, NORM),
            r"leave 1 tensors incomplete: model\.norm\.weight \(0 of 32 elements written\)$",
        ),
        (
            lambda parts: [*without(parts, NORM), (NORM, ((0, 16),)), (NORM, ((17, 32),))],
            r"model\.norm\.weight \(31 of 32 elements",
        ),
        (lambda parts: [*parts, (NORM, ((31, 32),))], r"\(\(31, 32\),\) overlap \(\(0, 32\),\)"),
        (lambda parts: [*without(parts, NORM), (NORM, ((0, 33),))], "empty or outside"),
        (lambda parts: [*parts, ("model.norm.bias", ((0, 1),))], "no tensor of this model"),
    ],
)
def test_parts_that_are_not_the_model_once_are_no_plan(change, message):
    engine = make_engine()
    with pytest.raises(WeightLoadError, match=message):
        engine.plan_load(change(planned.parts_of(engine)))
    assert engine.version == 0


def wide_engine(quantization: str, seed: int | None = 0, **options) -> Engine:
    config = EngineConfig(num_pages=32, dtype="bfloat16", quantization=quantization, **options)
    engine = Engine(model_config(WIDE), config)
    if seed is not None:
        engine.load_weights(wide_weights(seed).items(), 0)
    return engine


def wide_weights(seed: int) -> dict[str, torch.Tensor]:
    return random_tensors(WIDE, seed, torch.bfloat16)


def test_a_part_that_cuts_a_block_is_no_plan():
    engine = wide_engine("mxfp8")
    parts = without(planned.parts_of(engine), EXPERT)
    halves = [(EXPERT, ((0, 32), (0, 16))), (EXPERT, ((0, 32), (16, 64)))]
    with pytest.raises(WeightLoadError, match="cut a block of 32 that shares a scale"):
        engine.plan_load([*parts, *halves])


@pytest.mark.parametrize("quantization", ["none", "mxfp8", "mxfp8_released"])
@pytest.mark.parametrize("shadow", [False, True])
def test_there_and_back_again_is_bit_equal_and_nothing_moves(quantization, shadow):
    engine = wide_engine(quantization, shadow_weights=shadow)
    plan = engine.plan_load(planned.parts_of(engine, 2))
    places, first = planned.pointers(plan), planned.parameters(engine)
    lies_at = {n: t.data_ptr() for n, t in engine._worker.model.state_dict().items()}
    planned.load(engine, plan, wide_weights(1), 1)
    planned.assert_holds(engine, planned.parameters(wide_engine(quantization, 1)))
    planned.load(engine, plan, wide_weights(0), 2)
    planned.assert_holds(engine, first)
    planned.load(engine, plan, wide_weights(0), 3)
    planned.assert_holds(engine, first)
    assert engine.version == 3
    assert planned.pointers(engine.plan_load(plan.parts)) == planned.pointers(plan) == places
    assert {n: t.data_ptr() for n, t in engine._worker.model.state_dict().items()} == lies_at


def test_places_are_parameters_or_their_shadow_and_together_all_of_them():
    for shadow in (False, True):
        engine = wide_engine("mxfp8", shadow_weights=shadow)
        held = planned.parameters(engine)
        plan = engine.plan_load(planned.parts_of(engine, 3))
        engine.begin_load(1, plan)
        for place in plan.places:
            for tensor in [place] if isinstance(place, torch.Tensor) else place:
                tensor.view(torch.uint8).fill_(0x11)
        found = planned.parameters(engine)
        assert all(torch.equal(found[name], held[name]) for name in held) == shadow
        filled = engine._worker.weights._filled
        assert all(bool((t.view(torch.uint8) == 0x11).all()) for t in filled.values())


def poisoned_by(act, message):
    """An engine whose planned load, three parts of which are in place, ends by `act`."""
    engine = make_engine()
    plan = engine.plan_load(planned.parts_of(engine))
    engine.begin_load(1, plan)
    planned.fill(plan, weights(1), 2, 5)
    engine.written(2, 5)
    with pytest.raises(WeightLoadError, match=message):
        act(engine)
    assert engine.version is None
    assert engine._weights.state is WeightState.POISONED
    planned.load(engine, plan, weights(1), 2)
    planned.assert_holds(engine, planned.parameters(make_engine(seed=1)))


def test_a_part_written_twice_ends_the_load():
    name = r"model\.layers\.0\.self_attn\.q_proj\.weight"
    poisoned_by(lambda engine: engine.written(0, 4), f"part 2 of the plan, {name} .* written twice")


@pytest.mark.parametrize(("first", "last"), [(-1, 1), (5, 4), (0, 10_000)])
def test_parts_that_the_plan_does_not_have_end_the_load(first, last):
    poisoned_by(lambda engine: engine.written(first, last), "are not among the")


def test_a_commit_names_what_was_not_in_place():
    def almost_all(engine):
        engine.written(0, 2)
        engine.written(5, len(planned.parts_of(engine)) - 1)
        engine.commit()

    message = r"1 tensors of version 1 are not whole: lm_head\.weight \(0 of 3104 elements written"
    poisoned_by(almost_all, message)


def test_an_aborted_plan_poisons_though_nothing_was_told():
    engine = make_engine()
    engine.begin_load(1, engine.plan_load(planned.parts_of(engine)))
    engine.abort_load()
    assert engine._weights.state is WeightState.POISONED


def test_writes_and_plans_do_not_mix_and_the_load_goes_on():
    engine = make_engine()
    plan = engine.plan_load(planned.parts_of(engine))
    with pytest.raises(EngineStateError, match="written without an open load"):
        engine.written(0, 1)
    engine.begin_load(1, plan)
    with pytest.raises(EngineStateError, match="the open load has a plan"):
        engine.write(NORM, ((0, 32),), weights(1)[NORM])
    planned.fill(plan, weights(1), 0, len(plan.parts))
    engine.written(0, len(plan.parts))
    engine.commit()
    planned.assert_holds(engine, planned.parameters(make_engine(seed=1)))
    engine.begin_load(2)
    with pytest.raises(EngineStateError, match="the open load has no plan"):
        engine.written(0, 1)
    engine.abort_load()
    assert engine.version == 1


def test_a_plan_belongs_to_its_engine():
    engine, other = make_engine(), empty_engine()
    plan = other.plan_load(planned.parts_of(other))
    with pytest.raises(WeightLoadError, match="that of another engine"):
        engine.begin_load(1, plan)
    assert (engine.version, engine._weights.state) == (0, WeightState.READY)


def test_a_parameter_that_was_replaced_is_noticed():
    engine = make_engine()
    plan = engine.plan_load(planned.parts_of(engine))
    norm = engine._worker.model.norm
    norm.weight = torch.nn.Parameter(norm.weight.detach().clone(), requires_grad=False)
    with pytest.raises(AssertionError, match=r"norm\.weight was replaced"):
        engine.begin_load(1, plan)


@pytest.mark.parametrize("shadow", [False, True])
def test_what_cannot_be_quantised_is_named_by_the_commit(shadow):
    engine = wide_engine("mxfp8", shadow_weights=shadow)
    before = planned.parameters(engine)
    bad = wide_weights(1)
    bad[EXPERT][3, 40] = torch.nan
    plan = engine.plan_load(planned.parts_of(engine))
    with pytest.raises(WeightLoadError, match=rf"1 tensors of version 1 hold NaN.*: {EXPERT};"):
        planned.load(engine, plan, bad, 1)
    if shadow:
        assert engine.version == 0
        planned.assert_holds(engine, before)
    else:
        assert engine.version is None
