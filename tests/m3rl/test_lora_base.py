"""The frozen base: experts in MXFP8, files of adapters, the hash that ties them together."""

import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import MiniMaxM3VLForCausalLM, MiniMaxM3VLTextConfig

from inference.kernels.mxfp8 import SCALE_SUFFIX, MXFP8Tensor, dequantize, quantize
from inference.models.weights import read_checkpoint, write_checkpoint
from m3rl.checkpoint import CheckpointError
from m3rl.lora.files import peft_config
from m3rl.lora.policy import LoraPolicy
from tests.m3rl.lora_cases import ALL, CONFIG, LORA, logprobs, make, plain, product, shake
from tests.tiny_models import model_config, random_checkpoint

MXFP8 = replace(LORA, mxfp8_experts=True)
EXPERT = "model.layers.1.block_sparse_moe.experts.{}.{}.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    random_checkpoint(path, CONFIG, seed=0)
    return path


@pytest.fixture(scope="module")
def mxfp8_model(model, tmp_path_factory):
    """The same with experts quantised, scales two binades larger than they need be in one of them:
    not what our own quantiser would write."""
    path = tmp_path_factory.mktemp("mxfp8")
    config = model_config(CONFIG)
    stored = {}
    for name, tensor in read_checkpoint(model, config):
        if ".experts." not in name:
            stored[name] = tensor
            continue
        values, scale = quantize(tensor.bfloat16())
        if name == EXPERT.format(2, "w1"):
            values = (values.float() / 4).to(torch.float8_e4m3fn)
            scale = scale + 2
        stored |= {name: values, name + SCALE_SUFFIX: scale}
    write_checkpoint(path, stored.items(), max_shard_bytes=1 << 40)
    (path / "config.json").write_text((model / "config.json").read_text())
    return path


def test_experts_are_quantised_as_a_replica_does_it(model):
    policy, reference = make(model, "bfloat16", MXFP8), plain(model, "bfloat16")
    for name, tensor in reference.export():
        expected = tensor
        if ".experts." in name:
            expected = dequantize(*quantize(tensor), torch.bfloat16)
            assert not torch.equal(expected, tensor), name
        assert torch.equal(policy.wire_view(name), expected), name


def test_bytes_of_an_mxfp8_checkpoint_are_kept_and_its_values_are_sent(mxfp8_model):
    policy = make(mxfp8_model, "bfloat16", MXFP8)
    stored = read_checkpoint(mxfp8_model, model_config(CONFIG), allow_mxfp8=True)
    num_experts = 0
    for name, tensor in stored:
        if not isinstance(tensor, MXFP8Tensor):
            continue
        num_experts += 1
        held = policy._mxfp8(name)
        assert torch.equal(held.values.view(torch.uint8), tensor.values.view(torch.uint8)), name
        assert torch.equal(held.scale, tensor.scale), name
        # What a replica that holds MXFP8 makes of what it is sent has the same values.
        sent = policy.wire_view(name)
        assert torch.equal(dequantize(*quantize(sent), torch.bfloat16), sent), name
    assert num_experts == 2 * 8 * 3


def test_a_rectangle_of_mxfp8_is_that_of_the_whole(mxfp8_model):
    policy = make(mxfp8_model, "bfloat16", MXFP8)
    name = EXPERT.format(3, "w2")
    whole = policy.wire_view(name)
    assert torch.equal(policy.wire_view(name, ((3, 9), (5, 21))), whole[3:9, 5:21])


def test_an_mxfp8_checkpoint_is_widened_where_experts_are_held_in_bf16(mxfp8_model):
    wide, narrow = (make(mxfp8_model, "bfloat16", lora) for lora in (LORA, MXFP8))
    for (name, tensor), (_, expected) in zip(wide.export(), narrow.export(), strict=True):
        assert torch.equal(tensor, expected), name
    assert torch.equal(logprobs(wide), logprobs(narrow))
    assert wide.base_hash() == narrow.base_hash()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_learn_through_mxfp8_experts(mxfp8_model, checkpointing):
    narrow = make(mxfp8_model, "float64", MXFP8, activation_checkpointing=checkpointing)
    wide = make(mxfp8_model, "float64", LORA)
    grads = []
    for policy in (narrow, wide):
        shake(policy)
        logprobs(policy).sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in policy.adapters.parameters()]))
    assert grads[1].norm() > 0
    assert (grads[0] - grads[1]).norm() <= 1e-12 * grads[1].norm()


def test_the_base_has_no_masters(model):
    policy = make(model, "bfloat16", MXFP8)
    kinds = {name: tensor.dtype for name, tensor in policy.model.state_dict().items()}
    fp32 = {name for name, dtype in kinds.items() if dtype == torch.float32}
    assert fp32 == {
        f"model.layers.{layer}.mlp.gate.{last}"
        for layer in (1, 2)
        for last in ("weight", "e_score_correction_bias")
    }
    assert not any(".experts." in name for name in kinds)
    assert all(p.dtype == torch.float32 for p in policy.adapters.parameters())


@pytest.mark.parametrize("lora", [MXFP8, replace(LORA, targets=ALL)], ids=["mxfp8", "all"])
def test_adapters_go_through_their_files_bit_for_bit(model, tmp_path, lora):
    policy = make(model, "bfloat16", lora)
    shake(policy)
    policy.save_trained(tmp_path, "base/model")
    back = make(model, "bfloat16", lora)
    assert back.master_hash() != policy.master_hash()
    back.load_trained(tmp_path)
    assert back.master_hash() == policy.master_hash()
    assert torch.equal(logprobs(back), logprobs(policy))
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_files_are_those_of_peft(model, tmp_path):
    """Names and shapes as peft 0.21 writes them for transformers' model, which also read these
    files; stacked experts as its ParamWrapper lays them out."""
    policy = make(model, lora=replace(LORA, targets=ALL))
    shake(policy)
    policy.save_trained(tmp_path, "base/model")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 8.0, "LORA")
    assert config["base_model_name_or_path"] == "base/model"
    assert config["target_parameters"] == ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.1"
    q = f"{prefix}.self_attn.q_proj"
    assert tensors[f"{q}.lora_A.weight"].shape == (4, 32)
    assert tensors[f"{q}.lora_B.weight"].shape == (64, 4)
    added = 2.0 * tensors[f"{q}.lora_B.weight"].double() @ tensors[f"{q}.lora_A.weight"].double()
    adapter = policy.adapters["model.layers.1.self_attn.q_proj.weight"]
    assert torch.equal(added, product(adapter))
    for key, kind in ((f"{prefix}.mlp.experts.base_layer", "gate_up_proj"),
                      (f"{prefix}.mlp.experts", "down_proj")):  # fmt: skip
        adapter = policy.adapters[f"model.layers.1.mlp.experts.{kind}"]
        a, b = tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"]
        a_ERI = a.reshape(8, -1, a.shape[-1])
        b_ORE = b.reshape(b.shape[0], -1, 8)
        added = 2.0 * torch.einsum("ore,eri->eoi", b_ORE.double(), a_ERI.double())
        torch.testing.assert_close(added, product(adapter), rtol=1e-12, atol=1e-15)


def test_the_pattern_for_peft_names_the_adapted_modules_and_no_others(model):
    policy = make(model, lora=replace(LORA, targets=("attention", "shared_experts")))
    pattern = peft_config(policy.adapters.settings, "")["target_modules"]
    with torch.device("meta"):
        text = MiniMaxM3VLTextConfig(**policy.config.to_transformers())
        names = [name for name, _ in MiniMaxM3VLForCausalLM(text).named_modules()]
    found = {f"{name}.weight" for name in names if re.fullmatch(pattern, name)}
    assert found == set(policy.adapters.names)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rank": 2}, r"has shape \[4, 32\], policy.lora.rank asks for \[2, 32\]"),
        ({"targets": ALL}, "adapters of other modules than policy.lora.targets"),
        ({"mxfp8_experts": True}, "belongs to a base of hash"),
    ],
)
def test_adapters_of_other_settings_are_refused(model, tmp_path, change, said):
    make(model, "bfloat16").save_trained(tmp_path, "")
    with pytest.raises(CheckpointError, match=said):
        make(model, "bfloat16", replace(LORA, **change)).load_trained(tmp_path)


def test_adapters_of_another_base_and_lost_files_are_refused(model, tmp_path):
    random_checkpoint(tmp_path, CONFIG, seed=1)
    policy = make(model)
    policy.save_trained(tmp_path, "")
    with pytest.raises(CheckpointError, match="belongs to a base of hash"):
        make(tmp_path).load_trained(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"cut")
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors"):
        policy.load_trained(tmp_path)
    with pytest.raises(CheckpointError, match="nowhere"):
        policy.load_trained(tmp_path / "nowhere")


def test_mxfp8_needs_whole_blocks():
    config = model_config(CONFIG | {"intermediate_size": 16})
    with pytest.raises(ValueError, match="of 32 channels, and down_proj of an expert has 16"):
        LoraPolicy(config, dtype="bfloat16", lora=MXFP8)
