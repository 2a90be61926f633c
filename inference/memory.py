"""What each GPU of a replica must hold, worked out before anything is allocated.

How ranks share a model stands in `inference/parallel`. Weights, pages, captured choices and the
rope table are counted to the byte; the other buffers are estimated from what a step allocates, on
the large side. Standard library only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from inference.config import MXFP8_BLOCK_SIZE, ConfigError, EngineConfig, ModelConfig
from inference.parallel.config import ParallelConfig, local_config

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1}
WeightKind = Literal["expert", "dense", "plain", "fp32"]
"""'plain' and 'fp32' are never quantised."""
QUANTISED: dict[str, tuple[WeightKind, ...]] = {
    "none": (),
    "mxfp8": ("expert",),
    "mxfp8_released": ("expert", "dense"),
}
"""`EngineConfig.quantization` -> the kinds of weights that are MXFP8."""
MAX_RANKS = 256
"""A refusal looks no further for a number of GPUs that works."""

RESERVED_BYTES = 2 << 30
"""Estimate: CUDA's context, loaded kernels, cuBLAS workspaces, gaps in the allocator."""
NCCL_BYTES = 1 << 30
"""Estimate: buffers of the communicators, where there are several ranks."""
GRAPH_BYTES_PER_LAYER = 128 << 10
"""Estimate: what the driver keeps for the launches of one layer in one graph."""
SAMPLING_BYTES = 56
"""An element of the logits, most at once: FP32 logits, and for top-k and top-p its scaled copy, a
stable sort with its order, FP64 probabilities and their sums."""
PASS_TOKENS, TILE_TOKENS = 8192, 8
"""Block-major sparse attention: (token, head) pairs of a pass; rows that a list of tokens is padded
to."""
MAX_WIDENED_BYTES = 1 << 30
"""Most memory for FP8 pages that sparse attention converts for a prefill chunk."""
INDEX_SCRATCH_BYTES = 32 << 20
SHARED_ROWS = 16
"""Requests that read a shared page together; each shared unit has room for so many."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on each GPU of a replica, by use. With `dp` ranks each has pages of its own."""

    parallel: ParallelConfig
    weights: dict[str, int]
    """By class; scales of MXFP8 weights apart, and a shadow of all of them."""
    cache: dict[str, int]
    """What grows with `num_pages`: pages, and captured choices of the tokens in them."""
    buffers: dict[str, int]
    gpu_bytes: int | None
    """What a process may have of its GPU; None: not known."""
    max_num_pages: int | None
    """Most pages with which all of it fits; None: not known."""

    @property
    def uses(self) -> dict[str, int]:
        return {**self.weights, **self.cache, **self.buffers}

    @property
    def total_bytes(self) -> int:
        return sum(self.uses.values())


ONE_RANK = ParallelConfig()


def plan_memory(
    model: ModelConfig,
    engine: EngineConfig,
    parallel: ParallelConfig = ONE_RANK,
    *,
    gpu_bytes: int | None = None,
) -> MemoryPlan:
    """Add up what one rank of a replica will allocate.

    Args:
        engine: its limits are those of each rank; on device 'cpu' only what is counted exactly is
            planned.
        gpu_bytes: what a process may have of its GPU; None refuses nothing for its size.

    Raises:
        ConfigError: `engine` or `parallel` does not go with the model (names the values that do),
            or `gpu_bytes` is too little (what needs how much, and the nearest settings that fit).
    """
    plan = _measure(model, engine, parallel)
    if gpu_bytes is None:
        return plan
    if plan.total_bytes > gpu_bytes:
        raise ConfigError(_refusal(model, engine, plan, gpu_bytes))
    most = _most_pages(model, engine, parallel, gpu_bytes)
    return dataclasses.replace(plan, gpu_bytes=gpu_bytes, max_num_pages=most)


def count_parameters(model: ModelConfig) -> dict[str, int]:
    """Parameters of the text model by class of weight; the sum is `model.num_parameters`."""
    counts: dict[str, int] = {}
    for name, count, _ in _parts(model, _Shard.of(model, ONE_RANK)):
        counts[name] = counts.get(name, 0) + count
    return counts


def size_text(num_bytes: int) -> str:
    """'1.5 GiB'."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 1024:.1f} KiB"


@dataclass(frozen=True, slots=True)
class _Shard:
    """How much of a model one rank holds; all ranks hold equally much."""

    num_heads: int
    num_kv_heads: int
    """Index heads too: each KV head has one. There is one index key head, on every rank."""
    dense_width: int
    shared_width: int
    vocab_size: int
    """Of the head; the embedding is whole."""
    num_experts: int
    expert_width: int

    @classmethod
    def of(cls, model: ModelConfig, parallel: ParallelConfig) -> _Shard:
        local = local_config(model, parallel)
        return cls(
            num_heads=local.num_attention_heads,
            num_kv_heads=local.num_key_value_heads,
            dense_width=local.dense_intermediate_size,
            shared_width=local.shared_intermediate_size,
            vocab_size=model.vocab_size // parallel.tp,
            num_experts=model.num_local_experts // parallel.expert_groups,
            expert_width=local.intermediate_size,
        )


def _parts(model: ModelConfig, shard: _Shard) -> Iterator[tuple[str, int, WeightKind]]:
    """(class, elements, kind) of the weights of one rank."""
    C, D, Di = model.hidden_size, model.head_dim, model.index_head_dim
    layers, sparse, moe = model.num_hidden_layers, len(model.sparse_layers), len(model.moe_layers)
    yield "embedding", model.vocab_size * C, "plain"
    yield "head", shard.vocab_size * C, "plain"
    yield "attention", layers * 2 * C * D * (shard.num_heads + shard.num_kv_heads), "dense"
    yield "attention", layers * 2 * D, "plain"
    yield "index branch", sparse * C * Di * (shard.num_kv_heads + 1), "dense"
    yield "index branch", sparse * 2 * Di, "plain"
    yield "dense MLP", (layers - moe) * 3 * C * shard.dense_width, "dense"
    yield "routed experts", moe * shard.num_experts * 3 * C * shard.expert_width, "expert"
    yield "shared experts", moe * 3 * C * shard.shared_width, "dense"
    yield "router", moe * model.num_local_experts * (C + 1), "fp32"
    yield "norms", (2 * layers + 1) * C, "plain"


def _measure(model: ModelConfig, engine: EngineConfig, parallel: ParallelConfig) -> MemoryPlan:
    resolved = engine.resolve(model)
    parallel.check(model, engine.quantization)
    rank = _Rank(model, resolved, parallel, _Shard.of(model, parallel))
    return MemoryPlan(
        parallel=parallel,
        weights=rank.weights(),
        cache=rank.cache(),
        buffers=rank.buffers(),
        gpu_bytes=None,
        max_num_pages=None,
    )


@dataclass(frozen=True, slots=True)
class _Rank:
    """One rank of a replica; `engine` is resolved for `model`."""

    model: ModelConfig
    engine: EngineConfig
    parallel: ParallelConfig
    shard: _Shard

    def weights(self) -> dict[str, int]:
        quantised = QUANTISED[self.engine.quantization]
        sizes: dict[str, int] = {}
        scales: dict[str, int] = {}
        for name, count, kind in _parts(self.model, self.shard):
            width = 4 if kind == "fp32" else DTYPE_BYTES[self.engine.dtype]
            if kind in quantised:
                width = 1
                scales[f"{name}, scales"] = count // MXFP8_BLOCK_SIZE
            sizes[name] = sizes.get(name, 0) + width * count
        sizes = _nonzero({**sizes, **scales})
        return sizes | _nonzero({"shadow copy": self.engine.shadow_weights * sum(sizes.values())})

    def cache(self) -> dict[str, int]:
        model, engine, heads = self.model, self.engine, self.shard.num_kv_heads
        slots = engine.num_pages * model.index_block_size
        sparse = len(model.sparse_layers)
        kv = model.num_hidden_layers * 2 * heads * model.head_dim
        index = sparse * model.index_head_dim
        experts = len(model.moe_layers) * model.num_experts_per_tok
        longest = model.max_position_embeddings // model.index_block_size
        blocks = sparse * heads * model.index_topk_blocks * (2 if longest < 1 << 15 else 4)
        sizes = {
            "KV pages": slots * kv * self._width(engine.kv_dtype),
            "index pages": slots * index * self._width(engine.index_dtype),
            # One place more takes what padding would write.
            "captured routing": engine.capture_routing * (slots + 1) * experts,
            "captured blocks": engine.capture_blocks * (slots + 1) * blocks,
        }
        return _nonzero(sizes)

    def buffers(self) -> dict[str, int]:
        engine = self.engine
        assert engine.max_model_len is not None, "EngineConfig.resolve fills in the length"
        rope = {"rope table": engine.max_model_len * self.model.rotary_dim * 4}
        if engine.device.startswith("cpu"):
            return rope
        return _nonzero(
            rope
            | {
                "activations": self._step(engine.max_tokens_per_step),
                "CUDA graphs": self._graphs(),
                "exchange of tokens": self._exchange(engine.max_tokens_per_step),
                "CUDA, reserved": RESERVED_BYTES + (NCCL_BYTES if self.parallel.world > 1 else 0),
            }
        )

    def _width(self, dtype: str) -> int:
        return DTYPE_BYTES[self.engine.dtype if dtype == "auto" else dtype]

    def _step(self, num_tokens: int) -> int:
        """Most memory at once beyond what is always there, for a step of so many tokens."""
        rows = min(num_tokens, self.engine.max_running_requests)
        attention = self._attention(num_tokens) + max(
            self._decode_scratch(rows), self._prefill_scratch(num_tokens)
        )
        forward = self._stream(num_tokens) + max(attention, self._mlp(num_tokens))
        return max(forward, rows * self.model.vocab_size * SAMPLING_BYTES)

    def _stream(self, num_tokens: int) -> int:
        """The residual stream, its norm, and what the other half of the layer added to it."""
        return 3 * num_tokens * self.model.hidden_size * DTYPE_BYTES[self.engine.dtype]

    def _attention(self, num_tokens: int) -> int:
        """Projections, then queries, output and what the last product makes of it."""
        heads, kv_heads = self.shard.num_heads, self.shard.num_kv_heads
        row = (3 * heads + 2 * kv_heads) * self.model.head_dim + self.model.hidden_size
        return num_tokens * row * DTYPE_BYTES[self.engine.dtype]

    def _decode_scratch(self, rows: int) -> int:
        """Partial results of dense attention in FP32, scores of the index."""
        parts = self.shard.num_heads * self.model.head_dim * (SHARED_ROWS + 2)
        return rows * 4 * (parts + self.shard.num_kv_heads * self._most_request_pages())

    def _prefill_scratch(self, num_tokens: int) -> int:
        """A result of each (token, chosen block) of one or two passes of sparse attention."""
        model, kv_heads, pages = self.model, self.shard.num_kv_heads, self._most_request_pages()
        width, page_size = DTYPE_BYTES[self.engine.dtype], model.index_block_size
        pairs = min(num_tokens * kv_heads, PASS_TOKENS)
        passes = 1 if num_tokens * kv_heads <= PASS_TOKENS else 2
        choices = pairs * model.index_topk_blocks
        lists = min(choices, kv_heads * (pages + -(-num_tokens // page_size)))
        rows = passes * (choices + lists * (TILE_TOKENS - 1)) * self.shard.num_heads // kv_heads
        scratch = rows * (model.head_dim * width + 4) + INDEX_SCRATCH_BYTES
        if self._width(self.engine.kv_dtype) < width:
            page = 2 * kv_heads * page_size * model.head_dim * width
            scratch += min(MAX_WIDENED_BYTES, pages * page)
        return scratch

    def _mlp(self, num_tokens: int) -> int:
        """Of a dense layer or of the experts; with DP any token may come to this rank."""
        model, shard, width = self.model, self.shard, DTYPE_BYTES[self.engine.dtype]
        dense = num_tokens * width * (3 * shard.dense_width + model.hidden_size)
        shared = num_tokens * width * (3 * shard.shared_width + model.hidden_size)
        if self.parallel.dp > 1:
            num_tokens = self._most_received(num_tokens)
        products = model.num_experts_per_tok * (shard.expert_width * width + model.hidden_size * 4)
        return max(dense, shared + num_tokens * (products + model.hidden_size * width))

    def _graphs(self) -> int:
        """A graph for each size with and without shared pages; they share the memory of a step."""
        sizes = self.engine.cuda_graph_sizes
        assert sizes is not None, "EngineConfig.resolve fills in the sizes"
        if not sizes:
            return 0
        logits = 2 * sum(sizes) * self.model.vocab_size * 4
        launches = 2 * len(sizes) * self.model.num_hidden_layers * GRAPH_BYTES_PER_LAYER
        largest = sizes[-1]
        attention = self._attention(largest) + self._decode_scratch(largest)
        decode = self._stream(largest) + max(attention, self._mlp(largest))
        table = (self.engine.max_running_requests + 1) * self._most_request_pages() * 4
        return logits + launches + decode + table

    def _exchange(self, num_tokens: int) -> int:
        """What arrived from all ranks, the experts' copy of it, the sums that come back."""
        if self.parallel.dp == 1:
            return 0
        row = self.model.hidden_size * DTYPE_BYTES[self.engine.dtype]
        return 3 * self._most_received(num_tokens) * row

    def _most_received(self, num_tokens: int) -> int:
        """All ranks' shares of a step's tokens, in the fixed form or at worst."""
        return self.parallel.world * -(-num_tokens // self.parallel.tp)

    def _most_request_pages(self) -> int:
        assert self.engine.max_model_len is not None, "EngineConfig.resolve fills in the length"
        return -(-self.engine.max_model_len // self.model.index_block_size)


def _nonzero(sizes: dict[str, int]) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if size}


def _most_pages(
    model: ModelConfig, engine: EngineConfig, parallel: ParallelConfig, gpu_bytes: int
) -> int:
    """Most pages that fit; 0 when not even a request of `max_model_len` has room."""

    def fits(num_pages: int) -> bool:
        other = dataclasses.replace(engine, num_pages=num_pages)
        return _measure(model, other, parallel).total_bytes <= gpu_bytes

    longest = 1 if engine.max_model_len is None else engine.max_model_len
    low = -(-longest // model.index_block_size)
    if not fits(low):
        return 0
    high = 2 * low
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:  # low fits, high does not
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _refusal(model: ModelConfig, engine: EngineConfig, plan: MemoryPlan, gpu_bytes: int) -> str:
    over = plan.total_bytes - gpu_bytes
    lines = [
        f"a GPU of {_named(plan.parallel)} needs {size_text(plan.total_bytes)} "
        f"and has {size_text(gpu_bytes)}: {size_text(over)} too much",
        *(f"  {name:26} {size_text(size):>10}" for name, size in plan.uses.items()),
    ]
    remedies = list(_remedies(model, engine, plan, gpu_bytes))
    fits = "; ".join(remedies) if remedies else f"nothing with up to {MAX_RANKS} GPUs"
    return "\n".join([*lines, f"what fits: {fits}"])


def _named(parallel: ParallelConfig) -> str:
    return f"tp={parallel.tp}, ep={parallel.expert_groups}, dp={parallel.dp}"


def _remedies(
    model: ModelConfig, engine: EngineConfig, plan: MemoryPlan, gpu_bytes: int
) -> Iterator[str]:
    """The nearest settings that fit: fewer pages, no shadow, more GPUs, MXFP8."""
    if most := _most_pages(model, engine, plan.parallel, gpu_bytes):
        yield f"num_pages={most} or less"
    alone = dataclasses.replace(engine, shadow_weights=False)
    if engine.shadow_weights and _fits(model, alone, plan.parallel, gpu_bytes):
        yield "shadow_weights=False"
    scopes = ("none", "mxfp8") if engine.quantization == "none" else (engine.quantization,)
    for scope in scopes:
        other = dataclasses.replace(engine, quantization=scope)
        if parallel := _fewest_gpus(model, other, plan.parallel.world, gpu_bytes):
            kind = "" if scope == "none" else f" quantization={scope!r},"
            yield f"{parallel.world} GPU(s):{kind} {_named(parallel)}"


def _fewest_gpus(
    model: ModelConfig, engine: EngineConfig, least: int, gpu_bytes: int
) -> ParallelConfig | None:
    """The fewest GPUs from `least` on that hold the model; first without copies of KV heads."""
    K = model.num_key_value_heads
    for world in range(least, MAX_RANKS + 1):
        sizes = [tp for tp in range(1, model.num_attention_heads + 1) if world % tp == 0]
        for tp in sorted(sizes, key=lambda tp: (tp > K, -tp if tp <= K else tp)):
            dp = world // tp
            for d in (d for d in range(tp, 0, -1) if tp % d == 0):
                parallel = ParallelConfig(tp, dp, dp * d)
                if _fits(model, engine, parallel, gpu_bytes):
                    return parallel
    return None


def _fits(
    model: ModelConfig, engine: EngineConfig, parallel: ParallelConfig, gpu_bytes: int
) -> bool:
    try:
        return _measure(model, engine, parallel).total_bytes <= gpu_bytes
    except ConfigError:  # does not divide
        return False
