"""Each key reaches its consumer: one leaf changed, one field changed, to that very value."""

from dataclasses import asdict

import pytest

from inference.config import EngineConfig
from m3rl.assemble import eval_sampling, rank_settings, replica_settings, rollout_sampling
from m3rl.config import Config
from m3rl.config_file import flatten

TINY = "configs/tiny_cpu.yaml"
RECORDING = "rollout.capture_routing=true"

# Key -> (its new value in YAML, what must become of it: field -> value).
REACHES = {
    "policy.dtype": ("bfloat16", {"rank.dtype": "bfloat16", "replica.engine.dtype": "bfloat16"}),
    "policy.activation_checkpointing": ("true", {"rank.activation_checkpointing": True}),
    "policy.replay_blocks": ("true", {"rank.replay_blocks": True}),
    "policy.replay_routing": ("true", {"rank.replay_routing": True}),
    "policy.micro_batch_tokens": ("777", {"rank.micro_batch_tokens": 777}),
    "policy.index_loss.coef": ("0.3", {"rank.index_loss.coef": 0.3}),
    "policy.index_loss.level": ("block", {"rank.index_loss.level": "block"}),
    "policy.index_drift_every": ("5", {"rank.index_drift_every": 5}),
    "policy.lora": (
        "{rank: 3, targets: [experts]}",
        {
            "rank.lora.rank": 3,
            "rank.lora.alpha": 32.0,
            "rank.lora.targets.0": "experts",
            "rank.lora.mxfp8_experts": False,
            "rank.lora.seed": 0,
        },
    ),
    "optimizer.lr": ("0.5", {"rank.optimizer.lr": 0.5}),
    "optimizer.betas.0": ("[0.7, 0.99]", {"rank.optimizer.betas.0": 0.7}),
    "optimizer.betas.1": ("[0.9, 0.7]", {"rank.optimizer.betas.1": 0.7}),
    "optimizer.eps": ("1e-5", {"rank.optimizer.eps": 1e-5}),
    "optimizer.weight_decay": ("0.03", {"rank.optimizer.weight_decay": 0.03}),
    "optimizer.grad_clip": ("0.7", {"rank.optimizer.grad_clip": 0.7}),
    "optimizer.warmup_steps": ("9", {"rank.optimizer.warmup_steps": 9}),
    "train.parallel.ep": ("2", {"rank.ep": 2}),
    "train.parallel.cp": ("4", {"rank.cp": 4}),
    "optimizer.offload": ("true", {"rank.optimizer.offload": True}),
    "grpo.clip_low": ("0.11", {"rank.loss.clip_low": 0.11}),
    "grpo.clip_high": ("0.33", {"rank.loss.clip_high": 0.33}),
    "grpo.dual_clip": ("3.5", {"rank.loss.dual_clip": 3.5}),
    "grpo.kl.coef": ("0.04", {"rank.loss.kl_coef": 0.04}),
    "grpo.kl.estimator": ("k2", {"rank.loss.kl_estimator": "k2"}),
    "grpo.kl.place": ("reward", {"rank.loss.kl_in_reward": True}),
    "grpo.kl.unbiased": ("true", {"rank.loss.kl_unbiased": True}),
    "grpo.objective": ("cispo", {"rank.loss.objective": "cispo"}),
    "grpo.ratio": ("sequence", {"rank.loss.ratio": "sequence"}),
    "grpo.aggregation": ("constant", {"rank.loss.aggregation": "constant"}),
    "grpo.constant_length": ("77", {"rank.loss.constant_length": 77}),
    "grpo.entropy_coef": ("0.02", {"rank.loss.entropy_coef": 0.02}),
    "grpo.preset": (
        "gspo",
        {
            "rank.loss.ratio": "sequence",
            "rank.loss.aggregation": "sequence_mean",
            "rank.loss.clip_low": 3e-4,
            "rank.loss.clip_high": 4e-4,
            "rank.old_logprobs": "recompute",
        },
    ),
    "grpo.old_logprobs": ("recompute", {"rank.old_logprobs": "recompute"}),
    "grpo.updates_per_batch": ("3", {"rank.updates_per_batch": 3}),
    "grpo.importance.kind": ("none", {"rank.loss.importance_cap": None}),
    "grpo.importance.cap": ("5.5", {"rank.loss.importance_cap": 5.5}),
    "rollout.temperature": ("0.6", {"rollout.temperature": 0.6}),
    "rollout.top_p": ("0.8", {"rollout.top_p": 0.8}),
    "rollout.top_k": ("40", {"rollout.top_k": 40}),
    "rollout.min_p": ("0.05", {"rollout.min_p": 0.05}),
    "rollout.max_tokens": (
        "13",
        {"rollout.max_tokens": 13, "eval.max_tokens": 13, "rank.loss.constant_length": 13},
    ),
    "rollout.stop": ("[END]", {"rollout.stop.0": "END", "eval.stop.0": "END"}),
    "rollout.capture_routing": (
        "true",
        {"rollout.capture_routing": True, "replica.engine.capture_routing": True},
    ),
    "rollout.capture_blocks": (
        "true",
        {"rollout.capture_blocks": True, "replica.engine.capture_blocks": True},
    ),
    "rollout.backend.parallel.tp": ("2", {"replica.parallel.tp": 2}),
    "rollout.backend.parallel.dp": ("2", {"replica.parallel.dp": 2}),
    "rollout.backend.parallel.ep": ("1", {"replica.parallel.ep": 1}),
    "rollout.backend.num_threads": ("3", {"replica.num_threads": 3}),
    "rollout.backend.device": ("cuda", {"replica.engine.device": "cuda"}),
    "rollout.backend.engine.kv_dtype": (
        "float8_e4m3fn",
        {"replica.engine.kv_dtype": "float8_e4m3fn"},
    ),
    "rollout.backend.engine.index_dtype": (
        "float8_e4m3fn",
        {"replica.engine.index_dtype": "float8_e4m3fn"},
    ),
    "rollout.backend.engine.quantization": (
        "mxfp8",
        {"replica.engine.quantization": "mxfp8"},
    ),
    "rollout.backend.engine.shadow_weights": (
        "true",
        {"replica.engine.shadow_weights": True},
    ),
    "rollout.backend.engine.num_pages": ("99", {"replica.engine.num_pages": 99}),
    "rollout.backend.engine.max_model_len": ("200", {"replica.engine.max_model_len": 200}),
    "rollout.backend.engine.max_running_requests": (
        "17",
        {"replica.engine.max_running_requests": 17},
    ),
    "rollout.backend.engine.max_tokens_per_step": (
        "1234",
        {"replica.engine.max_tokens_per_step": 1234},
    ),
    "rollout.backend.engine.enable_prefix_cache": (
        "false",
        {"replica.engine.enable_prefix_cache": False},
    ),
    "run.seed": ("8", {"rank.seed": 8}),
    "train.num_threads": ("2", {"rank.num_threads": 2}),
    "train.timeout_s": ("7", {"rank.timeout_s": 7.0}),
    "model.path": ("elsewhere", {"replica.model_path": "elsewhere"}),
    "eval.temperature": ("0.4", {"eval.temperature": 0.4}),
}

# Key -> (its new value, who reads it instead).
READ_ELSEWHERE = {
    "grpo.advantage": ("rloo", "BatchMaker"),
    "grpo.skip_zero_variance": ("false", "BatchMaker"),
    "grpo.truncated": ("mask", "BatchMaker"),
    "grpo.overlong.buffer": ("4", "BatchMaker"),
    "grpo.overlong.penalty": ("0.5", "BatchMaker"),
    "grpo.kl.target": ("0.1", "BatchMaker: KlController"),
    "grpo.kl.gain": ("0.2", "BatchMaker: KlController"),
    "grpo.refill_rounds": ("3", "trainer: Collector.collect_refilled"),
    "rollout.group_size": ("4", "trainer, jobs: Collector.collect"),
    "rollout.prompts_per_step": ("5", "trainer, jobs: PromptStream.take"),
    "rollout.num_prompts": ("6", "jobs: rollout"),
    "rollout.timeout_s": ("7", "RolloutSide.collector"),
    "rollout.backend.gpu_memory_gib": ("139", "plan: whether a replica fits"),
    "rollout.backend.num_replicas": ("2", "RolloutSide: M3Backend"),
    "rollout.backend.max_restarts": ("9", "trainer, jobs: how lost replicas are healed"),
    "rollout.backend.kind": ("m3", "RolloutSide: M3Backend or VllmBackend"),
}


def fields(config: Config) -> dict[str, object]:
    """Every field of everything that is handed on, by dotted name; tuples by place."""
    parts = {
        "rank": asdict(rank_settings(config)),
        "replica": asdict(replica_settings(config)),
        "rollout": asdict(rollout_sampling(config)),
        "eval": asdict(eval_sampling(config)),
    }
    return _leaves("", parts)


def _leaves(name: str, value: object) -> dict[str, object]:
    if isinstance(value, dict) and value:
        items = value.items()
    elif isinstance(value, tuple) and value:
        items = enumerate(value)
    else:
        return {name: value}
    return {
        leaf: held
        for key, inner in items
        for leaf, held in _leaves(f"{name}.{key}" if name else str(key), inner).items()
    }


def changes(key: str, value: str) -> dict[str, object]:
    """What differs from tiny_cpu.yaml once `key` has another value."""
    needed = {
        "policy.replay_routing": [RECORDING],
        "policy.replay_blocks": ["rollout.capture_blocks=true"],
        "rollout.backend.engine.quantization": ["policy.dtype=bfloat16"],
        "rollout.backend.gpu_memory_gib": ["rollout.backend.device=cuda"],
        "grpo.kl.target": ["grpo.kl.coef=0.1"],
        "train.parallel.ep": ["train.num_ranks=4"],
        "train.parallel.cp": ["train.num_ranks=4"],
    }.get(key, [])
    before = fields(Config.load(TINY, needed))
    written = key.removesuffix(".0").removesuffix(".1")
    after = fields(Config.load(TINY, [*needed, f"{written}={value}"]))
    return {name: held for name, held in after.items() if before.get(name, "absent") != held}


# BR-054
@pytest.mark.parametrize("key", REACHES)
def test_a_key_changes_its_field_to_its_value_and_no_other(key):
    value, expected = REACHES[key]
    assert changes(key, value) == expected


@pytest.mark.parametrize("key", READ_ELSEWHERE)
def test_a_key_that_is_read_elsewhere_changes_nothing_here(key):
    assert changes(key, READ_ELSEWHERE[key][0]) == {}


# BR-054
def test_no_key_of_these_sections_is_left_out():
    config = Config.load(TINY)
    sections = ("policy.", "optimizer.", "grpo.", "rollout.")
    keys = {key for key in flatten(config.to_dict()) if key.startswith(sections)}
    listed = {key.removesuffix(".0").removesuffix(".1") for key in (*REACHES, *READ_ELSEWHERE)}
    assert keys - listed == set()


def test_the_runtime_takes_every_engine_option_under_its_name():
    engine = replica_settings(Config.load(TINY)).engine
    built = asdict(EngineConfig(**engine))
    assert {name: built[name] for name in engine} == engine


def test_an_evaluation_samples_the_whole_distribution_and_leaves_the_prefix_cache_alone():
    settings = eval_sampling(Config.load(TINY, ["rollout.top_p=0.5", "rollout.top_k=3"]))
    assert (settings.temperature, settings.top_p, settings.top_k, settings.min_p) == (0, 1, 0, 0)
    assert not settings.use_prefix_cache
