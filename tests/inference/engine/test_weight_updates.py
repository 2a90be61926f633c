"""Weights in the engine are the weights that were sent, and nothing of the old version survives."""

import itertools

import numpy as np
import pytest
import torch

from inference.config import EngineConfig
from inference.engine import Engine, EngineStateError, Request, WeightLoadError
from inference.kernels.tensor_hash import tensor_hash
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


def whole(tensor):
    return tuple((0, size) for size in tensor.shape)


def split(tensor, cuts):
    """Rectangles that cut every dimension of `tensor` into about `cuts` parts."""
    pieces = [()]
    for size in tensor.shape:
        edges = sorted({size * i // cuts for i in range(cuts + 1)})
        pieces = [
            (*piece, (start, stop)) for piece in pieces for start, stop in itertools.pairwise(edges)
        ]
    return pieces


def sync(engine, tensors, version, cuts=1, order=None):
    """Stream `tensors` in rectangles, in a shuffled order when `order` seeds it."""
    writes = [(name, bounds) for name, tensor in tensors.items() for bounds in split(tensor, cuts)]
    if order is not None:
        writes = [writes[i] for i in np.random.default_rng(order).permutation(len(writes))]
    engine.begin_load(version)
    for name, bounds in writes:
        piece = tensors[name][tuple(slice(start, stop) for start, stop in bounds)]
        engine.write(name, bounds, piece)
    engine.commit()


def hashes(tensors):
    return {name: tensor_hash(tensor, name=name) for name, tensor in tensors.items()}


# BR-001
@pytest.mark.parametrize("cuts", [1, 2, 5])
def test_a_sync_in_pieces_makes_the_engine_a_fresh_one(cuts):
    engine = make_engine(seed=0)
    run(engine, [Request("before", prompt(9), greedy(4))])
    sync(engine, weights(1), 1, cuts=cuts, order=cuts)
    assert engine.version == 1
    assert engine.weights_hash() == hashes(weights(1))
    assert engine.weights_hash() != hashes(weights(0))
    (output,) = run(engine, [Request("r", prompt(9), greedy(16))])
    assert_same(output, run_alone(prompt(9), greedy(16), seed=1))


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_a_load_from_disk_is_a_sync_bit_for_bit(tmp_path, prefix):
    tensors = random_checkpoint(tmp_path, RAW, seed=3, prefix=prefix, max_shard_bytes=40_000)
    disk = Engine.from_pretrained(tmp_path, EngineConfig(num_pages=16))
    synced = empty_engine()
    sync(synced, tensors, 0)
    assert disk.weights_hash() == synced.weights_hash() == hashes(tensors)
    ours, theirs = disk._worker.model.state_dict(), synced._worker.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# BR-006
def test_a_bfloat16_engine_rounds_a_wider_checkpoint_and_keeps_the_router_in_fp32():
    engine = Engine(model_config(RAW), EngineConfig(num_pages=16, dtype="bfloat16"))
    engine.load_weights(weights(0).items(), 0)
    layout = {slot.name: slot for slot in engine.weight_layout()}
    fp32 = {name for name, slot in layout.items() if slot.dtype == "float32"}
    gate = "model.layers.{}.block_sparse_moe.{}"
    assert fp32 == {
        gate.format(layer, name)
        for layer in (1, 2, 3)
        for name in ("gate.weight", "e_score_correction_bias")
    }
    assert engine.weights_hash() == hashes(
        {name: tensor if name in fp32 else tensor.bfloat16() for name, tensor in weights(0).items()}
    )


# BR-006
def test_the_correction_bias_arrives_in_full_and_chooses():
    engine = make_engine(capture_routing=True)
    tensors = dict(weights(0))
    bias = torch.tensor([0.1234567, 0, 0, 10, 0, 0, 0, 0])
    for layer in (1, 2, 3):
        tensors[f"model.layers.{layer}.block_sparse_moe.e_score_correction_bias"] = bias
    sync(engine, tensors, 1)
    assert engine.weights_hash() == hashes(tensors)
    (output,) = run(engine, [Request("r", prompt(9), greedy(4, routing=True))])
    assert (output.routing == 3).any(-1).all()


# BR-003
def test_a_refused_first_write_leaves_the_old_weights_serving():
    engine = make_engine()
    before = engine.weights_hash()
    name = "model.layers.1.block_sparse_moe.experts.0.w1.weight"
    blocked = weights(1)[name].reshape(2, 8, 2, 16)  # a kernel's own 4-D layout
    engine.begin_load(1)
    with pytest.raises(WeightLoadError, match=r"shape \(2, 8, 2, 16\)"):
        engine.write(name, ((0, 16), (0, 32)), blocked)
    assert engine.version == 0
    assert engine.weights_hash() == before
    (output,) = run(engine, [Request("r", prompt(9), greedy(8))])
    assert_same(output, run_alone(prompt(9), greedy(8)))


def poisoned_engine():
    engine = make_engine()
    name = "model.embed_tokens.weight"
    engine.begin_load(1)
    engine.write(name, whole(weights(1)[name]), weights(1)[name])
    with pytest.raises(WeightLoadError, match="overlap"):
        engine.write(name, ((3, 4), (0, 32)), weights(1)[name][3:4])
    return engine


def test_a_load_that_breaks_off_later_poisons_the_engine_until_a_whole_load():
    engine = poisoned_engine()
    assert engine.version is None
    for call in (lambda: engine.add(Request("r", [5])), engine.step, engine.resume):
        with pytest.raises(EngineStateError, match="POISONED"):
            call()
    with pytest.raises(EngineStateError, match="without an open load"):
        engine.commit()
    sync(engine, weights(1), 1)
    (output,) = run(engine, [Request("r", prompt(9), greedy(8))])
    assert_same(output, run_alone(prompt(9), greedy(8), seed=1))


def test_running_requests_survive_a_poisoned_engine():
    engine = make_engine()
    engine.add(Request("r", prompt(9), sampled(10, seed=3)))
    for _ in range(4):
        engine.step()
    engine.pause("recompute")
    engine.begin_load(1)
    with pytest.raises(WeightLoadError, match="are not whole"):
        write_some(engine)
    assert not engine.has_work
    sync(engine, weights(0), 2)
    engine.resume()
    output = step_to_end(engine)["r"]
    assert_same(output, run_alone(prompt(9), sampled(10, seed=3)))
    assert output.version_spans.tolist() == [[0, 0], [4, 2]]


def write_all(engine, tensors):
    for name, tensor in tensors.items():
        engine.write(name, whole(tensor), tensor)


def write_some(engine):
    write_all(engine, dict(list(weights(1).items())[:-2]))
    engine.commit()


def test_a_commit_names_the_tensors_that_are_not_whole():
    engine = empty_engine()
    engine.begin_load(5)
    with pytest.raises(
        WeightLoadError,
        match=r"2 tensors of version 5 are not whole: model\.norm\.weight \(0 of 32 elements "
        r"written\), lm_head\.weight \(0 of 3104 elements written\); the engine is POISONED",
    ):
        write_some(engine)


def test_an_error_of_the_source_poisons_too():
    def broken():
        yield "model.norm.weight", weights(1)["model.norm.weight"]
        raise OSError("truncated file")

    engine = make_engine()
    with pytest.raises(OSError, match="truncated file"):
        engine.load_weights(broken(), 1)
    assert engine.version is None


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model.norm.weight", lambda t: t.bfloat16(), "is bfloat16, the engine holds float32"),
        ("model.norm.weights", lambda t: t, "is no tensor of this model"),
        ("model.norm.weight", lambda t: t[:-1], r"has shape \(31,\)"),
    ],
)
def test_a_write_never_converts_or_guesses(name, change, message):
    engine = make_engine()
    tensor = weights(1)["model.norm.weight"]
    engine.begin_load(1)
    with pytest.raises(WeightLoadError, match=message):
        engine.write(name, whole(tensor), change(tensor))


# BR-008
def test_a_second_load_is_told_of_the_one_that_is_open():
    engine = make_engine()
    engine.begin_load(1)
    with pytest.raises(EngineStateError, match="load of version 1 is still open; commit or abort"):
        engine.begin_load(2)
    write_all(engine, weights(1))
    engine.commit()
    assert engine.version == 1


def test_a_load_given_up_after_a_write_must_be_whole_again():
    engine = make_engine()
    engine.begin_load(1)
    write_all(engine, dict(list(weights(1).items())[:-1]))
    engine.abort_load()
    assert engine.version is None
    engine.begin_load(1)
    name = "lm_head.weight"
    engine.write(name, whole(weights(1)[name]), weights(1)[name])
    with pytest.raises(WeightLoadError, match="are not whole"):
        engine.commit()
    sync(engine, weights(1), 2)
    assert engine.weights_hash() == hashes(weights(1))


def test_a_load_given_up_before_its_first_write_leaves_the_old_weights():
    engine = make_engine()
    engine.abort_load()
    engine.begin_load(1)
    engine.abort_load()
    assert engine.version == 0
    (output,) = run(engine, [Request("r", prompt(9), greedy(4))])
    assert_same(output, run_alone(prompt(9), greedy(4)))


def test_a_version_is_a_number_from_0():
    with pytest.raises(WeightLoadError, match="version=-1"):
        make_engine().begin_load(-1)


def test_a_load_wants_running_requests_paused():
    engine = make_engine()
    engine.add(Request("r", prompt(9), greedy(4)))
    with pytest.raises(EngineStateError, match=r"1 requests are under way; pause\(\)"):
        engine.begin_load(1)
    with pytest.raises(EngineStateError, match="write without an open load"):
        engine.write("model.norm.weight", ((0, 32),), weights(1)["model.norm.weight"])


# BR-010
@pytest.mark.parametrize("mode", [None, "drain", "keep", "recompute"])
def test_the_first_request_after_an_update_finds_nothing_cached(mode):
    """A prompt of 3 full pages, generated before and after; also with a request in flight."""
    engine = make_engine()
    run(engine, [Request("before", prompt(12), greedy(4))])
    if mode is not None:
        engine.add(Request("flying", prompt(12), sampled(9, seed=1)))
        for _ in range(3):
            engine.step()
        engine.pause(mode)
    tensors = dict(weights(0))
    key = "model.layers.0.self_attn.v_proj.weight"
    tensors[key] = tensors[key] * 2
    sync(engine, tensors, 1)
    engine.resume()
    cold = empty_engine()
    sync(cold, tensors, 1)
    (expected,) = run(cold, [Request("r", prompt(12), greedy(6))])
    (output,) = run(engine, [Request("after", prompt(12), greedy(6))])
    assert output.num_cached_tokens == 0
    assert_same(output, expected)
    (again,) = run(engine, [Request("again", prompt(12), greedy(6))])
    assert again.num_cached_tokens == 8
    assert_same(again, expected)


# BR-012
def test_no_page_is_taken_from_pause_to_resume():
    engine = make_engine()
    engine.add(Request("r", prompt(9), sampled(10, seed=3)))
    for _ in range(3):
        engine.step()
    engine.pause("keep")
    pool = engine._scheduler.pool
    allocate, owned = pool.allocate, pool.num_owned
    pool.allocate = None
    engine.add(Request("late", prompt(9), greedy(2)))
    assert engine.step() == []
    engine.begin_load(1)
    for name, tensor in weights(1).items():
        engine.write(name, whole(tensor), tensor)
        assert not engine.has_work
        assert engine.step() == []
    engine.commit()
    assert pool.num_owned == owned
    pool.allocate = allocate
    engine.resume()
    assert set(step_to_end(engine)) == {"r", "late"}


def test_a_computation_while_loading_is_refused():
    engine = make_engine()
    engine.begin_load(1)
    engine.add(Request("r", prompt(9), greedy(2)))
    assert not engine.has_work
    with pytest.raises(EngineStateError, match="LOADING"):
        engine.step()


# BR-016
@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_requests_in_flight_go_on_with_the_new_version_and_say_so(mode):
    engine = make_engine()
    requests = [Request(f"r{i}", prompt(6, seed=i), sampled(10, seed=i), "g" * i) for i in range(4)]
    for request in requests:
        engine.add(request)
    for _ in range(4):
        engine.step()
    engine.pause(mode)
    sync(engine, weights(1), 5)
    engine.resume()
    outputs = step_to_end(engine)
    for request in requests:
        output = outputs[request.request_id]
        assert output.finish_reason == "length"
        assert output.version_spans.tolist() == [[0, 0], [4, 5]]
        old = run_alone(request.prompt_ids.tolist(), request.params)
        assert output.token_ids[:4].tolist() == old.token_ids[:4].tolist()


def test_recomputed_requests_continue_as_if_the_new_version_had_read_everything():
    engine = make_engine()
    engine.add(Request("r", prompt(9), sampled(10, seed=3)))
    for _ in range(4):
        engine.step()
    engine.pause("recompute")
    sync(engine, weights(1), 1)
    engine.resume()
    output = step_to_end(engine)["r"]
    # The seed's noise belongs to the position, so token 4 is drawn as for a prompt of 9 + 4 tokens.
    seen = [*prompt(9), *output.token_ids[:4].tolist()]
    expected = run_alone(seen, sampled(6, seed=3), seed=1)
    assert output.token_ids[4:].tolist() == expected.token_ids.tolist()
    np.testing.assert_allclose(output.logprobs[4:], expected.logprobs, rtol=0, atol=1e-5)


def test_kept_requests_still_read_the_keys_of_the_old_version():
    outputs = {}
    for mode in ("keep", "recompute"):
        engine = make_engine()
        engine.add(Request("r", prompt(9), sampled(10, seed=3)))
        for _ in range(4):
            engine.step()
        engine.pause(mode)
        sync(engine, weights(1), 1)
        engine.resume()
        outputs[mode] = step_to_end(engine)["r"]
    gap = outputs["keep"].logprobs[4] - outputs["recompute"].logprobs[4]
    assert abs(gap) > 1e-3


# BR-010
def test_a_group_that_grows_after_an_update_shares_nothing_old():
    engine = make_engine()
    engine.add(Request("old", prompt(14), sampled(12, seed=1), "g"))
    for _ in range(3):
        engine.step()
    engine.pause("keep")
    sync(engine, weights(1), 1)
    engine.resume()
    for i in (2, 3):
        engine.add(Request(f"new{i}", prompt(14), sampled(5, seed=i), "g"))
    outputs = step_to_end(engine)
    assert [outputs[f"new{i}"].num_cached_tokens for i in (2, 3)] == [0, 12]
    for i in (2, 3):
        assert_same(outputs[f"new{i}"], run_alone(prompt(14), sampled(5, seed=i), seed=1))
