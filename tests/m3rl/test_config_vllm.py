from pathlib import Path
from typing import Any

import pytest
import yaml

from m3rl import vllm_arguments
from m3rl.config import Config, ConfigError
from m3rl.config_checks import idle_keys
from m3rl.config_vllm_checks import vllm_notices
from tests.m3rl.run_files import settings

VLLM = "rollout.backend.kind=vllm"
ENGINE = "rollout.backend.engine"


def load(folder: Path, *overrides: str) -> Config:
    path = folder / "c.yaml"
    path.write_text(yaml.safe_dump(settings(folder)))
    return Config.load(path, [VLLM, *overrides])


def with_backend(folder: Path, backend: dict[str, Any]) -> dict[str, Any]:
    whole = settings(folder)
    whole["rollout"] = whole["rollout"] | {"backend": backend}
    return whole


def refusal(folder: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, *overrides)
    return str(caught.value)


def test_one_key_changes_the_backend_and_what_both_know_stays(tmp_path):
    path = tmp_path / "c.yaml"
    backend = {
        "num_replicas": 3,
        "num_threads": 2,
        "engine": {"num_pages": 7},
        "parallel": {"tp": 2},
    }
    path.write_text(yaml.safe_dump(with_backend(tmp_path, backend)))
    m3, vllm = Config.load(path), Config.load(path, [VLLM])
    assert (m3.rollout.backend.kind, m3.rollout.backend.ranks_per_replica) == ("m3", 2)
    assert m3.rollout.backend.max_running == 128
    assert (vllm.rollout.backend.kind, vllm.rollout.backend.ranks_per_replica) == ("vllm", 1)
    assert (vllm.rollout.backend.num_replicas, vllm.rollout.backend.num_threads) == (3, 2)
    assert vllm.origin("rollout.backend.num_replicas").startswith(f"{path}:")
    assert vllm.rollout.backend.max_running == 256
    assert vllm.rollout.backend.num_gpus == 0
    on_gpus = ["rollout.backend.device=cuda", f"{ENGINE}.tensor_parallel_size=4"]
    assert Config.load(path, [VLLM, *on_gpus]).rollout.backend.num_gpus == 12


def test_the_default_kind_written_out_keeps_the_options_of_a_file_that_says_none(tmp_path):
    path = tmp_path / "c.yaml"
    backend = {"engine": {"num_pages": 7}}
    path.write_text(yaml.safe_dump(with_backend(tmp_path, backend)))
    loaded = Config.load(path, ["rollout.backend.kind=m3"])
    assert loaded.rollout.backend.kind == "m3"
    assert loaded.rollout.backend.engine.num_pages == 7


def test_a_vllm_configuration_loads_again_from_what_a_run_directory_keeps(tmp_path):
    words = [f"{ENGINE}.extra={{block_size: 32}}", f"{ENGINE}.max_model_len=500"]
    loaded = load(tmp_path, *words)
    kept = tmp_path / "kept.yaml"
    kept.write_text(loaded.resolved_yaml())
    again = Config.load(kept)
    assert again == loaded
    assert again.rollout.backend.engine.extra == {"block_size": 32}
    (_, of_block_size) = loaded.differences(load(tmp_path, words[1]))
    assert of_block_size == f"{ENGINE}.extra.block_size: 32 here, None there"


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("num_pages", "unknown key .*; vLLM sizes its KV cache by gpu_memory_utilization"),
        ("shadow_weights", "; vLLM takes new weights while it is paused, not by a flip"),
        ("quantization", "; vLLM's replicas hold policy.dtype.* or set kind: m3"),
        ("max_running_requests", "; vLLM calls it max_num_seqs"),
        ("max_num_seq", "; did you mean 'max_num_seqs'"),
    ],
)
def test_an_option_of_the_bundled_runtime_is_told_what_stands_for_it(tmp_path, key, said):
    with pytest.raises(ConfigError, match=said):
        load(tmp_path, f"{ENGINE}.{key}=3")


def test_an_option_of_vllm_is_told_what_the_bundled_runtime_calls_it(tmp_path):
    text = refusal(tmp_path, "rollout.backend={kind: m3, engine: {max_num_seqs: 3}}")
    assert "the bundled runtime calls it max_running_requests" in text


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("logprobs_mode", "training needs the log-probability of each sampled token"),
        ("logprobs-mode", "training needs the log-probability of each sampled token"),
        ("max_logprobs", "training needs the log-probability"),
        ("model", "set model.path"),
        ("dtype", "set policy.dtype"),
        ("seed", "every request has its own, from run.seed"),
        ("load_format", "weights come from the weight sync alone"),
        ("worker_extension_cls", "the weight sync has its own worker extension"),
        ("data_parallel_size", "a replica is one engine; set rollout.backend.num_replicas"),
        ("data_parallel_backend", "a replica is one engine; set rollout.backend.num_replicas"),
        ("tensor_parallel_size", f"set {ENGINE}.tensor_parallel_size"),
        ("enable_prefix_caching", f"set {ENGINE}.enable_prefix_caching"),
        ("speculative_config", "the weights of a draft model are not synced"),
        ("spec_method", "the weights of a draft model are not synced"),
        ("kv_transfer_config", "would be those of the old policy after a weight sync"),
        ("kv_offloading_size", "would be those of the old policy after a weight sync"),
        ("ec_transfer_config", "would be those of the old policy after a weight sync"),
        ("hf_overrides", "the model that the trainer trains; set model.path"),
        ("model_class_overrides", "the model that the trainer trains; set model.path"),
        ("watermark_config", "training needs the log-probability of each sampled token"),
        ("scheduler_cls", "in the order in which they were put in"),
        ("enable_return_routed_experts", "set rollout.capture_routing"),
    ],
)
def test_what_changes_results_is_refused_among_the_further_options_with_the_reason(
    tmp_path, name, why
):
    text = refusal(tmp_path, f"{ENGINE}.extra={{{name}: 1}}")
    assert text.startswith(f"{ENGINE}.extra: should not hold '{name}': ")
    assert why in text
    assert "(command line)" in text


def test_any_other_further_option_is_refused_with_those_that_there_are(tmp_path):
    for name, meant in (("blok_size", "block_size"), ("block-size", "block_size")):
        text = refusal(tmp_path, f"{ENGINE}.extra={{{name}: 32}}")
        assert f"should not hold '{name}': did you mean '{meant}'? it may hold what" in text
    text = refusal(tmp_path, f"{ENGINE}.extra={{zzz: 1}}")
    assert "did you mean" not in text
    assert ", ".join(sorted(vllm_arguments.ALLOWED)) in text


def test_keys_may_have_eight_bits_and_are_then_told_as_fp8(tmp_path):
    assert load(tmp_path, f"{ENGINE}.extra={{kv_cache_dtype: fp8}}").rollout.backend.has_fp8
    assert not load(tmp_path, f"{ENGINE}.extra={{kv_cache_dtype: auto}}").rollout.backend.has_fp8
    text = refusal(tmp_path, f"{ENGINE}.extra={{kv_cache_dtype: nvfp4}}")
    assert "should not hold 'kv_cache_dtype': " in text
    assert "set auto or fp8" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["rollout.capture_blocks=true"],
            "vLLM does not tell; .* or rollout.backend.kind: m3",
        ),
        (["rollout.capture_routing=true"], "which its CPU build does not tell; set false"),
        (["policy.index_loss.coef=0.1"], "policy.index_loss.coef: .* attends to every key; set 0"),
        (["policy.index_drift_every=1"], "policy.index_drift_every: .* leaves out"),
        (["weight_sync.wire=mxfp8"], "vLLM's are in policy.dtype; set bf16"),
        (
            [f"{ENGINE}.enable_prefix_caching=true"],
            "weight_sync.pause: keep .* while their blocks are in use; set pause: recompute or dra",
        ),
        (
            [f"{ENGINE}.extra={{long_prefill_token_threshold: 64}}"],
            "cannot cut the prompt of a request that has a seed; leave it out",
        ),
        ([f"{ENGINE}.max_model_len=111"], "max_model_len: 111 is less than data.max_prompt_tokens"),
        (
            [f"{ENGINE}.max_num_batched_tokens=111"],
            "less than a sequence may have, 112 tokens, .* set 112 or more",
        ),
        (["rollout.backend.gpu_memory_gib=80"], "is of a GPU, and rollout.backend.device: cpu"),
        (["rollout.backend.num_replicas=1", "weight_sync.min_replicas=2"], "is more than rollout"),
    ],
)
def test_what_vllm_cannot_give_is_refused_with_reason_and_cure(tmp_path, words, said):
    with pytest.raises(ConfigError, match=said):
        load(tmp_path, *words)


def test_what_vllm_can_do_on_gpus_is_not_refused(tmp_path):
    loaded = load(
        tmp_path,
        "rollout.backend.device=cuda",
        "rollout.capture_routing=true",
        "policy.index_loss.coef=0.1",
        f"{ENGINE}.enable_prefix_caching=true",
        "weight_sync.pause=recompute",
    )
    assert list(idle_keys(loaded)) == []


def test_options_of_the_other_device_are_told_to_do_nothing(tmp_path):
    values = {"gpu_memory_utilization": 0.5, "enable_expert_parallel": "true"}
    values |= {"enforce_eager": "true"}
    words = [f"{ENGINE}.{name}={value}" for name, value in values.items()]
    told = sorted(idle_keys(load(tmp_path, *words)), reverse=True)
    assert len(told) == 3
    assert "gpu_memory_utilization does nothing: rollout.backend.device: cpu takes kv_c" in told[0]
    assert "enforce_eager does nothing: rollout.backend.device: cpu never compiles" in told[1]
    assert "enable_expert_parallel does nothing: one rank holds all experts" in told[2]
    (told_cuda,) = idle_keys(
        load(tmp_path, "rollout.backend.device=cuda", f"{ENGINE}.kv_cache_gib=2")
    )
    assert "kv_cache_gib does nothing: rollout.backend.device: cuda takes what" in told_cuda


def test_what_vllm_does_not_promise_is_said(tmp_path):
    agreement, flip = vllm_notices(load(tmp_path))
    assert "no strict agreement with the trainer" in agreement
    assert "not by a flip between two copies" in flip


def test_a_delta_needs_weights_that_are_kept_as_they_were_sent(tmp_path):
    words = [f"{ENGINE}.staging=layers", "weight_sync.delta=true", "policy.dtype=bfloat16"]
    text = refusal(tmp_path, *words)
    assert "weight_sync.delta: sends what changed" in text
    assert "set delta: false, or staging: whole" in text
    assert load(tmp_path, words[0]).rollout.backend.engine.staging == "layers"


def test_a_replica_that_is_paused_while_weights_travel_is_told(tmp_path):
    by_layers = list(vllm_notices(load(tmp_path, f"{ENGINE}.staging=layers")))
    assert any("is paused while the weights of a sync travel" in each for each in by_layers)
    assert not any("travel" in each for each in vllm_notices(load(tmp_path)))
