"""What vLLM would load in silence, and the proof that follows each load finds."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("vllm")

from vllm.model_executor.model_loader.reload import layerwise

from inference.engine.coverage import WeightLoadError
from m3rl.model_layout import whole_layout
from m3rl.rollout.vllm_coverage import CoverageCheck
from m3rl.rollout.vllm_m3 import index_names
from m3rl.rollout.vllm_weights import StagedWeights
from m3rl.types import TensorSlot

Q = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.layers.1.post_attention_layernorm.weight"
MLP = tuple(f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
BIAS = "model.layers.1.block_sparse_moe.e_score_correction_bias"


class Model:
    """The model of a replica's worker, the tensors of its checkpoint, and loads of some of them."""

    def __init__(self, replica, path, exempt=()) -> None:
        self._worker = replica.engine._core.model_executor.driver_worker.worker
        self.module = self._worker.model_runner.get_model()
        self.slots = {slot.name: slot for slot in whole_layout(path, "float32")}
        stored = load_file(path / "model.safetensors").items()
        self.tensors = {name.removeprefix("language_model."): tensor for name, tensor in stored}
        self._exempt = exempt

    def target(self, slots=None) -> StagedWeights:
        """As it is when an engine is new: nothing was loaded through it."""

        def reload(tensors) -> None:
            self._worker.reload_weights(weights_iterator=iter(tensors), is_checkpoint_format=True)

        return StagedWeights(
            list((slots or self.slots).values()),
            torch.device("cpu"),
            reload,
            CoverageCheck(self.module, self._exempt),
        )

    def load(self, target: StagedWeights, version: int) -> None:
        target.begin_load(version)
        for slot in target.weight_layout():
            tensor = self.tensors.get(slot.name, torch.ones(slot.shape))
            target.write(slot.name, slot.bounds, tensor)
        target.commit()

    def without(self, *names: str) -> dict[str, TensorSlot]:
        return {name: slot for name, slot in self.slots.items() if name not in names}


@pytest.fixture
def model(qwen3, qwen3_replica):
    yield Model(qwen3_replica, qwen3 / "1")
    qwen3_replica.load(str(qwen3 / "1"), 99)  # what was left out is there again


@pytest.fixture
def m3_model(m3, m3_replica):
    yield Model(m3_replica, m3 / "1", index_names(str(m3 / "1")))
    m3_replica.load(str(m3 / "1"), 99)


def test_a_whole_model_is_accepted_and_its_tied_head_need_not_come(model):
    assert "lm_head.weight" not in model.slots
    target = model.target()
    model.load(target, 3)
    assert target.version == 3
    model.load(target, 4)
    assert target.version == 4


def test_a_name_that_vllm_skips_in_silence_is_told(model):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    extra = dataclasses.replace(model.slots["model.norm.weight"], name=name)
    target = model.target(model.slots | {name: extra})
    with pytest.raises(WeightLoadError, match=f"1 reached no parameter: {name}"):
        model.load(target, 3)
    assert target.version is None


def test_a_tied_head_that_comes_nevertheless_must_be_the_embedding(model):
    """vLLM loads both into one memory, the head last."""
    embedding = model.slots["model.embed_tokens.weight"]
    head = dataclasses.replace(embedding, name="lm_head.weight")
    target = model.target(model.slots | {"lm_head.weight": head})
    model.tensors["lm_head.weight"] = model.tensors[embedding.name]
    model.load(target, 3)
    assert target.version == 3
    model.tensors["lm_head.weight"] = model.tensors[embedding.name] * 2
    with pytest.raises(WeightLoadError, match=r"^lm_head\.weight and model\.embed_tokens\.w"):
        model.load(target, 4)
    assert target.version is None


def test_a_part_that_is_missing_in_a_fused_parameter_is_told_with_its_elements(model):
    """q is 128 of 256 rows of qkv, 64 columns each."""
    target = model.target(model.without(Q))
    with pytest.raises(WeightLoadError, match=r"qkv_proj\.weight \(8192 of 16384 elements\)"):
        model.load(target, 3)
    assert target.version is None


def test_what_a_layer_declares_as_padding_need_not_come(model, monkeypatch):
    """Half of qkv here: what would be q is zero then, not what lay there."""
    layer = model.module.get_submodule("model.layers.0.self_attn.qkv_proj")
    parameters, _ = layerwise.get_layerwise_info(layer).restore_metadata
    monkeypatch.setattr(parameters["weight"], "weight_loader_numel", 8192, raising=False)
    seen = []
    process = layer.quant_method.process_weights_after_loading
    monkeypatch.setattr(
        layer.quant_method,
        "process_weights_after_loading",
        lambda module: (seen.append(module.weight.clone()), process(module)),
    )
    target = model.target(model.without(Q))
    model.load(target, 3)
    assert target.version == 3
    assert not seen[0][:128].any()
    assert torch.equal(seen[0][128:192], model.tensors[Q.replace("q_proj", "k_proj")])


def test_parameters_to_which_nothing_comes_are_told(model):
    target = model.target(model.without(NORM, *MLP))
    with pytest.raises(WeightLoadError, match="3 received nothing: ") as caught:
        model.load(target, 3)
    for name in ("mlp.gate_up_proj.weight", "mlp.down_proj.weight", "post_attention_layernorm"):
        assert f"model.layers.1.{name}" in str(caught.value)


def test_a_model_that_vllm_does_not_know_is_refused(model):
    name = "model.layers.0.self_attn.gate_of_another_architecture.weight"
    extra = dataclasses.replace(model.slots[Q], name=name)
    target = model.target(model.slots | {name: extra})
    with pytest.raises(ValueError, match="gate_of_another_architecture"):
        model.load(target, 3)
    assert target.version is None


def test_a_later_load_that_takes_less_than_the_first_is_told(model, monkeypatch):
    target = model.target()
    model.load(target, 3)
    load_weights = model.module.load_weights
    some = lambda tensors: load_weights((n, t) for n, t in tensors if n != Q)  # noqa: E731
    monkeypatch.setattr(model.module, "load_weights", some)
    with pytest.raises(WeightLoadError, match=r"qkv_proj \(8192 elements, 16384 in the first"):
        model.load(target, 4)
    assert target.version is None


def test_a_load_that_broke_off_does_not_count_for_the_next(model, monkeypatch):
    """q twice has as many elements as q, k and v: k and v would be left as they were."""
    target = model.target()
    model.load(target, 3)
    load_weights = model.module.load_weights

    def broken(tensors) -> None:
        load_weights(pair for pair in tensors if pair[0] == Q)
        raise RuntimeError("broken off")

    monkeypatch.setattr(model.module, "load_weights", broken)
    with pytest.raises(RuntimeError, match="broken off"):
        model.load(target, 4)
    monkeypatch.undo()
    model.load(target, 5)
    assert target.version == 5


def test_m3s_index_branch_is_exempt_and_nothing_else(m3_model, monkeypatch):
    m3_model.load(m3_model.target(), 3)
    dropped = "model.layers.1.self_attn.k_norm.weight"
    load_weights = m3_model.module.load_weights
    some = lambda tensors: load_weights((n, t) for n, t in tensors if n != dropped)  # noqa: E731
    monkeypatch.setattr(m3_model.module, "load_weights", some)
    with pytest.raises(WeightLoadError, match=f"1 reached no parameter: {dropped}; 1 received"):
        m3_model.load(m3_model.target(), 3)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (BIAS, r"received nothing: model\.layers\.1\.mlp\.gate\.e_score_correction_bias"),
        (
            "model.layers.1.block_sparse_moe.experts.3.w3.weight",
            r"received nothing: model\.layers\.1\.mlp\.experts\.gate_up_proj",
        ),
    ],
)
def test_a_tensor_of_m3_that_is_missing_is_told(m3_model, name, words):
    with pytest.raises(WeightLoadError, match=words):
        m3_model.load(m3_model.target(m3_model.without(name)), 3)


def test_an_exemption_that_is_none_is_told(m3, m3_replica, m3_model):
    wrong = Model(m3_replica, m3 / "1", index_names(str(m3 / "1")) | {BIAS})
    with pytest.raises(WeightLoadError, match=f"have no place in this model, and have: {BIAS}"):
        wrong.load(wrong.target(), 3)
