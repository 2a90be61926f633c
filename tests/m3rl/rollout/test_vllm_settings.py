"""What vLLM is started with; needs none."""

from __future__ import annotations

import json
import pickle

import pytest

from m3rl.model_layout import stop_ids
from m3rl.rollout.backend import BackendError
from m3rl.rollout.vllm_m3 import index_names, require_dense_is_exact
from m3rl.rollout.vllm_settings import VllmSettings, engine_arguments
from tests.tiny_models import tiny_config

M3 = tiny_config(sparse_block_size=16, sparse_topk_blocks=4)


@pytest.fixture
def m3(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(M3))
    return tmp_path


@pytest.fixture
def qwen3(tmp_path):
    content = {"model_type": "qwen3", "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(content))
    return tmp_path


def settings(path, **changes) -> VllmSettings:
    return VllmSettings(str(path), "bfloat16", **{"device": "cuda"} | changes)


def test_log_probabilities_and_loading_are_not_vllms_defaults(qwen3):
    arguments = engine_arguments(settings(qwen3, capture_routing=True))
    assert arguments["logprobs_mode"] == "processed_logprobs"
    assert arguments["load_format"] == "dummy"
    assert arguments["enable_return_routed_experts"] is True
    assert arguments["skip_tokenizer_init"] is True
    assert "hf_overrides" not in arguments
    (qwen3 / "tokenizer.json").write_text("{}")
    assert engine_arguments(settings(qwen3))["skip_tokenizer_init"] is False


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("logprobs_mode", "raw_logprobs", "under the sampling distribution"),
        ("load_format", "auto", "come from the weight sync alone"),
        ("data_parallel_size", 2, r"set rollout\.backend\.num_replicas"),
        ("enable_lora", True, "adapters come merged"),
        ("kv_transfer_config", 1, "of the old policy after a weight sync"),
        ("blok_size", 32, "did you mean 'block_size'"),
        ("max_model_len", 7, r"set rollout\.backend\.engine\.max_model_len"),
        ("dtype", "float16", r"set policy\.dtype"),
    ],
)
def test_what_is_not_to_be_chosen_is_refused_with_the_reason(qwen3, name, value, words):
    with pytest.raises(BackendError, match=rf"extra\.{name}={value!r}.*{words}"):
        engine_arguments(settings(qwen3, extra={name: value}))


def test_further_arguments_are_handed_on(qwen3):
    assert engine_arguments(settings(qwen3, extra={"block_size": 32}))["block_size"] == 32


def test_on_the_cpu_keys_have_the_memory_that_is_asked_for(qwen3):
    arguments = engine_arguments(settings(qwen3, device="cpu", kv_cache_gib=0.5))
    assert arguments["kv_cache_memory_bytes"] == 1 << 29
    assert arguments["enforce_eager"] is True
    assert arguments["enable_chunked_prefill"] is False
    assert "enable_chunked_prefill" not in engine_arguments(settings(qwen3))


def test_experts_shared_out_crash_vllms_cpu_build(qwen3):
    assert engine_arguments(settings(qwen3, enable_expert_parallel=True))["enable_expert_parallel"]
    with pytest.raises(BackendError, match="set false, or device: cuda"):
        engine_arguments(settings(qwen3, device="cpu", enable_expert_parallel=True))


def test_m3_is_run_natively_on_gpus_and_densely_on_the_cpu(m3):
    natively = engine_arguments(settings(m3))["hf_overrides"]
    densely = engine_arguments(settings(m3, device="cpu", max_model_len=64))["hf_overrides"]
    assert (natively.is_dense, densely.is_dense) == (False, True)
    assert pickle.loads(pickle.dumps(densely)) == densely  # it goes to vLLM's workers
    text = densely(type("Config", (), {"hidden_size": 32}))
    assert text.architectures == ["MiniMaxM3VLForCausalLM"]
    assert text.layer_types == ["full_attention"] * 4
    assert text.num_local_experts == 8


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_model_len": 65}, "exact up to 64 tokens"),
        ({"tensor_parallel_size": 2}, "on one worker"),
        ({"capture_routing": True}, "does not record"),
    ],
)
def test_what_dense_m3_cannot_do_is_refused(m3, changes, words):
    with pytest.raises(BackendError, match=words):
        engine_arguments(settings(m3, device="cpu", **changes))


def test_dense_attention_is_exact_for_any_length_without_sparse_layers(tmp_path):
    dense = tiny_config(num_dense_layers=4, m3rl_allow_dense=True)
    (tmp_path / "config.json").write_text(json.dumps(dense))
    require_dense_is_exact(str(tmp_path), 512)
    assert index_names(str(tmp_path)) == frozenset()


def test_end_tokens_are_those_of_both_files_once(tmp_path):
    text = {"eos_token_id": [2, 3]}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text}))
    assert stop_ids(tmp_path) == (2, 3)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 0]}))
    assert stop_ids(tmp_path) == (2, 3, 0)
