"""What the benches of training share: shapes of M3 and small ones, time, peak memory, what does
not fit."""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import slices
from benchmarks.kernels.harness import Timing, time_eager
from inference.config import ModelConfig
from m3rl.rank_group import deterministic

K = 1024
GB = 1e9


def published_config(num_dense: int, num_sparse: int, **sizes: Any) -> dict[str, Any]:
    """A published `config.json` of M3 with so many dense layers, then layers with MSA and experts.

    `sizes` replace keys of its text part, `sparse_*` ones those of its attention's.
    """
    raw = slices.slice_config(num_experts=128)
    text = raw["text_config"]
    freq = [0] * num_dense + [1] * num_sparse
    text |= {"num_hidden_layers": len(freq), "moe_layer_freq": freq}
    text |= {key: value for key, value in sizes.items() if not key.startswith("sparse_")}
    text["sparse_attention_config"] |= {
        "sparse_attention_freq": freq,
        "sparse_disable_index_value": freq,
    } | {key: value for key, value in sizes.items() if key.startswith("sparse_")}
    return raw


TINY = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 32,
    "dense_intermediate_size": 96,
    "shared_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sparse_num_index_heads": 2,
    "sparse_index_dim": 16,
    "sparse_topk_blocks": 3,
    "sparse_block_size": 4,
}
"""Sizes with which all cases run on a CPU in seconds."""


def model_config(raw: dict[str, Any]) -> ModelConfig:
    return ModelConfig.from_dict(raw, source="benchmark")


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one call."""

    timing: Timing
    peak_bytes: int
    """Most that it had allocated at a time beyond what was there before; 0 on the CPU."""

    @property
    def peak_gb(self) -> float:
        return self.peak_bytes / GB


def cost_of(run: Callable[[], Any], device: torch.device, reps: int = 5) -> Cost:
    """Time and memory of `run`, whose results are dropped.

    Before it is timed it runs twice: once to compile, once for its peak.

    Raises:
        torch.OutOfMemoryError: it does not fit.
    """
    run()
    if device.type == "cpu":
        return Cost(timing_of([_seconds(run, device) for _ in range(reps)]), 0)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return Cost(time_eager(run, reps=max(2, reps), warmup=0), peak)


def cost_if_it_fits(run: Callable[[], Any], device: torch.device, reps: int = 5) -> Cost | None:
    """`cost_of`, or None where the device's memory is too small."""
    free_memory()
    cost = None
    # Tensors live in the frames of the exception until the block ends.
    with contextlib.suppress(torch.OutOfMemoryError):
        cost = cost_of(run, device, reps)
    free_memory()
    return cost


def as_trained(run: Callable[[], Any]) -> Callable[[], Any]:
    """`run` under the switches that a trainer rank sets: sums in a fixed order."""

    def inside() -> Any:
        with deterministic():
            return run()

    return inside


def make_deterministic_products() -> None:
    """What cuBLAS needs to add in a fixed order; to be called before CUDA starts."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def case_name(what: str, num_tokens: int) -> str:
    return f"{what}, {num_tokens // K}K" if num_tokens >= K else f"{what}, {num_tokens}"


def free_memory() -> None:
    """Give what nobody holds any longer back to the device."""
    gc.collect()
    torch.cuda.empty_cache()


def timing_of(seconds: list[float]) -> Timing:
    """Of at least two calls."""
    us = [1e6 * value for value in seconds]
    cuts = statistics.quantiles(us, n=10, method="inclusive")
    return Timing(statistics.median(us), cuts[0], cuts[-1])


def wall_timing(run: Callable[[], Any], device: torch.device, reps: int) -> Timing:
    """What a caller waits for: the host's time is in it, and the device has finished."""
    return timing_of([_seconds(run, device) for _ in range(max(2, reps))])


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    _wait(device)
    begin = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - begin


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def watched_gradients(model: nn.Module, ends: tuple[str, ...]) -> Iterator[dict[str, Tensor]]:
    """Copies on the host of gradients added inside, of weights whose names have such an end."""
    found: dict[str, Tensor] = {}

    def keep(name: str, weight: Tensor) -> None:
        assert weight.grad is not None
        found[name] = weight.grad.float().cpu()

    handles = [
        weight.register_post_accumulate_grad_hook(partial(keep, name))
        for name, weight in model.named_parameters()
        if name.endswith(ends) and weight.requires_grad
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


class Random:
    """Normal values on a device, the same in every run."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, std: float = 1.0) -> Tensor:
        """In the dtype, drawn in it."""
        out = torch.empty(shape, dtype=self.dtype, device=self.device)
        return out.normal_(0, std, generator=self._generator)

    def choices(self, num_tokens: int, num_experts: int, count: int) -> tuple[Tensor, Tensor]:
        """(ids, weights): `count` different experts of each token, [T, A] int32 and FP32."""
        score = torch.rand((num_tokens, num_experts), device=self.device, generator=self._generator)
        best = score.topk(count)
        return best.indices.int(), best.values
