"""From a configuration to the parts of a run: settings of each process, and the side that generates
and scores."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from m3rl.completion_metrics import eval_metrics
from m3rl.config import Config, ConfigError
from m3rl.config_policy import lora_settings
from m3rl.data import Data
from m3rl.grpo.loss import LossSettings
from m3rl.index_alignment import IndexLossSettings
from m3rl.plan_vllm import vllm_model_len
from m3rl.rank_settings import OptimizerSettings, RankSettings
from m3rl.rollout.chat import ChatFormat
from m3rl.rollout.collect import EVALUATION, Collector
from m3rl.rollout.environments import SingleTurn
from m3rl.rollout.m3_replica import ReplicaSettings
from m3rl.rollout.pool import ReplicaPool
from m3rl.rollout.rewards import RewardError, RewardPool
from m3rl.rollout.vllm_settings import VllmSettings
from m3rl.types import SamplingSettings


def rank_settings(config: Config) -> RankSettings:
    """What every trainer rank is told."""
    grpo, optimizer, importance = config.grpo, config.optimizer, config.grpo.importance
    return RankSettings(
        loss=LossSettings(
            clip_low=grpo.clip_low,
            clip_high=grpo.clip_high,
            dual_clip=grpo.dual_clip,
            kl_coef=grpo.kl.coef,
            kl_estimator=grpo.kl.estimator,
            importance_cap=importance.cap if importance.kind == "tis" else None,
            objective=grpo.objective,
            ratio=grpo.ratio,
            aggregation=grpo.aggregation,
            constant_length=(
                config.rollout.max_tokens if grpo.constant_length is None else grpo.constant_length
            ),
            kl_in_reward=grpo.kl.place == "reward",
            kl_unbiased=grpo.kl.unbiased,
            entropy_coef=grpo.entropy_coef,
        ),
        optimizer=OptimizerSettings(
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            grad_clip=optimizer.grad_clip,
            warmup_steps=optimizer.warmup_steps,
            offload=optimizer.offload,
        ),
        dtype=config.policy.dtype,
        replay_routing=config.policy.replay_routing,
        replay_blocks=config.policy.replay_blocks,
        activation_checkpointing=config.policy.activation_checkpointing,
        lora=lora_settings(config),
        index_loss=IndexLossSettings(config.policy.index_loss.coef, config.policy.index_loss.level),
        index_drift_every=config.policy.index_drift_every,
        micro_batch_tokens=config.policy.micro_batch_tokens,
        ep=config.train.parallel.ep,
        cp=config.train.parallel.cp,
        old_logprobs=grpo.old_logprobs,
        updates_per_batch=grpo.updates_per_batch,
        seed=config.run.seed,
        num_threads=config.train.num_threads,
        device=config.train.device,
        timeout_s=config.train.timeout_s,
    )


def replica_settings(config: Config) -> ReplicaSettings:
    """What every replica of the bundled runtime is told; it computes in the dtype that the weight
    sync carries."""
    backend = config.rollout.backend
    assert backend.kind == "m3", "vLLM's replicas are told `vllm_settings`"
    engine: dict[str, Any] = backend.engine.model_dump()
    engine |= {
        "dtype": config.policy.dtype,
        "device": backend.device,
        "capture_routing": config.rollout.capture_routing,
        "capture_blocks": config.rollout.capture_blocks,
    }
    return ReplicaSettings(
        str(config.find(config.model.path)),
        engine,
        backend.num_threads,
        backend.parallel.model_dump(exclude_none=True),
    )


def vllm_settings(config: Config) -> VllmSettings:
    """What every vLLM replica is told; it computes in the dtype that the weight sync carries."""
    backend = config.rollout.backend
    assert backend.kind == "vllm", "the bundled runtime's replicas are told `replica_settings`"
    engine = backend.engine
    return VllmSettings(
        model_path=str(config.find(config.model.path)),
        dtype=config.policy.dtype,
        device=backend.device,
        tensor_parallel_size=engine.tensor_parallel_size,
        enable_expert_parallel=engine.enable_expert_parallel,
        max_model_len=vllm_model_len(config),
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        kv_cache_gib=engine.kv_cache_gib,
        enable_prefix_caching=engine.enable_prefix_caching,
        enforce_eager=engine.enforce_eager,
        staging=engine.staging,
        num_threads=backend.num_threads,
        capture_routing=config.rollout.capture_routing,
        extra=engine.extra,
        timeout_s=max(config.rollout.timeout_s, config.weight_sync.timeout_s),
    )


def generation_backend(config: Config) -> ReplicaPool:
    """The pool of replicas of the configured kind; its processes start in the background.

    Raises:
        BackendError: the cluster has fewer GPUs than the replicas need.
    """
    backend = config.rollout.backend
    if backend.kind == "vllm":
        from m3rl.rollout.vllm_backend import VllmBackend

        return VllmBackend(
            vllm_settings(config),
            backend.num_replicas,
            start_timeout_s=backend.engine.start_timeout_s,
        )
    from m3rl.rollout.m3_backend import M3Backend

    return M3Backend(
        replica_settings(config),
        backend.num_replicas,
        num_gpus=int(backend.device == "cuda"),
    )


def num_workers(config: Config) -> int:
    """Processes of all replicas."""
    backend = config.rollout.backend
    return backend.num_replicas * backend.ranks_per_replica


def check_trainable(config: Config) -> None:
    """
    Raises:
        ConfigError: rollouts would be sampled from another distribution than is trained.
    """
    rollout = config.rollout
    if rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0:
        raise ConfigError(
            f"rollout.top_p={rollout.top_p:g}, top_k={rollout.top_k}, min_p={rollout.min_p:g}: "
            "training needs the whole distribution (top_p=1, top_k=0, min_p=0), or the trainer's "
            "log-probabilities would be of another one; truncated sampling is for `m3rl rollout`"
        )


def rollout_sampling(config: Config) -> SamplingSettings:
    """How training completions are drawn."""
    rollout = config.rollout
    return SamplingSettings(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        max_tokens=rollout.max_tokens,
        stop=rollout.stop,
        capture_routing=rollout.capture_routing,
        capture_blocks=rollout.capture_blocks,
    )


def eval_sampling(config: Config) -> SamplingSettings:
    """How held-out completions are drawn.

    They leave no trace in the prefix cache: rollouts after an evaluation see the same engine as
    rollouts without one.
    """
    return SamplingSettings(
        temperature=config.eval.temperature,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        max_tokens=config.rollout.max_tokens,
        stop=config.rollout.stop,
        use_prefix_cache=False,
    )


class RolloutSide:
    """Replicas and scorers of a run. Both start in the background; `wait_started` before the first
    use."""

    def __init__(self, config: Config, chat: ChatFormat, data: Data) -> None:
        self._config = config
        self._data = data
        self.rewards = RewardPool(config.reward, config.data)
        self._environment = SingleTurn(
            chat, self.rewards, partial_credit=config.reward.partial_credit
        )
        self._chat = chat
        self.backend = generation_backend(config)

    def wait_started(self) -> None:
        self.backend.wait_started()
        self.rewards.wait_started()

    def collector(
        self,
        heal: Callable[..., bool],
        serving: Callable[[], Collection[int]] | None = None,
    ) -> Collector:
        """A collector on these replicas; for the arguments see `Collector`."""
        return Collector(
            self.backend,
            run_seed=self._config.run.seed,
            decode=self._chat.decode,
            score=self._environment.score,
            heal=heal,
            timeout_s=self._config.rollout.timeout_s,
            serving=serving,
        )

    def evaluate(self, collector: Collector) -> dict[str, float]:
        """`eval/<set>/*` of the current weights on the first eval.num_prompts held-out prompts.

        Raises:
            RewardError: no completion could be scored.
        """
        assert self._data.eval is not None, "the configuration was checked to have held-out prompts"
        prompts = self._data.eval.first(self._config.eval.num_prompts)
        groups, _ = collector.collect(prompts, 1, eval_sampling(self._config), stream=EVALUATION)
        name = self._data.eval.environment
        metrics = eval_metrics(name, groups)
        if f"eval/{name}/accuracy" not in metrics:
            raise RewardError(f"none of {len(prompts)} held-out completions could be scored")
        return metrics

    def close(self) -> None:
        """End all replica and scoring processes."""
        self.backend.close()
        self.rewards.close()
