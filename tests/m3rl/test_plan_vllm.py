import re
from pathlib import Path
from typing import Any

import pytest

from m3rl.config import Config, ConfigError
from m3rl.plan import make_plan
from m3rl.plan_text import describe, gpu_table
from m3rl.plan_vllm import vllm_memory, vllm_model_problems
from m3rl.rollout.vllm_staging import own_slots, run_of_experts
from m3rl.types import TensorSlot
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


def layers(*sizes: int, num_experts: int = 0) -> list[TensorSlot]:
    """Layers of so many GiB in BF16, of which the experts are three quarters if there are any."""
    found = []
    for number, size in enumerate(sizes):
        parts = {"mlp.weight": 1}
        if num_experts:
            parts = {f"mlp.experts.{i}.w1.weight": 3 / 4 / num_experts for i in range(num_experts)}
            parts |= {"self_attn.q_proj.weight": 1 / 4}
        for name, part in parts.items():
            shape = (int(part * size * GIB / 2),)
            name = f"model.layers.{number}.{name}"
            slot = TensorSlot(name, "bfloat16", shape, ((0, shape[0]),), f"layer.{number}")
            found.append(slot)
    return found


def test_a_rank_holds_its_share_of_the_weights_and_all_of_a_sync(tmp_path):
    backend = vllm(tmp_path, {"tensor_parallel_size": 4, "kv_cache_gib": 2.0}).rollout.backend
    memory, fault = vllm_memory(backend, {"a": 40 * GIB, "b": 8 * GIB}, layers(40, 8), None)
    assert fault is None
    assert memory.uses == {
        "a": 10 * GIB,
        "b": 2 * GIB,
        "KV cache": 2 * GIB,
        "weights of a sync, whole": 48 * GIB,
    }


@pytest.mark.parametrize(("ranks", "num_staged"), [(1, 2), (2, 4)])
def test_a_rank_that_stages_by_layers_has_room_for_a_few(tmp_path, ranks, num_staged):
    """Of the largest layer, one more while vLLM puts its modules together."""
    engine = {"tensor_parallel_size": ranks, "staging": "layers"}
    backend = vllm(tmp_path, engine).rollout.backend
    memory, _ = vllm_memory(backend, {"a": 20 * GIB}, layers(2, 4, *[2] * 7), None)
    assert memory.buffers == {
        "layers of a sync": num_staged * 4 * GIB,
        "a layer that is loaded": 4 * GIB,
    }


def test_a_rank_of_expert_parallelism_receives_its_own_experts(tmp_path):
    """5 experts over 2 ranks: one has 3 of them, 3/5 of 3/4 of a layer, and 1/4 is shared."""
    engine = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    backend = vllm(tmp_path, engine).rollout.backend
    memory, _ = vllm_memory(backend, {"a": 40 * GIB}, layers(20, 20, num_experts=5), None)
    assert memory.buffers == {"weights of a sync, whole": 2 * (9 + 5) * GIB}


@pytest.mark.parametrize(
    ("weights", "ranks", "utilization", "said"),
    [
        (40, 2, 0.5, None),
        (40, 2, 0.9, "gpu_memory_utilization between 0.20 and 0.60"),
        (40, 2, 0.1, "gpu_memory_utilization between 0.20 and 0.60"),
        (120, 8, 0.5, r"staging: layers, which is 60.0 GiB, and .* between 0.15 and 0.40"),
        (800, 8, 0.9, "raise rollout.backend.engine.tensor_parallel_size, or set .*kind: m3"),
    ],
)
def test_what_a_gpu_cannot_hold_is_refused_with_the_nearest_that_fits(
    tmp_path, weights, ranks, utilization, said
):
    engine = {"tensor_parallel_size": ranks, "gpu_memory_utilization": utilization}
    backend = vllm(tmp_path, engine, device="cuda").rollout.backend
    slots = layers(*[weights // 10] * 10)
    memory, fault = vllm_memory(backend, {"all": weights * GIB}, slots, 100 * GIB)
    if said is None:
        assert fault is None
        assert memory.total_bytes == 90 * GIB
        assert memory.cache == {"KV cache, activations, graphs": 30 * GIB}
    else:
        assert re.search(said, fault)


REAL_M3 = [
    "rollout.backend.kind=vllm",
    "rollout.backend.engine.tensor_parallel_size=16",
    "rollout.capture_routing=false",
    "policy.replay_routing=false",
    "rollout.capture_blocks=false",
    "policy.replay_blocks=false",
    "weight_sync.wire=bf16",
]


def test_the_real_m3_is_more_than_a_vllm_rank_can_receive_whole():
    wanted = Config.load(CONFIGS / "m3_256gpu.yaml", REAL_M3)
    assert wanted.rollout.backend.gpu_memory_gib == 139
    text = refusal(wanted)
    assert re.search(r"beside these 79\d\.\d GiB that a weight sync is received into", text)
    assert "set rollout.backend.engine.enable_expert_parallel: true (a rank receives" in text


def test_a_vllm_rank_of_expert_parallelism_receives_the_real_m3_layer_by_layer():
    engine = "rollout.backend.engine"
    words = [f"{engine}.enable_expert_parallel=true", f"{engine}.staging=layers"]
    words += [f"{engine}.gpu_memory_utilization=0.8"]
    found = plan(Config.load(CONFIGS / "m3_256gpu.yaml", [*REAL_M3, *words]))
    assert found.replica.total_bytes < 139 * GIB
    assert 70 * GIB < max(found.projection.received_bytes) < 75 * GIB


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "runs"), [(4, 2, [[0, 1], [2, 3]]), (5, 2, [[0, 1, 2], [3, 4]])]
)
def test_experts_are_shared_out_in_runs(num_experts, num_ranks, runs):
    found = [sorted(run_of_experts(num_experts, rank, num_ranks)) for rank in range(num_ranks)]
    assert found == runs


def test_a_worker_needs_all_but_the_experts_of_others():
    slots = layers(8, 8, num_experts=4)
    own = own_slots(slots, {0: frozenset({1, 2})})
    gone = [slot.name for slot in slots if slot not in own]
    assert gone == [f"model.layers.0.mlp.experts.{n}.w1.weight" for n in (0, 3)]


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
