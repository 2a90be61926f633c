"""Few tokens times M3's weights beside cuBLAS; sampling."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.harness import Bench, floor_us, relative_error, time_graph
from inference.kernels.linear import SwiGLU, linear
from inference.kernels.sample_logprob import reference as sample_reference
from inference.kernels.sample_logprob import sample_logprob
from inference.kernels.swiglu_oai import swiglu_oai

SHAPES = {
    "qkv+index": (9856, 6144),
    "dense qkv": (9216, 6144),
    "o_proj": (6144, 8192),
    "dense gate_up": (24576, 6144),
    "dense down": (6144, 12288),
    "shared gate_up": (6144, 6144),
    "shared down": (6144, 3072),
    "lm_head": (200064, 6144),
}
"""Rows and columns of each weight; the head's product is in FP32."""
SWIGLU = SwiGLU(alpha=1.702, limit=7.0)
VOCAB = 200064


def run(bench: Bench) -> None:
    for name, shape in SHAPES.items():
        weights: list[Tensor] = []
        for num_tokens in (1, 8, 16, 32):
            call = partial(_linear, bench, name, shape, weights, num_tokens)
            bench.case(f"{name} t{num_tokens}", call)
    for num_rows in (1, 32, 128):
        bench.case(f"sampling r{num_rows}", partial(_sampling, bench, num_rows))


def _linear(
    bench: Bench, name: str, shape: tuple[int, int], weights: list[Tensor], num_tokens: int
) -> None:
    num_rows, size = shape
    num_bytes = 2 * num_rows * size
    if not weights:
        # More than the L2 several times over, so that a weight is cold whenever its turn comes.
        weights += [_randn(num_rows, size) * 0.02 for _ in range(-(-400_000_000 // num_bytes))]
    x = _randn(num_tokens, size)
    out_dtype = torch.float32 if name == "lm_head" else None
    wanted = x.float() @ weights[0].float().T
    correct = {"rel": relative_error(linear(x, weights[0], out_dtype), wanted)}
    # FP32 sums of the tensor cores are cut off, not rounded.
    tolerance = {"rel": 3e-5 if out_dtype else 4e-3}

    def cublas(weight: Tensor) -> Tensor:
        if out_dtype:
            return torch.mm(x, weight.T, out_dtype=out_dtype)
        return torch.nn.functional.linear(x, weight)

    def both(weight: Tensor) -> Tensor:
        return swiglu_oai(cublas(weight), alpha=SWIGLU.alpha, limit=SWIGLU.limit)

    timing = time_graph([lambda w=w: linear(x, w, out_dtype) for w in weights], inner=2)
    peer = time_graph([lambda w=w: cublas(w) for w in weights], inner=2)
    num_bytes += num_tokens * (2 * size + (4 if out_dtype else 2) * num_rows)
    bench.record(
        "linear",
        f"{name} t{num_tokens}",
        timing,
        correct=correct,
        tolerance=tolerance,
        floor=floor_us(num_bytes, 2.0 * num_tokens * num_rows * size),
        peer=("cublas", peer.us),
    )
    if "gate_up" not in name:
        return
    correct = {"rel": relative_error(linear(x, weights[0], swiglu=SWIGLU), both(weights[0]))}
    timing = time_graph([lambda w=w: linear(x, w, swiglu=SWIGLU) for w in weights], inner=2)
    peer = time_graph([lambda w=w: both(w) for w in weights], inner=2)
    bench.record(
        "linear",
        f"{name} with swiglu t{num_tokens}",
        timing,
        correct=correct,
        tolerance={"rel": 6e-3},
        floor=floor_us(num_bytes - num_tokens * num_rows, 2.0 * num_tokens * num_rows * size),
        peer=("cublas, then swiglu_oai", peer.us),
    )


def _sampling(bench: Bench, num_rows: int) -> None:
    logits = [3 * torch.randn(num_rows, VOCAB, device="cuda") for _ in range(4)]
    rows = {
        "temperature_R": torch.tensor([1.0, 0.7, 0.0, 1.3]).repeat(num_rows)[:num_rows].cuda(),
        "top_k_R": torch.zeros(num_rows, dtype=torch.int64, device="cuda"),
        "top_p_R": torch.ones(num_rows, device="cuda"),
        "min_p_R": torch.zeros(num_rows, device="cuda"),
        "seeds_R": torch.randint(-(1 << 62), 1 << 62, (num_rows,), device="cuda"),
        "positions_R": torch.arange(num_rows, device="cuda"),
    }
    found = sample_logprob(logits[0], **rows, has_cuts=False)
    wanted = sample_reference.sample_logprob(logits[0], **rows)
    timing = time_graph(
        [lambda x=x: sample_logprob(x, **rows, has_cuts=False) for x in logits], inner=4
    )
    bench.record(
        "small_ops",
        f"sample_logprob r{num_rows}",
        timing,
        correct={
            "other ids": float((found.ids_R != wanted.ids_R).sum()),
            "logprob": float((found.logprobs_R - wanted.logprobs_R).abs().max()),
            "raw logprob": float((found.raw_logprobs_R - wanted.raw_logprobs_R).abs().max()),
        },
        tolerance={"other ids": 0.0, "logprob": 2e-5, "raw logprob": 2e-5},
        floor=floor_us(4.0 * num_rows * VOCAB),
    )


def _randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")
