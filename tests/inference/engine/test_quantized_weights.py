"""Weights held in MXFP8: the quantiser's bytes however they come, and the numbers they mean."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from inference.config import ConfigError, EngineConfig
from inference.engine import Engine, Request, WeightLoadError
from inference.kernels import mxfp8
from inference.kernels.mxfp8 import MXFP8Tensor
from inference.kernels.tensor_hash import tensor_hash
from inference.models.weights import published_tensors
from inference.quantize import quantize_checkpoint
from tests.inference.engine.engines import greedy, poison_pages, prompt, run
from tests.tiny_models import model_config, random_checkpoint, random_tensors, tiny_config

RAW = tiny_config(
    intermediate_size=64,
    dense_intermediate_size=96,
    shared_intermediate_size=32,
    num_hidden_layers=3,
    num_local_experts=4,
)
CONFIG = model_config(RAW)
SPECS = {spec.name: spec for spec in published_tensors(CONFIG)}
SCOPES = ["mxfp8", "mxfp8_released"]
EXPERT = "model.layers.1.block_sparse_moe.experts.2.w1.weight"


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    return random_tensors(RAW, seed, torch.bfloat16)


def engine(quantization: str, dtype: str = "float32") -> Engine:
    made = Engine(CONFIG, EngineConfig(num_pages=32, dtype=dtype, quantization=quantization))
    poison_pages(made)
    return made


def loaded(quantization: str, tensors, dtype: str = "float32") -> Engine:
    made = engine(quantization, dtype)
    made.load_weights(tensors.items(), 0)
    return made


def as_mxfp8(tensors, quantization: str):
    """What a checkpoint of this scope holds."""
    return {
        name: mxfp8.quantize(tensor) if SPECS[name].is_quantized(quantization) else tensor
        for name, tensor in tensors.items()
    }


def widened(tensors, quantization: str):
    """The dequantised weights."""
    return {
        name: mxfp8.dequantize(*tensor, torch.float32)
        if isinstance(tensor, MXFP8Tensor)
        else tensor
        for name, tensor in as_mxfp8(tensors, quantization).items()
    }


def completions(made: Engine):
    requests = [Request(f"r{i}", prompt(9 + i, seed=i), greedy(12)) for i in range(3)]
    return run(made, requests)


def assert_same_state(one: Engine, other: Engine) -> None:
    ours, theirs = one._worker.model.state_dict(), other._worker.model.state_dict()
    for name, tensor in ours.items():
        assert torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8)), name
    assert one.weights_hash() == other.weights_hash()


@pytest.mark.parametrize("quantization", SCOPES)
def test_a_quantised_engine_says_what_an_engine_of_the_dequantised_weights_says(quantization):
    quantised = completions(loaded(quantization, weights()))
    plain = completions(loaded("none", widened(weights(), quantization)))
    rounded = completions(loaded("none", weights()))
    for ours, theirs in zip(quantised, plain, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=0, atol=1e-5)
    gap = max(
        np.abs(a.logprobs[:1] - b.logprobs[:1]).max()
        for a, b in zip(quantised, rounded, strict=True)
    )
    assert gap > 1e-3  # quantising is seen


@pytest.mark.parametrize("quantization", SCOPES)
def test_only_what_the_scope_names_is_quantised(quantization):
    layout = {slot.name: slot for slot in engine(quantization).weight_layout()}
    found = {name for name, slot in layout.items() if slot.storage == "mxfp8"}
    experts = {name for name in SPECS if ".experts." in name}
    projections = {name for name in SPECS if name.endswith("_proj.weight")}
    assert found == (experts if quantization == "mxfp8" else experts | projections)
    assert len(projections) == 4 * 3 + 2 * 2 + 3 * 3
    assert {layout[name].dtype for name in found} == {"bfloat16"}
    state = engine(quantization)._worker.model.state_dict()
    for name, tensor in state.items():
        is_scale, has_scale = name.endswith("_scale"), f"{name}_scale" in state
        expected = torch.uint8 if is_scale else torch.float8_e4m3fn if has_scale else torch.float32
        assert tensor.dtype == expected, name


def pieces(tensor, row_cuts: int, column_cuts: int):
    """Rectangles whose columns are cut at multiples of 32 or not at all."""
    rows = sorted({tensor.shape[0] * i // row_cuts for i in range(row_cuts + 1)})
    columns = [0, *range(32, tensor.shape[-1], 32), tensor.shape[-1]] if column_cuts else None
    if tensor.ndim == 1:
        return [(pair,) for pair in itertools.pairwise(rows)]
    columns = columns or [0, tensor.shape[1]]
    return list(itertools.product(itertools.pairwise(rows), itertools.pairwise(columns)))


# BR-001
@pytest.mark.parametrize("quantization", SCOPES)
def test_offline_on_receive_and_shard_by_shard_are_the_same_bytes(tmp_path, quantization):
    tensors = random_checkpoint(tmp_path / "bf16", RAW, seed=3, dtype=torch.bfloat16)
    scope = {"mxfp8": "experts", "mxfp8_released": "released"}[quantization]
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "mxfp8", scope=scope)
    options = EngineConfig(num_pages=16, dtype="bfloat16", quantization=quantization)
    offline = Engine.from_pretrained(tmp_path / "mxfp8", options)
    received = Engine.from_pretrained(tmp_path / "bf16", options)
    assert_same_state(received, offline)
    for row_cuts, column_cuts in ((1, 1), (3, 0), (5, 1)):
        sharded = engine(quantization, "bfloat16")
        writes = [(n, b) for n, t in tensors.items() for b in pieces(t, row_cuts, column_cuts)]
        sharded.begin_load(0)
        for i in np.random.default_rng(row_cuts).permutation(len(writes)):
            name, bounds = writes[i]
            part = tensors[name][tuple(slice(start, stop) for start, stop in bounds)]
            sharded.write(name, bounds, part)
        sharded.commit()
        assert_same_state(sharded, offline)


@pytest.mark.parametrize("quantization", ["none", *SCOPES])
@pytest.mark.parametrize("stored", SCOPES)
def test_an_engine_takes_a_checkpoint_of_any_scope(tmp_path, quantization, stored):
    """It holds what its own scope names, with the values that the checkpoint means."""
    random_checkpoint(tmp_path / "bf16", RAW, seed=4, dtype=torch.bfloat16)
    scope = {"mxfp8": "experts", "mxfp8_released": "released"}[stored]
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "mxfp8", scope=scope)
    options = EngineConfig(num_pages=16, dtype="bfloat16", quantization=quantization)
    made = Engine.from_pretrained(tmp_path / "mxfp8", options)
    given, meant = as_mxfp8(weights(4), stored), widened(weights(4), stored)
    assert_same_state(made, loaded(quantization, given, "bfloat16"))
    for name, view in made._worker.weights.views.items():
        is_held = SPECS[name].is_quantized(quantization)
        assert isinstance(view, MXFP8Tensor) == is_held
        if not is_held:
            assert torch.equal(view.float(), meant[name].float()), name
        elif SPECS[name].is_quantized(stored):
            for part, expected in zip(view, given[name], strict=True):
                assert torch.equal(part.view(torch.uint8), expected.view(torch.uint8)), name


def test_a_hash_is_that_of_the_bytes_that_are_stored():
    made = loaded("mxfp8", weights(1))
    hashes = made.weights_hash()
    assert hashes.keys() == SPECS.keys()
    values, scale = mxfp8.quantize(weights(1)[EXPERT])
    parts = tensor_hash(values, name=EXPERT) + tensor_hash(scale, name=f"{EXPERT}_scale_inv")
    assert hashes[EXPERT] == parts % 2**64
    assert hashes["lm_head.weight"] == tensor_hash(
        weights(1)["lm_head.weight"].float(), name="lm_head.weight"
    )
    flipped = made._worker.model.state_dict()["layers.1.mlp.experts.w13_scale"]
    flipped[2, 0, 0] ^= 1
    assert {n for n, h in made.weights_hash().items() if h != hashes[n]} == {EXPERT}


def test_storage_stays_where_it_was_through_a_second_load():
    made = loaded("mxfp8_released", weights(0))
    before = {n: t.data_ptr() for n, t in made._worker.model.state_dict().items()}
    made.load_weights(weights(1).items(), 1)
    assert {n: t.data_ptr() for n, t in made._worker.model.state_dict().items()} == before
    assert_same_state(made, loaded("mxfp8_released", weights(1)))


def open_load() -> Engine:
    made = loaded("mxfp8", weights())
    made.begin_load(1)
    return made


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 60000.0])
def test_weights_that_cannot_be_served_are_refused_by_name(bad):
    tensors = weights(1)
    tensors[EXPERT][5, 40 % 32] = bad
    made = loaded("mxfp8", weights())
    with pytest.raises(WeightLoadError, match=rf"1 tensors of version 1 hold NaN.*: {EXPERT};"):
        made.load_weights(tensors.items(), 1)
    assert made.version is None
    made.load_weights(weights(1).items(), 2)
    assert made.version == 2


def test_nan_in_given_values_and_scales_is_refused_by_name():
    values, scale = mxfp8.quantize(weights()[EXPERT])
    whole = tuple((0, size) for size in values.shape)
    damaged = values.view(torch.uint8).clone()
    damaged[3, 3] = 0xFF
    with pytest.raises(WeightLoadError, match=f"{EXPERT}: the MXFP8 values at .* hold NaN"):
        open_load().write(EXPERT, whole, MXFP8Tensor(damaged.view(torch.float8_e4m3fn), scale))
    tensors = as_mxfp8(weights(), "mxfp8")
    tensors[EXPERT].scale[3, 0] = 255
    with pytest.raises(WeightLoadError, match=rf"hold NaN, Inf or magnitudes .*: {EXPERT};"):
        loaded("mxfp8", tensors)


@pytest.mark.parametrize(
    ("name", "bounds", "change", "message"),
    [
        (EXPERT, ((0, 64), (0, 16)), lambda t: t[:, :16], r"cut a block of 32 that shares a scale"),
        (EXPERT, ((0, 64), (0, 32)), lambda t: t.float(), r"float32, the engine quantises from bf"),
        (
            EXPERT,
            ((0, 64), (0, 32)),
            lambda t: MXFP8Tensor(mxfp8.quantize(t).values, torch.zeros(1, 1)),
            r"scale of the MXFP8 tensor are float32 \(1, 1\), need uint8 \(64, 1\)",
        ),
        (
            "lm_head.weight",
            ((0, 97), (0, 32)),
            lambda t: mxfp8.quantize(t),
            r"the tensor is MXFP8, the engine holds float32; a write never widens",
        ),
    ],
)
def test_a_write_that_does_not_fit_says_why(name, bounds, change, message):
    message = message.replace("bf", "bfloat16")
    with pytest.raises(WeightLoadError, match=message):
        open_load().write(name, bounds, change(weights()[name]))


@pytest.mark.parametrize(
    ("changes", "quantization", "message"),
    [
        ({"intermediate_size": 48}, "mxfp8", "intermediate_size=48 is no multiple of 32"),
        ({"hidden_size": 48}, "mxfp8", "hidden_size=48 is no multiple"),
        ({"shared_intermediate_size": 40}, "mxfp8_released", "shared_intermediate_size=40"),
        ({"dense_intermediate_size": 40}, "mxfp8_released", "dense_intermediate_size=40"),
        ({"num_attention_heads": 2, "head_dim": 24}, "mxfp8_released", r"heads \* head_dim=48"),
        ({}, "fp8", "quantization='fp8'; use one of none, mxfp8, mxfp8_released"),
    ],
)
def test_a_width_that_has_no_whole_blocks_is_refused_with_its_name(changes, quantization, message):
    model = replace(CONFIG, **changes)
    with pytest.raises(ConfigError, match=message):
        EngineConfig(quantization=quantization).resolve(model)


def test_widths_that_a_scope_leaves_alone_need_no_blocks():
    model = replace(CONFIG, shared_intermediate_size=40, dense_intermediate_size=40)
    assert EngineConfig(quantization="mxfp8").resolve(model).quantization == "mxfp8"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("quantization", SCOPES)
def test_on_cuda_a_quantised_engine_agrees_with_one_of_the_dequantised_weights(quantization):
    outputs = []
    tensors = weights()
    tensors["lm_head.weight"] *= 0.1
    for held, given in ((quantization, tensors), ("none", widened(tensors, quantization))):
        config = EngineConfig(num_pages=32, dtype="bfloat16", device="cuda", quantization=held)
        made = Engine(CONFIG, config)
        made.load_weights(given.items(), 0)
        outputs.append(completions(made))
    for ours, theirs in zip(*outputs, strict=True):
        same = np.cumprod(ours.token_ids == theirs.token_ids).astype(bool)
        assert np.abs(ours.logprobs - theirs.logprobs)[same].mean() <= 5e-3
    assert loaded(quantization, tensors, "bfloat16").weights_hash() == made_hash(quantization)


def made_hash(quantization: str) -> dict[str, int]:
    tensors = weights()
    tensors["lm_head.weight"] *= 0.1
    config = EngineConfig(num_pages=8, dtype="bfloat16", device="cuda", quantization=quantization)
    made = Engine(CONFIG, config)
    made.load_weights(tensors.items(), 0)
    return made.weights_hash()
