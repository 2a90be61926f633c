import re
from pathlib import Path
from typing import Any

import pytest

from m3rl.config import Config, ConfigError
from m3rl.plan import make_plan
from m3rl.plan_text import describe, gpu_table
from m3rl.plan_vllm import vllm_memory, vllm_model_problems
from tests.m3rl.run_files import TEXT_CONFIG, settings, write_model

CONFIGS = Path(__file__).parents[2] / "configs"
GIB = 1 << 30


def vllm(folder: Path, engine: dict[str, Any] | None = None, **backend: Any) -> Config:
    """Rows of 8 tokens, which are the 2 blocks of 4 that the test model keeps."""
    whole = settings(folder)
    whole["data"] |= {"max_prompt_tokens": 5, "overlong": "drop"}
    whole["rollout"] |= {
        "max_tokens": 3,
        "backend": {"kind": "vllm", "engine": engine or {}} | backend,
    }
    return Config.from_dict(whole)


def plan(wanted: Config):
    return make_plan(wanted, is_launch=False)


def refusal(wanted: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(wanted)
    return str(caught.value)


def test_the_cpu_build_serves_m3_up_to_its_chosen_blocks_and_no_longer(tmp_path):
    write_model(tmp_path / "model")
    assert plan(vllm(tmp_path)).num_pages is None
    text = refusal(vllm(tmp_path, {"max_model_len": 9}))
    assert "the model's own up to 8 tokens (2 chosen blocks of 4)" in text
    assert "rollout.backend.engine.max_model_len = 9; shorten" in text
    longer = vllm(tmp_path).to_dict()
    longer["rollout"]["max_tokens"] = 4
    text = refusal(Config.from_dict(longer))
    assert "data.max_prompt_tokens + rollout.max_tokens = 9; shorten them" in text
    on_gpus = plan(vllm(tmp_path, {"max_model_len": 200}, device="cuda"))
    assert on_gpus.replica.gpu_bytes is None


def test_the_cpu_build_has_m3_on_one_rank_alone(tmp_path):
    two = TEXT_CONFIG["sparse_attention_config"] | {"sparse_num_index_heads": 2}
    write_model(tmp_path / "model", num_key_value_heads=2, sparse_attention_config=two)
    text = refusal(vllm(tmp_path, {"tensor_parallel_size": 2}))
    assert "tensor_parallel_size: 2, and vLLM's CPU build runs MiniMax-M3 on one rank" in text


def test_a_length_beyond_the_models_positions_is_refused(tmp_path):
    write_model(tmp_path / "model")
    text = refusal(vllm(tmp_path, {"max_model_len": 257}, device="cuda"))
    assert "is to serve 257 tokens (rollout.backend.engine.max_model_len)" in text
    assert "max_position_embeddings 256; shorten" in text


def test_ranks_that_do_not_divide_the_heads_are_refused_with_those_that_do(tmp_path):
    raw = {"num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 4096}
    for ranks in (1, 2, 4, 12):
        wanted = vllm(tmp_path, {"tensor_parallel_size": ranks}, device="cuda")
        assert list(vllm_model_problems(wanted, raw)) == []
    (text,) = vllm_model_problems(
        vllm(tmp_path, {"tensor_parallel_size": 3}, device="cuda"), {"text_config": raw}
    )
    assert "tensor_parallel_size: 3" in text
    assert "does not split 12 heads and 4 KV heads evenly; use one of [1, 2, 4, 12]" in text


def test_m3_in_bf16_on_the_cpu_build_is_noticed(tmp_path):
    write_model(tmp_path / "model")
    rough = vllm(tmp_path).to_dict()
    rough["policy"]["dtype"] = "bfloat16"
    (notice,) = [n for n in plan(Config.from_dict(rough)).notices if n.startswith("policy.dtype")]
    assert "float32 agrees within 1e-4" in notice
    assert not [n for n in plan(vllm(tmp_path)).notices if n.startswith("policy.dtype")]


def test_a_rank_holds_its_share_of_the_weights_and_all_of_a_sync(tmp_path):
    backend = vllm(tmp_path, {"tensor_parallel_size": 4, "kv_cache_gib": 2.0}).rollout.backend
    memory, fault = vllm_memory(backend, {"a": 40 * GIB, "b": 8 * GIB}, None)
    assert fault is None
    assert memory.uses == {
        "a": 10 * GIB,
        "b": 2 * GIB,
        "KV cache": 2 * GIB,
        "weights of a sync, whole": 48 * GIB,
    }


@pytest.mark.parametrize(
    ("weights", "ranks", "utilization", "said"),
    [
        (40, 2, 0.5, None),
        (40, 2, 0.9, "gpu_memory_utilization between 0.20 and 0.60"),
        (40, 2, 0.1, "gpu_memory_utilization between 0.20 and 0.60"),
        (120, 8, 0.5, "more ranks do not help; set rollout.backend.kind: m3"),
    ],
)
def test_what_a_gpu_cannot_hold_is_refused_with_the_nearest_that_fits(
    tmp_path, weights, ranks, utilization, said
):
    engine = {"tensor_parallel_size": ranks, "gpu_memory_utilization": utilization}
    backend = vllm(tmp_path, engine, device="cuda").rollout.backend
    memory, fault = vllm_memory(backend, {"all": weights * GIB}, 100 * GIB)
    if said is None:
        assert fault is None
        assert memory.total_bytes == 90 * GIB
        assert memory.cache == {"KV cache, activations, graphs": 30 * GIB}
    else:
        assert said in fault


def test_the_real_m3_is_more_than_a_vllm_rank_can_receive():
    words = [
        "rollout.backend.kind=vllm",
        "rollout.backend.engine.tensor_parallel_size=16",
        "rollout.capture_routing=false",
        "policy.replay_routing=false",
        "rollout.capture_blocks=false",
        "policy.replay_blocks=false",
        "weight_sync.wire=bf16",
    ]
    wanted = Config.load(CONFIGS / "m3_256gpu.yaml", words)
    assert wanted.rollout.backend.gpu_memory_gib == 139
    text = refusal(wanted)
    assert re.search(r"beside these 79\d\.\d GiB that a weight sync is received into", text)
    assert "set rollout.backend.kind: m3" in text


def test_every_worker_of_a_vllm_replica_receives_every_tensor_whole(tmp_path):
    write_model(tmp_path / "model")
    one = plan(vllm(tmp_path, device="cuda")).projection
    two = plan(vllm(tmp_path, {"tensor_parallel_size": 2}, device="cuda")).projection
    assert one.received_bytes[0] == two.received_bytes[0] == two.received_bytes[1]
    assert len(two.received_bytes) == 2


def test_a_plan_of_vllm_replicas_has_no_pages_and_no_table_of_clusters(tmp_path):
    write_model(tmp_path / "model")
    found = plan(vllm(tmp_path))
    text = describe(found)
    assert "pages" not in text
    assert re.search(r"one replica +KV cache +1.0 GiB", text)
    assert "needed at launch: rollout.backend.kind: vllm" in text or not found.needed
    with pytest.raises(ConfigError, match="--gpus: plans replicas of the bundled runtime"):
        gpu_table(found, [8])


@pytest.mark.parametrize("file", ["tiny_vllm_cpu.yaml", "tiny_wide_cpu.yaml"])
def test_the_tiny_configurations_for_both_backends_work_with_either(file):
    for kind in ("m3", "vllm"):
        found = plan(Config.load(CONFIGS / file, [f"rollout.backend.kind={kind}"]))
        assert all("vllm" in need for need in found.needed)


def test_replicas_of_another_architecture_are_planned_and_refused_alike():
    file = CONFIGS / "qwen_vllm_cpu.yaml"
    uses = plan(Config.load(file)).replica
    total = 4 * 468_736  # parameters in FP32
    assert sum(uses.values()) == total + total + (1 << 29)
    assert uses["weights of a sync, whole"] == total
    on_gpus = ["rollout.backend.device=cuda", "rollout.backend.gpu_memory_gib=0.002"]
    text = refusal(Config.load(file, on_gpus))
    assert "a GPU of 2.0 MiB holds 1.8 MiB of weights" in text
    three = ["rollout.backend.device=cuda", "rollout.backend.engine.tensor_parallel_size=3"]
    assert "does not split 4 heads and 2 KV heads evenly; use one of [1, 2, 4]" in refusal(
        Config.load(file, three)
    )


def test_a_warm_start_needs_no_vllm():
    for file in ("qwen_vllm_cpu.yaml", "tiny_vllm_cpu.yaml"):
        found = make_plan(Config.load(CONFIGS / file), is_launch=True, generates=False)
        assert found.needed == ()
