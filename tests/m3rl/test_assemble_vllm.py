"""What vLLM's replicas are told of a configuration."""

from dataclasses import asdict
from pathlib import Path

import pytest

from m3rl.assemble import num_workers, vllm_settings
from m3rl.config import Config
from m3rl.config_backend import BackendConfig
from m3rl.config_vllm import VllmEngineOptions
from m3rl.rollout.vllm_settings import engine_arguments
from m3rl.vllm_arguments import REFUSED

TINY = Path(__file__).parents[2] / "configs" / "tiny_vllm_cpu.yaml"
ENGINE = "rollout.backend.engine"

REACHES = {
    f"{ENGINE}.tensor_parallel_size": ("2", {"tensor_parallel_size": 2}),
    f"{ENGINE}.enable_expert_parallel": ("true", {"enable_expert_parallel": True}),
    f"{ENGINE}.max_model_len": ("150", {"max_model_len": 150}),
    f"{ENGINE}.max_num_seqs": ("17", {"max_num_seqs": 17}),
    f"{ENGINE}.max_num_batched_tokens": ("999", {"max_num_batched_tokens": 999}),
    f"{ENGINE}.gpu_memory_utilization": ("0.25", {"gpu_memory_utilization": 0.25}),
    f"{ENGINE}.kv_cache_gib": ("0.75", {"kv_cache_gib": 0.75}),
    f"{ENGINE}.enable_prefix_caching": ("true", {"enable_prefix_caching": True}),
    f"{ENGINE}.enforce_eager": ("true", {"enforce_eager": True}),
    f"{ENGINE}.staging": ("layers", {"staging": "layers"}),
    f"{ENGINE}.extra": ("{block_size: 32}", {"extra": {"block_size": 32}}),
    "rollout.backend.num_threads": ("3", {"num_threads": 3}),
    "rollout.backend.device": ("cuda", {"device": "cuda"}),
    "rollout.capture_routing": ("true", {"capture_routing": True}),
    "rollout.max_tokens": ("9", {"max_model_len": 137}),
    "rollout.timeout_s": ("400", {"timeout_s": 400.0}),
    "weight_sync.timeout_s": ("700", {"timeout_s": 700.0}),
    "policy.dtype": ("bfloat16", {"dtype": "bfloat16"}),
    "model.path": ("elsewhere", {"model_path": "elsewhere"}),
}
"""Key -> its new value, and the settings that it changes."""

READ_ELSEWHERE = {
    f"{ENGINE}.start_timeout_s": "generation_backend: VllmBackend",
    "rollout.backend.kind": "generation_backend",
    "rollout.backend.gpu_memory_gib": "plan: whether a replica fits",
    "rollout.backend.num_replicas": "generation_backend: VllmBackend",
    "rollout.backend.max_restarts": "trainer, jobs: how lost replicas are healed",
}
NEEDED = {
    f"{ENGINE}.enable_prefix_caching": ["weight_sync.pause=recompute"],
    "rollout.capture_routing": ["rollout.backend.device=cuda"],
}


@pytest.mark.parametrize("key", REACHES)
def test_a_key_changes_its_setting_to_its_value_and_no_other(key):
    value, expected = REACHES[key]
    before = asdict(vllm_settings(Config.load(TINY, NEEDED.get(key, []))))
    after = asdict(vllm_settings(Config.load(TINY, [*NEEDED.get(key, []), f"{key}={value}"])))
    assert {name: after[name] for name in after if after[name] != before[name]} == expected


def test_every_key_of_the_backend_reaches_something():
    keys = {f"{ENGINE}.{name}" for name in VllmEngineOptions.model_fields}
    keys |= {f"rollout.backend.{name}" for name in BackendConfig.model_fields}
    assert keys - REACHES.keys() - READ_ELSEWHERE.keys() == set()


def test_the_longest_sequence_is_that_of_the_run_unless_it_is_written():
    assert vllm_settings(Config.load(TINY)).max_model_len == 128 + 8


def test_processes_are_counted_over_replicas_and_their_ranks():
    words = ["rollout.backend.num_replicas=3", f"{ENGINE}.tensor_parallel_size=2"]
    assert num_workers(Config.load(TINY, words)) == 6


def test_what_a_replica_is_told_by_itself_is_refused_among_the_further_options():
    config = Config.load(TINY)
    told = engine_arguments(vllm_settings(config)).keys() - config.rollout.backend.engine.extra
    assert "logprobs_mode" in told
    assert told <= REFUSED.keys()
