"""The two slices of M3 that engines are compared on, and how a decode step is timed.

Whole width, six layers: 3 dense, then 3 with MSA and experts. The rank slice has 16 experts a
layer: what one of eight expert-parallel ranks sees. No engine is imported here: any can use it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

K = 1024
MAX_LEN = 140 * K
GROUP_SIZE = 16
WARM_STEPS, TIMED_STEPS = 16, 48
NUM_LAYERS, NUM_DENSE = 6, 3
BF16, MXFP8 = 2.0, 1 + 1 / 32
"""Bytes of a weight."""

DECODES = ((1, 512), (32, 512), (128, 512), (1, 32 * K), (16, 32 * K), (1, 128 * K))
"""(batch, prompt tokens) of the six-layer slice."""
GROUPS = ((1, 4 * K), (8, 4 * K), (1, 32 * K), (8, 32 * K), (1, 128 * K), (4, 128 * K))
"""(groups of 16, prompt tokens) of the rank slice."""
PREFILLS = ((1, 8 * K), (1, 32 * K), (1, 128 * K), (16, 2 * K))
"""(prompts, tokens each) of the rank slice."""


def slice_config(num_experts: int) -> dict[str, Any]:
    """A published `config.json` of the slice with so many experts a layer."""
    sparse = [int(layer >= NUM_DENSE) for layer in range(NUM_LAYERS)]
    text = {
        "model_type": "minimax_m3_text",
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "vocab_size": 200064,
        "hidden_size": 6144,
        "intermediate_size": 3072,
        "dense_intermediate_size": 12288,
        "shared_intermediate_size": 3072,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 1024 * K,
        "rms_norm_eps": 1e-6,
        "use_gemma_norm": True,
        "attention_output_gate": False,
        "rope_theta": 5000000,
        "rotary_dim": 64,
        "partial_rotary_factor": 0.5,
        "hidden_act": "swigluoai",
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "use_qk_norm": True,
        "qk_norm_type": "per_head",
        "num_local_experts": num_experts,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "routed_scaling_factor": 2.0,
        "num_mtp_modules": 0,
        "moe_layer_freq": sparse,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_index_dim": 128,
            "sparse_num_index_heads": 4,
            "sparse_topk_blocks": 16,
            "sparse_block_size": 128,
            "sparse_disable_index_value": sparse,
            "sparse_score_type": "max",
            "sparse_init_block": 0,
            "sparse_local_block": 1,
            "sparse_attention_freq": sparse,
        },
    }
    return {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "model_type": "minimax_m3_vl",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "text_config": text,
    }


def linear_bytes(quantization: str = "none") -> float:
    """Bytes of the weights that every decode step reads, routed experts not among them."""
    C = 6144
    dense = NUM_DENSE * (9216 * C + C * 8192 + 3 * 12288 * C)
    sparse = (NUM_LAYERS - NUM_DENSE) * (9856 * C + C * 8192 + 3 * 3072 * C)
    of_layers = MXFP8 if quantization == "mxfp8_released" else BF16
    return of_layers * (dense + sparse) + BF16 * 200064 * C


def expert_bytes(quantization: str = "none") -> float:
    """Bytes of one routed expert in one layer."""
    return (BF16 if quantization == "none" else MXFP8) * 3 * 3072 * 6144


def decode_bytes(
    batch: int, ctx: int, experts_hit: float, *, num_shared: int = 0, quantization: str = "none"
) -> float:
    """Fewest bytes of a decode step with BF16 pages.

    `experts_hit` different experts serve its tokens in each layer; `num_shared` requests share each
    prompt (0: none do); `quantization` says which weights are MXFP8, as in `EngineConfig`.
    """
    num_sparse = NUM_LAYERS - NUM_DENSE
    experts = num_sparse * experts_hit * expert_bytes(quantization)
    prompts = batch / max(1, num_shared)
    read_whole = prompts * ctx * (NUM_DENSE * 2048 + num_sparse * 256)
    weights = linear_bytes(quantization) + experts
    return weights + read_whole + batch * num_sparse * min(ctx, 2048) * 2048


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Random token ids, the same for every engine, no prompt the beginning of another's."""
    drawn = np.random.default_rng((seed, count, length)).integers(2, 200000, (count, length))
    return [row.tolist() for row in drawn]


class Driver(Protocol):
    """An engine as the clock sees it."""

    def add(self, prompt: list[int], group: str | None, max_tokens: int) -> None: ...

    def step(self) -> int:
        """One engine step; returns how many tokens came out of it."""

    def abort(self) -> None:
        """End everything that runs."""


@dataclass(slots=True)
class StepTimes:
    """Microseconds between the ends of successive decode steps of a full batch."""

    us: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.us)

    @property
    def quantiles(self) -> tuple[float, float]:
        cuts = statistics.quantiles(self.us, n=10, method="inclusive")
        return cuts[0], cuts[-1]


def time_decode(
    driver: Driver, requests: list[tuple[list[int], str | None]], on_steady: Callable[[], None]
) -> StepTimes:
    """Prefill all requests, let the batch run warm, then time its steps.

    `on_steady` is called once the batch is warm, before the clock runs.
    """
    for prompt, group in requests:
        driver.add(prompt, group, WARM_STEPS + TIMED_STEPS + 256)
    full_steps = 0
    while full_steps < WARM_STEPS:
        full_steps += driver.step() == len(requests)
    on_steady()
    for _ in range(2):
        driver.step()
    ends = [time.perf_counter()]
    for _ in range(TIMED_STEPS):
        assert driver.step() == len(requests), "a step that was not a decode of the whole batch"
        ends.append(time.perf_counter())
    driver.abort()
    return StepTimes((np.diff(ends) * 1e6).tolist())


def time_prefill(driver: Driver, count: int, length: int, reps: int) -> StepTimes:
    """From adding `count` prompts to the last one's first token."""
    times = []
    for rep in range(reps + 1):
        batch = prompts(count, length, seed=1000 + rep)
        start, tokens = time.perf_counter(), 0
        for prompt in batch:
            driver.add(prompt, None, 1)
        while tokens < count:
            tokens += driver.step()
        times.append((time.perf_counter() - start) * 1e6)
        driver.abort()
    return StepTimes(times[1:])


def group_requests(
    num_groups: int, ctx: int, size: int = GROUP_SIZE
) -> list[tuple[list[int], str | None]]:
    """Groups of completions of the same prompt."""
    return [
        (prompt, f"group{index}")
        for index, prompt in enumerate(prompts(num_groups, ctx, seed=ctx + num_groups))
        for _ in range(size)
    ]
