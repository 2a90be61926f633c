"""The name map against lists by hand, the release and transformers; files good and bad."""

import errno
import json
import logging
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from inference.kernels.mxfp8 import MXFP8Tensor, quantize
from inference.models.weights import (
    CheckpointError,
    published_tensors,
    read_checkpoint,
    transformers_placement,
    write_checkpoint,
)
from tests.released_model import released_config
from tests.tiny_models import model_config, random_checkpoint, random_tensors, tiny_config

SMALL = tiny_config(
    num_hidden_layers=2,
    hidden_size=10,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=4,
    intermediate_size=5,
    dense_intermediate_size=7,
    shared_intermediate_size=9,
    num_local_experts=2,
    num_experts_per_tok=1,
    vocab_size=11,
)
EVERY_LAYER = [
    ("input_layernorm.weight", [10]),
    ("self_attn.q_proj.weight", [24, 10]),
    ("self_attn.k_proj.weight", [12, 10]),
    ("self_attn.v_proj.weight", [12, 10]),
    ("self_attn.o_proj.weight", [10, 24]),
    ("self_attn.q_norm.weight", [4]),
    ("self_attn.k_norm.weight", [4]),
    ("post_attention_layernorm.weight", [10]),
]
DENSE_LAYER = [
    ("mlp.gate_proj.weight", [7, 10]),
    ("mlp.up_proj.weight", [7, 10]),
    ("mlp.down_proj.weight", [10, 7]),
]
SPARSE_LAYER = [
    ("self_attn.index_q_proj.weight", [12, 10]),
    ("self_attn.index_k_proj.weight", [4, 10]),
    ("self_attn.index_q_norm.weight", [4]),
    ("self_attn.index_k_norm.weight", [4]),
    ("block_sparse_moe.gate.weight", [2, 10]),
    ("block_sparse_moe.e_score_correction_bias", [2]),
    ("block_sparse_moe.experts.0.w1.weight", [5, 10]),
    ("block_sparse_moe.experts.0.w2.weight", [10, 5]),
    ("block_sparse_moe.experts.0.w3.weight", [5, 10]),
    ("block_sparse_moe.experts.1.w1.weight", [5, 10]),
    ("block_sparse_moe.experts.1.w2.weight", [10, 5]),
    ("block_sparse_moe.experts.1.w3.weight", [5, 10]),
    ("block_sparse_moe.shared_experts.gate_proj.weight", [9, 10]),
    ("block_sparse_moe.shared_experts.up_proj.weight", [9, 10]),
    ("block_sparse_moe.shared_experts.down_proj.weight", [10, 9]),
]


def test_published_names_and_shapes_are_these():
    expected = {"model.embed_tokens.weight": [11, 10], "model.norm.weight": [10]}
    expected["lm_head.weight"] = [11, 10]
    for layer, own in enumerate((DENSE_LAYER, SPARSE_LAYER)):
        expected |= {f"model.layers.{layer}.{name}": shape for name, shape in EVERY_LAYER + own}
    specs = published_tensors(model_config(SMALL))
    assert len(specs) == len(expected)
    assert {spec.name: list(spec.shape) for spec in specs} == expected


def test_buckets_follow_the_forward_pass_and_roles_mark_what_is_special():
    specs = published_tensors(model_config(SMALL))
    assert list(dict.fromkeys(s.bucket for s in specs)) == ["pre", "layer.0", "layer.1", "post"]
    assert [s.name for s in specs if s.bucket == "post"] == ["model.norm.weight", "lm_head.weight"]
    by_role = {role: {s.name for s in specs if s.role == role} for role in ("router", "index")}
    moe, attention = "model.layers.1.block_sparse_moe", "model.layers.1.self_attn"
    assert by_role["router"] == {f"{moe}.gate.weight", f"{moe}.e_score_correction_bias"}
    assert by_role["router"] == {s.name for s in specs if s.is_fp32}
    parts = ("q_proj", "k_proj", "q_norm", "k_norm")
    assert by_role["index"] == {f"{attention}.index_{part}.weight" for part in parts}
    assert sum(s.role == "expert" for s in specs) == 6


def test_the_released_model_has_the_tensors_and_parameters_of_its_inventory():
    config = model_config(released_config())
    specs = published_tensors(config)
    assert len(specs) == 23_416 - 523  # the vision tower and projectors have 523
    total = sum(torch.Size(spec.shape).numel() for spec in specs)
    assert total == 427_040_140_160 - 631_185_920 - 234_381_312
    assert total == config.num_parameters
    experts = sum(torch.Size(s.shape).numel() for s in specs if s.role == "expert")
    assert experts == 413_122_166_784
    assert sum(torch.Size(s.shape).numel() for s in specs if s.role == "index") == 224_147_712
    assert sum(torch.Size(s.shape).numel() for s in specs if s.role == "router") == 44_833_920


def test_transformers_loads_a_written_checkpoint_into_the_places_we_name(tmp_path):
    from transformers import MiniMaxM3SparseForConditionalGeneration

    config_dict = tiny_config()
    tensors = random_checkpoint(tmp_path, config_dict, seed=3)
    content = json.loads((tmp_path / "config.json").read_text())
    content["vision_config"] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    content["projector_hidden_size"] = 32
    (tmp_path / "config.json").write_text(json.dumps(content))
    model, report = MiniMaxM3SparseForConditionalGeneration.from_pretrained(
        tmp_path, output_loading_info=True
    )
    state = {
        name.replace("model.language_model.", "model."): tensor
        for name, tensor in model.state_dict().items()
    }
    assert not [name for name in report["missing_keys"] if "language_model" in name]
    for name, place in transformers_placement(model_config(config_dict)).items():
        assert torch.equal(place.view(state), tensors[name]), name


@pytest.mark.parametrize("prefix", ["", "language_model."])
@pytest.mark.parametrize("max_shard_bytes", [1 << 40, 20_000])
def test_what_is_written_is_read_back_bit_for_bit(tmp_path, prefix, max_shard_bytes):
    config_dict = tiny_config()
    tensors = random_checkpoint(
        tmp_path, config_dict, 0, prefix, torch.bfloat16, max_shard_bytes=max_shard_bytes
    )
    config = model_config(config_dict)
    names = []
    for name, tensor in read_checkpoint(tmp_path, config):
        names.append(name)
        assert tensor.dtype == tensors[name].dtype
        assert torch.equal(tensor, tensors[name])
    assert names == [spec.name for spec in published_tensors(config)]
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 1 or all(file.stat().st_size < 20_000 + 10_000 for file in files)
    stored = {name for file in files for name in load_file(file)}
    assert stored == {prefix + name for name in tensors}


def test_vision_and_mtp_tensors_are_skipped_with_one_notice(tmp_path, caplog):
    tensors = random_tensors(SMALL, seed=0)
    foreign = {
        "vision_tower.vision_model.pre_layrnorm.weight": torch.zeros(3),
        "multi_modal_projector.linear_1.bias": torch.zeros(3),
        "patch_merge_mlp.linear_2.weight": torch.zeros(3, 3),
        "language_model.model.mtp.0.norm.weight": torch.zeros(3),
    }
    prefixed = {"language_model." + name: tensor for name, tensor in tensors.items()}
    write_checkpoint(tmp_path, {**prefixed, **foreign}.items(), max_shard_bytes=1 << 30)
    with caplog.at_level(logging.INFO, logger="inference"):
        read = dict(read_checkpoint(tmp_path, model_config(SMALL)))
    assert read.keys() == tensors.keys()
    notices = [record.getMessage() for record in caplog.records]
    assert notices == ["skipped 3 vision and 1 MTP tensors: text only"]


def test_views_of_a_fused_parameter_can_be_written(tmp_path):
    fused = torch.arange(24.0).view(6, 4)
    parts = {"a": fused[:2], "b": fused[2:], "c": fused[:, 1:3]}
    write_checkpoint(tmp_path, parts.items(), max_shard_bytes=1 << 30)
    stored = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(stored[name], part) for name, part in parts.items())


def write_small(path, changes=None, prefix=""):
    """A checkpoint of SMALL with some tensors replaced, or removed by None."""
    tensors = {**random_tensors(SMALL, seed=0), **(changes or {})}
    kept = {prefix + name: tensor for name, tensor in tensors.items() if tensor is not None}
    write_checkpoint(path, kept.items(), max_shard_bytes=1 << 30)


MOE = "model.layers.1.block_sparse_moe"


# BR-006
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{MOE}.e_score_correction_bias": None}, r"lacks 1 of the 37 .* is .*correction_bias"),
        ({"model.layers.1.mlp.gate.weight": torch.zeros(2, 10)}, r"safetensors: .*mlp.gate.weight"),
        ({"model.norm.weight": torch.zeros(11)}, r"model.norm.weight has shape \[11\].*\[10\]"),
        ({"lm_head.weight": torch.zeros(11, 10).byte()}, r"lm_head.weight is stored as U8"),
        (
            {"language_model.model.norm.weight": torch.zeros(10)},
            r"model.norm.weight is stored with and without",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(tmp_path, changes, message):
    write_small(tmp_path, changes)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(tmp_path, model_config(SMALL))


def test_a_quantised_checkpoint_is_refused_by_name(tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    write_small(tmp_path, {name: torch.zeros(7, 10).to(torch.float8_e4m3fn)})
    with pytest.raises(CheckpointError, match=rf"{name} is stored as F8_E4M3.*unquantised"):
        read_checkpoint(tmp_path, model_config(SMALL))


QUANTIZABLE = tiny_config(
    num_hidden_layers=2,
    num_local_experts=2,
    intermediate_size=64,
    dense_intermediate_size=32,
    shared_intermediate_size=32,
)
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"  # [64, 32]
W2 = f"{MOE}.experts.1.w2.weight"  # [32, 64]


def write_quantized(path, changes=None, names=(Q_PROJ, W2)):
    """A checkpoint of QUANTIZABLE with `names` in MXFP8, then with `changes`; None removes."""
    tensors = random_tensors(QUANTIZABLE, 0, torch.bfloat16)
    for name in names:
        tensors[name], tensors[f"{name}_scale_inv"] = quantize(tensors[name])
    tensors |= changes or {}
    kept = {"language_model." + name: t for name, t in tensors.items() if t is not None}
    write_checkpoint(path, kept.items(), max_shard_bytes=1 << 30)


def test_mxfp8_tensors_are_read_with_their_scales_where_they_are_wanted(tmp_path):
    write_quantized(tmp_path)
    read = dict(read_checkpoint(tmp_path, model_config(QUANTIZABLE), allow_mxfp8=True))
    plain = random_tensors(QUANTIZABLE, 0, torch.bfloat16)
    assert list(read) == list(plain)
    for name, tensor in plain.items():
        if name not in (Q_PROJ, W2):
            assert torch.equal(read[name], tensor)
            continue
        assert isinstance(read[name], MXFP8Tensor)
        for found, expected in zip(read[name], quantize(tensor), strict=True):
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


SCALE = f"{W2}_scale_inv"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({SCALE: None}, rf"{W2} is stored as F8_E4M3 and its scales .*{SCALE} are missing"),
        # Blocks of 128 x 128 with FP32 scales, as in other FP8 checkpoints.
        ({SCALE: torch.ones(1, 1)}, rf"{SCALE} is F32 \[1, 1\]; scales of MXFP8 are U8 \[32, 2\]"),
        ({SCALE: torch.ones(32, 4).byte()}, rf"{SCALE} is U8 \[32, 4\]"),
        ({SCALE: torch.ones(32, 2)}, rf"{SCALE} is F32 \[32, 2\]"),
        ({W2: torch.zeros(32, 64).bfloat16()}, rf"{SCALE} are scales of a weight .* as BF16"),
        ({W2: torch.zeros(32, 64).to(torch.float8_e5m2)}, rf"{W2} is stored as F8_E5M2; only"),
        (
            {"lm_head.weight": torch.zeros(97, 32).to(torch.float8_e4m3fn)},
            r"lm_head.weight is stored as F8_E4M3; no MXFP8 checkpoint quantises it",
        ),
        ({f"{W2}_scale": torch.ones(32, 2).byte()}, rf"{W2}_scale is no tensor of the model"),
    ],
)
def test_scales_that_are_missing_or_of_another_format_are_named(tmp_path, changes, message):
    write_quantized(tmp_path, changes)
    with pytest.raises(CheckpointError, match=rf"model.safetensors: language_model.{message}"):
        read_checkpoint(tmp_path, model_config(QUANTIZABLE), allow_mxfp8=True)


@pytest.mark.parametrize(
    ("name", "byte", "message"),
    [
        (W2, 0x7F, "holds NaN"),
        (W2, 0xFF, "holds NaN"),
        (SCALE, 255, "holds the byte 255; one above 134 means NaN"),
        (SCALE, 135, "holds the byte 135"),
    ],
)
def test_bytes_that_cannot_be_served_are_named_when_they_are_read(tmp_path, name, byte, message):
    stored = quantize(random_tensors(QUANTIZABLE, 0, torch.bfloat16)[W2])
    changes = {W2: stored.values, SCALE: stored.scale}
    changes[name].view(torch.uint8)[3, 1] = byte
    write_quantized(tmp_path, changes)
    with pytest.raises(CheckpointError, match=f"{name} {message}"):
        dict(read_checkpoint(tmp_path, model_config(QUANTIZABLE), allow_mxfp8=True))


def test_a_router_stored_in_bf16_is_read_with_a_warning(tmp_path, caplog):
    weight = torch.ones(2, 10).bfloat16()
    write_small(tmp_path, {f"{MOE}.gate.weight": weight})
    read = dict(read_checkpoint(tmp_path, model_config(SMALL)))
    assert torch.equal(read[f"{MOE}.gate.weight"], weight)
    assert "gate.weight is stored as BF16, not FP32" in caplog.text


# BR-049
def test_a_truncated_file_is_found_before_any_tensor_is_read(tmp_path):
    write_small(tmp_path)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    for size, message in ((len(content) - 1, r"truncated: .* ends at byte"), (100, "header")):
        file.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=message):
            read_checkpoint(tmp_path, model_config(SMALL))
    file.write_bytes(b"\x10" + bytes(7) + b"not a header at all")
    with pytest.raises(CheckpointError, match="is not a safetensors file"):
        read_checkpoint(tmp_path, model_config(SMALL))


def test_shards_and_index_must_agree(tmp_path):
    config = model_config(SMALL)
    with pytest.raises(CheckpointError, match="is not a directory"):
        read_checkpoint(tmp_path / "nowhere", config)
    with pytest.raises(CheckpointError, match="no safetensors file"):
        read_checkpoint(tmp_path, config)
    random_checkpoint(tmp_path, SMALL, seed=0, max_shard_bytes=2000)
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    shards = sorted(set(weight_map.values()))
    assert len(shards) >= 3

    strange = {**weight_map, "language_model.model.extra": shards[0]}
    index.write_text(json.dumps({"weight_map": strange}))
    with pytest.raises(CheckpointError, match=rf"{shards[0]} lacks language_model.model.extra"):
        read_checkpoint(tmp_path, config)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="not an index with a weight_map"):
        read_checkpoint(tmp_path, config)
    index.unlink()
    with pytest.raises(CheckpointError, match=r"files but no model.safetensors.index.json"):
        read_checkpoint(tmp_path, config)
    index.write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / shards[-1]).unlink()
    with pytest.raises(CheckpointError, match=rf"{shards[-1]} does not exist"):
        read_checkpoint(tmp_path, config)


def test_writing_refuses_a_used_directory_a_repeated_name_and_nothing(tmp_path):
    one = torch.zeros(4)
    with pytest.raises(CheckpointError, match="no tensor to write"):
        write_checkpoint(tmp_path / "empty", [], max_shard_bytes=100)
    for size in (16, 100):  # the repetition falls into another shard, or the same
        with pytest.raises(CheckpointError, match="w was given twice"):
            write_checkpoint(tmp_path / f"{size}", [("w", one), ("w", one)], max_shard_bytes=size)
    save_file({"old": one}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"already holds model.safetensors; write into"):
        write_checkpoint(tmp_path, [("w", one)], max_shard_bytes=100)


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("inference.models.checkpoint.save_file", full)
    with pytest.raises(CheckpointError, match=r"cannot write .*safetensors: .*No space left"):
        write_checkpoint(tmp_path, [("w", torch.zeros(4))], max_shard_bytes=100)
