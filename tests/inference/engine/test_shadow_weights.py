"""With a shadow the old version serves until the new one is whole, whatever happens to its load."""

import threading

import numpy as np
import pytest
import torch

from inference.config import EngineConfig
from inference.engine import Engine, EngineStateError, Request, WeightLoadError, WeightState
from tests.inference.engine import planned
from tests.inference.engine.engines import (
    RAW,
    assert_same,
    empty_engine,
    greedy,
    make_engine,
    prompt,
    run,
    run_alone,
    sampled,
    step_to_end,
    weights,
)
from tests.tiny_models import model_config, random_checkpoint

REQUESTS = [Request(f"r{i}", prompt(7 + i, seed=i), sampled(12, seed=i)) for i in range(4)]


def shadowed(seed: int = 0, **options) -> Engine:
    return make_engine(seed, shadow_weights=True, **options)


def stepping(engine: Engine, steps: int, outputs: dict) -> None:
    for _ in range(steps):
        outputs |= {output.request_id: output for output in engine.step()}


def half_loaded(engine: Engine, version: int = 1):
    """The plan of an open load, half of which is in place."""
    plan = engine.plan_load(planned.parts_of(engine))
    engine.begin_load(version, plan)
    half = len(plan.parts) // 2
    planned.fill(plan, weights(1), 0, half)
    engine.written(0, half)
    return plan, half


def assert_same_bits(outputs, expected) -> None:
    assert outputs.keys() == expected.keys()
    for name, output in outputs.items():
        other = expected[name]
        for field in ("token_ids", "logprobs", "version_spans"):
            assert np.array_equal(getattr(output, field), getattr(other, field)), (name, field)


@pytest.mark.parametrize("is_async", [False, True])
def test_requests_that_run_beside_a_load_do_not_notice_it(is_async):
    expected = {o.request_id: o for o in run(make_engine(async_scheduling=is_async), REQUESTS)}
    engine = shadowed(async_scheduling=is_async)
    for request in REQUESTS[:2]:
        engine.add(request)
    outputs = {}
    stepping(engine, 2, outputs)
    plan, half = half_loaded(engine)
    for request in REQUESTS[2:]:
        engine.add(request)
    stepping(engine, 3, outputs)
    planned.fill(plan, weights(1), half, len(plan.parts))
    engine.written(half, len(plan.parts))
    outputs |= step_to_end(engine)
    for name, output in outputs.items():
        assert_same(output, expected[name])
        assert output.version_spans.tolist() == [[0, 0]]
    engine.commit()
    assert engine.version == 1
    planned.assert_holds(engine, planned.parameters(make_engine(seed=1)))


@pytest.mark.parametrize("mode", ["drain", "keep", "recompute"])
def test_a_commit_between_two_steps_is_a_load_in_place_between_them(mode):
    """Running requests go on with the same bits either way."""
    results = []
    for engine in (make_engine(), shadowed()):
        for request in REQUESTS:
            engine.add(request)
        outputs = {}
        stepping(engine, 4, outputs)
        if engine.has_shadow:
            engine.begin_load(1)
            for name, tensor in weights(1).items():
                engine.write(name, tuple((0, size) for size in tensor.shape), tensor)
            engine.pause(mode)
            engine.commit()
        else:
            engine.pause(mode)
            engine.load_weights(weights(1).items(), 1)
        assert outputs == {}
        engine.resume()
        results.append(step_to_end(engine))
    assert_same_bits(results[1], results[0])
    spans = [[0, 0]] if mode == "drain" else [[0, 0], [4, 1]]
    assert all(output.version_spans.tolist() == spans for output in results[1].values())


def test_a_commit_wants_running_requests_paused_and_waits_for_it():
    engine = shadowed()
    engine.add(REQUESTS[0])
    engine.step()
    plan, half = half_loaded(engine)
    planned.fill(plan, weights(1), half, len(plan.parts))
    engine.written(half, len(plan.parts))
    with pytest.raises(
        EngineStateError, match=r"1 requests are under way; pause\(\) before commit"
    ):
        engine.commit()
    engine.step()
    engine.pause("keep")
    engine.commit()
    assert engine.version == 1


FAULTS = {
    "written twice": lambda engine, half: engine.written(half - 1, half),
    "incomplete": lambda engine, half: engine.commit(),
}


@pytest.mark.parametrize("how", ["abort", *FAULTS])
def test_a_load_that_fails_leaves_the_old_version_serving(how):
    expected = run_alone(REQUESTS[0].prompt_ids, REQUESTS[0].params)
    engine = shadowed()
    before = planned.parameters(engine)
    cached = run(engine, [Request("first", prompt(12), greedy(2))])[0]
    plan, half = half_loaded(engine)
    if how == "abort":
        engine.abort_load()
    else:
        with pytest.raises(WeightLoadError):
            FAULTS[how](engine, half)
    assert (engine.version, engine._weights.state) == (0, WeightState.READY)
    planned.assert_holds(engine, before)
    assert_same(run(engine, REQUESTS[:1])[0], expected)
    again = run(engine, [Request("again", prompt(12), greedy(2))])[0]
    assert again.num_cached_tokens == 8  # still the same version's
    assert_same(again, cached)
    planned.load(engine, plan, weights(1), 2)
    assert engine.version == 2
    after = run(engine, [Request("after", prompt(12), greedy(2))])[0]
    assert after.num_cached_tokens == 0
    assert_same(after, run_alone(prompt(12), greedy(2), seed=1))


def test_a_copy_that_breaks_off_poisons(monkeypatch):
    engine = shadowed()
    plan = engine.plan_load(planned.parts_of(engine))

    def broken():
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(engine._worker.weights, "publish", broken)
    with pytest.raises(RuntimeError, match="the device is lost"):
        planned.load(engine, plan, weights(1), 1)
    assert (engine.version, engine._weights.state) == (None, WeightState.POISONED)
    monkeypatch.undo()
    planned.load(engine, plan, weights(1), 2)
    planned.assert_holds(engine, planned.parameters(make_engine(seed=1)))


def test_hashes_of_the_shadow_are_those_of_what_the_load_brings():
    engine = shadowed()
    old, new = make_engine().weights_hash(), make_engine(seed=1).weights_hash()
    with pytest.raises(EngineStateError, match="no load into a shadow is open"):
        engine.weights_hash(shadow=True)
    plan, half = half_loaded(engine)
    planned.fill(plan, weights(1), half, len(plan.parts))
    assert engine.weights_hash(shadow=True) == new
    assert engine.weights_hash() == old
    engine.written(half, len(plan.parts))
    engine.commit()
    assert engine.weights_hash() == new
    with pytest.raises(EngineStateError, match="no load into a shadow is open"):
        make_engine().weights_hash(shadow=True)


def test_the_first_load_serves_nothing_before_its_commit():
    engine = empty_engine(shadow_weights=True)
    plan, _ = half_loaded(engine)
    with pytest.raises(EngineStateError, match="no request is taken while the engine is EMPTY"):
        engine.add(REQUESTS[0])
    with pytest.raises(EngineStateError, match="load of version 1 is still open"):
        engine.begin_load(2)
    engine.abort_load()
    assert (engine.version, engine._weights.state) == (None, WeightState.EMPTY)
    planned.load(engine, plan, weights(1), 3)
    assert_same(run(engine, REQUESTS[:1])[0], run_alone(prompt(7), sampled(12, seed=0), seed=1))


def test_a_checkpoint_is_read_as_without(tmp_path):
    random_checkpoint(tmp_path, RAW, seed=3)
    engines = [
        Engine.from_pretrained(tmp_path, EngineConfig(num_pages=16, shadow_weights=shadow))
        for shadow in (False, True)
    ]
    planned.assert_holds(engines[1], planned.parameters(engines[0]))
    engines[1].add(Request("r", prompt(5), greedy(4)))
    with pytest.raises(EngineStateError, match=r"pause\(\) before loading version 1"):
        engines[1].load_weights(iter(()), 1)
    assert not engines[1]._weights.is_open


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("quantization", ["none", "mxfp8_released"])
def test_graphs_read_the_new_version_after_a_load_beside_them(quantization):
    from tests.inference.engine.test_planned_loads import WIDE, wide_weights

    def made(shadow: bool, seed: int) -> Engine:
        config = EngineConfig(
            dtype="bfloat16",
            device="cuda",
            num_pages=160,
            max_running_requests=8,
            quantization=quantization,
            shadow_weights=shadow,
        )
        engine = Engine(model_config(WIDE), config)
        engine.load_weights(wide_weights(seed).items(), seed)
        return engine

    asked = [Request(f"r{i}", prompt(9 + i, seed=i), sampled(60, seed=i)) for i in range(4)]
    old, new = ({o.request_id: o for o in run(made(False, s), asked)} for s in (0, 1))
    engine = made(True, 0)
    run(engine, [Request(f"warm {r.request_id}", r.prompt_ids, r.params) for r in asked])
    engine.load_weights(wide_weights(0).items(), 0)  # forgets the pages of the warm-up
    plan = engine.plan_load(planned.parts_of(engine))
    tensors = {name: tensor.cuda() for name, tensor in wide_weights(1).items()}
    torch.cuda.synchronize()

    def receive() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            planned.fill(plan, tensors, 0, len(plan.parts))
        stream.synchronize()
        engine.written(0, len(plan.parts))

    for request in asked:
        engine.add(request)
    outputs: dict = {}
    stepping(engine, 3, outputs)
    engine.begin_load(1, plan)
    receiver = threading.Thread(target=receive)
    receiver.start()
    outputs |= step_to_end(engine)
    receiver.join()
    assert_same_bits(outputs, old)
    engine.pause("keep")
    engine.commit()
    engine.resume()
    found = {o.request_id: o for o in run(engine, asked)}
    assert_same_bits(found, new)
