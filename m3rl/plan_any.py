"""What a run of another architecture than M3 needs, from its config.json and safetensors headers.

Masters, gradients, moments and what else outlives a pass are counted to the byte, but that experts
are taken to divide evenly among ranks. Activations are estimated from the weights of a layer: for
each token what goes into and out of each of its matrices. Standard library only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference.memory import DTYPE_BYTES, NCCL_BYTES, RESERVED_BYTES, size_text
from m3rl.checkpoint_files import own_tokenizer_problems
from m3rl.config import Config, ConfigError
from m3rl.config_architecture import architecture_conflicts
from m3rl.model_layout import (
    EMBEDDING,
    HEAD,
    ModelLayoutError,
    max_positions,
    read_model_config,
    stop_ids,
    whole_layout,
)
from m3rl.plan_files import dataset_problems, is_here, missing_reward, run_dir_problems
from m3rl.plan_trainer import FP32, MIN_TILE_IDS, STAGED_BYTES, TILE_LOGITS, nonzero
from m3rl.plan_vllm import missing_vllm, received, vllm_memory, vllm_model_problems
from m3rl.types import TensorSlot
from m3rl.weight_sync.trainer_layout import chunk, expert_of

CLASSES = (
    ("routed experts", re.compile(r"\.experts\.")),
    ("embedding", re.compile(r"embed")),
    ("head", re.compile(r"^lm_head\.")),
    ("norms", re.compile(r"norm")),
    ("attention", re.compile(r"attn|attention")),
    ("MLPs", re.compile(r"mlp|feed_forward|ffn")),
)
"""The first that a name matches is its class."""


@dataclass(frozen=True, slots=True)
class AnyPlan:
    """Sizes of a run, in parameters, bytes and tokens."""

    name: str
    model_type: str
    num_ranks: int
    num_replicas: int
    parameters: dict[str, int]
    """By class of weight; empty where there are no weights yet."""
    trainer: dict[str, int]
    """Bytes of the busiest trainer rank by use; on a GPU, at its fullest moment."""
    host_bytes: int
    """AdamW's moments in the host's memory, of a rank."""
    sent_bytes: int
    """From the busiest trainer rank in a weight sync of one replica."""
    received_bytes: int
    """In a sync, by the worker of a replica that receives the most."""
    """To each worker: all weights, whole."""
    replica: dict[str, int]
    """Bytes of one rank of a replica by use; empty where none is started."""
    step_tokens: int
    notices: tuple[str, ...]
    needed: tuple[str, ...] = ()
    """What a launch needs and this machine lacks."""


def make_any_plan(
    config: Config,
    path: Path,
    required: Collection[str],
    *,
    notices: Collection[str],
    is_launch: bool,
    generates: bool,
) -> AnyPlan:
    """`plan.make_plan` for a model at `path` that is no M3.

    Args:
        notices: what is worth knowing of the configuration whatever the model.
    """
    notices, needed = list(notices), list[str]()
    problems = [
        f"{message} ({', '.join(f'{key} from {config.origin(key)}' for key in keys)})"
        for message, keys in architecture_conflicts(config, path, generates=generates)
    ]
    for part, faults in _model_problems(config, path, generates=generates).items():
        is_elsewhere = not is_launch and part != "model" and not is_here(path, part)
        is_required = part == "model" or part in required
        where = needed if is_elsewhere else problems if is_required else notices
        where += faults
    for fault, is_missing in dataset_problems(config):
        (needed if is_missing and not is_launch else problems).append(fault)
    problems += run_dir_problems(config)
    if generates and (absent := missing_vllm(config)):
        (problems if is_launch else needed).append(absent)
    if problems:
        raise ConfigError("\n".join(problems))
    needed += [] if is_launch else missing_reward(config)
    plan = _plan_of(config, path, notices, needed, generates=generates)
    if too_large := list(_gpu_problems(config, plan)):
        raise ConfigError("\n".join(too_large))
    return plan


def _model_problems(config: Config, path: Path, *, generates: bool) -> dict[str, list[str]]:
    """What is wrong with the model at `path`: 'model', 'tokenizer', 'weights' -> a line each."""
    content = read_model_config(path)
    vocab_size = content.get("vocab_size")
    found: dict[str, list[str]] = {"model": [], "tokenizer": [], "weights": []}
    try:
        found["tokenizer"] = own_tokenizer_problems(path, vocab_size, stop_ids(path))
        positions = max_positions(path)
        if generates and config.rollout.backend.kind == "vllm":
            found["model"] += vllm_model_problems(config, content)
        else:
            found["model"] += _length_problems(config, positions)
    except ModelLayoutError as error:
        found["model"].append(f"model.path: {error} ({config.origin('model.path')})")
    try:
        slots = {slot.name: slot for slot in whole_layout(path, config.policy.dtype)}
    except ModelLayoutError as error:
        found["weights"].append(str(error))
        return found
    embedding = slots.get(EMBEDDING)
    if embedding is not None and vocab_size not in (None, embedding.shape[0]):
        found["weights"].append(
            f"{path}: {EMBEDDING} has {embedding.shape[0]:,} rows, and config.json a vocab_size of "
            f"{vocab_size}; they belong to different models"
        )
    return found


def _length_problems(config: Config, positions: int) -> Iterator[str]:
    longest = config.data.max_prompt_tokens + config.rollout.max_tokens
    if longest > positions:
        yield (
            f"rollout.max_tokens: data.max_prompt_tokens + rollout.max_tokens = {longest} is more "
            f"than the model's max_position_embeddings {positions}; shorten them"
        )


def _plan_of(
    config: Config,
    path: Path,
    notices: Collection[str],
    needed: Collection[str],
    *,
    generates: bool,
) -> AnyPlan:
    """Add up what a run needs of a model whose files are right, as far as they are there.

    Raises:
        ConfigError: a replica does not fit its GPU.
    """
    try:
        slots = whole_layout(path, config.policy.dtype)
    except ModelLayoutError:  # none yet: `m3rl sft` makes them
        slots = []
    content, rollout = read_model_config(path), config.rollout
    rank = _Rank(config, content, slots)
    width = DTYPE_BYTES[config.policy.dtype]
    row = config.data.max_prompt_tokens + rollout.max_tokens
    return AnyPlan(
        name=config.run.name,
        model_type=str(content["model_type"]),
        num_ranks=config.train.num_ranks,
        num_replicas=rollout.backend.num_replicas,
        parameters=by_class(slots),
        trainer=rank.uses(),
        host_bytes=rank.adam if config.optimizer.offload else 0,
        sent_bytes=width * rank.own,
        received_bytes=_received_bytes(config, slots) if generates else width * rank.total,
        replica=_replica(config, slots) if slots and generates else {},
        step_tokens=rollout.prompts_per_step * rollout.group_size * row,
        notices=tuple(notices),
        needed=tuple(needed),
    )


def _received_bytes(config: Config, slots: Collection[TensorSlot]) -> int:
    backend = config.rollout.backend
    assert backend.kind == "vllm", "architecture_conflicts refuses the others"
    return sum(received(slots, backend.ranks_per_replica, backend.engine).values())


def _replica(config: Config, slots: Collection[TensorSlot]) -> dict[str, int]:
    """Bytes of one rank of a replica by use; only vLLM's serve such a model."""
    backend = config.rollout.backend
    assert backend.kind == "vllm", "architecture_conflicts refuses the others"
    width, memory_gib = DTYPE_BYTES[config.policy.dtype], backend.gpu_memory_gib
    weights = {name: width * count for name, count in by_class(slots).items()}
    gpu_bytes = None if memory_gib is None else int(memory_gib * (1 << 30))
    memory, refusal = vllm_memory(backend, weights, slots, gpu_bytes)
    if refusal is not None:
        raise ConfigError(refusal)
    return {"weights": sum(memory.weights.values()), **memory.cache, **memory.buffers}


def by_class(slots: Collection[TensorSlot]) -> dict[str, int]:
    """Parameters of each class of weight."""
    counts: dict[str, int] = {}
    for slot in slots:
        name = next((name for name, pattern in CLASSES if pattern.search(slot.name)), "others")
        counts[name] = counts.get(name, 0) + math.prod(slot.shape)
    return counts


def _gpu_problems(config: Config, plan: AnyPlan) -> Iterator[str]:
    """A trainer rank that does not fit its GPU."""
    memory_gib = config.rollout.backend.gpu_memory_gib
    if config.train.device == "cpu" or memory_gib is None:
        return
    gpu_bytes, needs = int(memory_gib * (1 << 30)), sum(plan.trainer.values())
    if needs <= gpu_bytes:
        return
    lines = [
        f"train: a GPU of {plan.num_ranks} ranks needs {size_text(needs)} and has "
        f"{size_text(gpu_bytes)}: {size_text(needs - gpu_bytes)} too much",
        *(f"  {name:26} {size_text(size):>10}" for name, size in plan.trainer.items()),
    ]
    cures = [f"train.num_ranks: {2 * plan.num_ranks}", "a smaller policy.micro_batch_tokens"]
    if not config.optimizer.offload:
        cures.insert(0, "optimizer.offload: true")
    if not config.policy.activation_checkpointing:
        cures.insert(0, "policy.activation_checkpointing: true")
    yield "\n  ".join([*lines, f"what needs less: {'; '.join(cures)}"])


class _Rank:
    """The busiest trainer rank."""

    def __init__(self, config: Config, content: dict[str, Any], slots: list[TensorSlot]) -> None:
        self.config, self.content, self.slots = config, content, slots
        self.ranks = config.train.num_ranks
        self.width = DTYPE_BYTES[config.policy.dtype]
        self.total = sum(math.prod(slot.shape) for slot in slots)
        experts = sum(math.prod(s.shape) for s in slots if expert_of(s.name) is not None)
        self.own = -(-experts // self.ranks) + sum(
            self._own(slot.shape) for slot in slots if expert_of(slot.name) is None
        )
        self.adam = 2 * FP32 * self.own

    def _own(self, shape: tuple[int, ...]) -> int:
        """Elements of the first rank's rows."""
        if not shape:
            return 1
        rows = chunk(shape[0], self.ranks, 0)
        return 0 if rows is None else (rows[1] - rows[0]) * math.prod(shape[1:])

    def uses(self) -> dict[str, int]:
        config = self.config
        lasting = {
            "FP32 masters": FP32 * self.own,
            "AdamW moments": 0 if config.optimizer.offload else self.adam,
            "weights before an update": self.width * self.own,
            "reference policy": FP32 * self.own if config.grpo.kl.coef > 0 else 0,
            "what was sent": self.width * self.own if config.weight_sync.delta else 0,
            "gradients": FP32 * self.own,
        }
        if config.train.device == "cpu" or not self.slots:
            return nonzero(lasting)
        lasting["CUDA, reserved"] = RESERVED_BYTES + (NCCL_BYTES if self.ranks > 1 else 0)
        staged = 2 * STAGED_BYTES if config.optimizer.offload else 0
        moments = [self._head(), self._layer(), {"staged moments": staged}]
        sizes = [sum(uses.values()) for uses in moments]
        return nonzero({**lasting, **moments[sizes.index(max(sizes))]})

    def _layers(self) -> dict[str, list[TensorSlot]]:
        found: dict[str, list[TensorSlot]] = {}
        for slot in self.slots:
            if slot.bucket.startswith("layer."):
                found.setdefault(slot.bucket, []).append(slot)
        return found

    def _activations(self, layer: list[TensorSlot]) -> int:
        """Estimate: bytes a token that a layer keeps, what its matrices read and write."""
        experts = max(1, len({expert_of(s.name) for s in layer} - {None}))
        share = int(self.content.get("num_experts_per_tok") or 1) / experts
        values = 0.0
        for slot in layer:
            if len(slot.shape) == 2:
                values += sum(slot.shape) * (1 if expert_of(slot.name) is None else share)
        return round(values * self.width)

    def _kept(self) -> int:
        """Bytes a token that all layers keep when the head computes."""
        layers, policy = self._layers(), self.config.policy
        per_layer = [self._activations(layer) for layer in layers.values()]
        if not policy.activation_checkpointing:
            return sum(per_layer)
        return len(layers) * self.width * int(self.content["hidden_size"]) + max(per_layer)

    def _gathered(self, elements: int) -> dict[str, int]:
        """Weights in the wire's dtype and their gradients on the way, of so many parameters."""
        if self.ranks == 1:
            rounded = 0 if self.width == FP32 else self.width * elements
            return {"rounded weights": rounded, "fresh gradients": FP32 * elements}
        return {
            "gathered weights": 2 * self.width * elements,
            "gradients to be summed": (self.width + FP32) * elements,
        }

    def _head(self) -> dict[str, int]:
        tokens = self.config.policy.micro_batch_tokens
        shapes = {slot.name: slot.shape for slot in self.slots}
        vocab, hidden = shapes.get(HEAD) or shapes[EMBEDDING]
        tile = min(vocab, max(MIN_TILE_IDS, TILE_LOGITS // tokens))
        rows = tokens * (hidden * (3 * self.width + FP32) + tile * (FP32 + self.width))
        kept = tokens * self._kept()
        return self._gathered(vocab * hidden) | {"kept by layers": kept, "logits": rows}

    def _layer(self) -> dict[str, int]:
        tokens = self.config.policy.micro_batch_tokens
        largest = max(self._layers().values(), key=lambda slots: sum(map(_size, slots)))
        backward = 2 * tokens * self._activations(largest)
        return self._gathered(sum(map(_size, largest))) | {
            "kept by layers": tokens * self._kept(),
            "a layer's backward pass": backward,
        }


def _size(slot: TensorSlot) -> int:
    return math.prod(slot.shape)
