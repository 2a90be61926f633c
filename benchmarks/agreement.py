"""python -m benchmarks.agreement FOLDER [--reference FILE] [--peer-site DIR]
   python -m benchmarks.agreement FOLDER --quantization mxfp8

How far the BF16 runtime on the GPU is from FP32 on the CPU, and how far vLLM is, on a seeded random
M3. FOLDER holds `hf/` (published names), `vllm/` (the peer's names) and `prompts.json`
({"prompts": [[token ids], …]}). `--reference` keeps the FP32 logprobs between runs.

With `--quantization`: how far a replica in MXFP8 is from one that holds the same values
unquantised, both in BF16 on a GPU and in FP32 without one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.record import RESULTS, write_record
from benchmarks.teacher_forcing import prompt_logprobs
from inference.config import QUANTIZATIONS, EngineConfig, ModelConfig
from inference.engine import Engine
from inference.kernels.mxfp8 import dequantize, quantize
from inference.models.weights import published_tensors, read_checkpoint

NUM_DECODES = 24
"""Last tokens of each prompt that are computed one by one."""
HEAD_SCALES = (1.0, 0.1)
"""The scale of the logits sets the distance: at 0.1 their standard deviation is near 0.3."""
LARGEST_QUANTIZED = {"bfloat16": 5e-3, "float32": 1e-5}
"""Most mean |Δ logprob| of a replica in MXFP8 with the last of these scales, by dtype."""

Weights = Iterator[tuple[str, Tensor]]
Logprobs = dict[str, np.ndarray]


def scaled_head(path: Path, config: ModelConfig, scale: float) -> Weights:
    for name, tensor in read_checkpoint(path, config):
        yield name, tensor * scale if name == "lm_head.weight" else tensor


def without_quantization(tensors: Weights, config: ModelConfig, quantization: str) -> Weights:
    """What a replica with this `quantization` computes with, as tensors of their own dtype."""
    names = {spec.name for spec in published_tensors(config) if spec.is_quantized(quantization)}
    for name, tensor in tensors:
        if name in names:
            yield name, dequantize(*quantize(tensor.bfloat16()), torch.bfloat16)
        else:
            yield name, tensor


def dtype_on(device: str) -> str:
    return "bfloat16" if device == "cuda" else "float32"


def runtime_logprobs(
    config: ModelConfig,
    tensors: Weights,
    prompts: list[list[int]],
    *,
    device: str,
    num_decodes: int,
    quantization: str = "none",
) -> Logprobs:
    """By prompt: `lp<i>` of its tokens, `top<i>` the likeliest next tokens."""
    dtype = dtype_on(device)
    engine = Engine(
        config,
        EngineConfig(dtype=dtype, device=device, quantization=quantization, num_pages=80),
    )
    engine.load_weights(tensors, version=0)
    found: Logprobs = {}
    for i, prompt in enumerate(prompts):
        count = min(num_decodes, len(prompt) - 1)
        found[f"lp{i}"], found[f"top{i}"] = prompt_logprobs(engine, prompt, num_decodes=count)
    return found


def reference_logprobs(path: Path, prompts: list[list[int]], keep: Path | None) -> Logprobs:
    """FP32 on the CPU at both scales of the head; keys end in '@<scale>'."""
    if keep is not None and keep.exists():
        return dict(np.load(keep))
    found: Logprobs = {}
    config = ModelConfig.from_pretrained(path)
    for scale in HEAD_SCALES:
        weights = scaled_head(path, config, scale)
        once = runtime_logprobs(config, weights, prompts, device="cpu", num_decodes=0)
        found |= {f"{name}@{scale}": values for name, values in once.items()}
    if keep is not None:
        np.savez_compressed(keep, **found)  # type: ignore[arg-type]
    return found


def peer_logprobs(folder: Path, site: Path) -> Logprobs:
    """vLLM's, from a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "peer.npz"
        env = os.environ | {"PYTHONPATH": os.pathsep.join([".", str(site)])}
        command = [sys.executable, "-m", "benchmarks.vllm_logprobs", str(folder), str(out)]
        subprocess.run(command, env=env, check=True)
        return dict(np.load(out))


def distance(
    found: Logprobs, reference: Logprobs, count: int, suffix: str = ""
) -> dict[str, float]:
    """Over all tokens of all prompts: mean and 99th percentile of |Δ logprob|, top-1 agreement.

    `suffix`: of the keys in `reference`.
    """
    delta = np.concatenate(
        [np.abs(found[f"lp{i}"] - reference[f"lp{i}{suffix}"]) for i in range(count)]
    )
    same = np.concatenate([found[f"top{i}"] == reference[f"top{i}{suffix}"] for i in range(count)])
    return {
        "mean": float(delta.mean()),
        "p99": float(np.quantile(delta, 0.99)),
        "top1": float(same.mean()),
    }


def compare_quantized(args: argparse.Namespace, prompts: list[list[int]]) -> int:
    """A replica in MXFP8, quantised on receive, against one with the same values; 1 if too far."""
    path, quantization, scale = args.folder / "hf", args.quantization, HEAD_SCALES[-1]
    config = ModelConfig.from_pretrained(path)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def logprobs(weights: Weights, held: str) -> Logprobs:
        return runtime_logprobs(
            config, weights, prompts, device=device, num_decodes=NUM_DECODES, quantization=held
        )

    weights = scaled_head(path, config, scale)
    reference = logprobs(without_quantization(weights, config, quantization), "none")
    found = logprobs(scaled_head(path, config, scale), quantization)
    value = distance(found, reference, len(prompts))
    dtype = dtype_on(device)
    case = f"agreement of {quantization} with its values in {dtype}, {args.folder.name}"
    case = f"{case}, lm_head x {scale}"
    print(case, json.dumps(value), flush=True)
    if not value["mean"] <= LARGEST_QUANTIZED[dtype]:
        print(f"mean |delta logprob| is above {LARGEST_QUANTIZED[dtype]}: not recorded")
        return 1
    correct = {"mean |delta logprob| to the same values unquantised": value["mean"]}
    write_record("engine", case, results=args.results, value=value, correct=correct)
    return 0


def compare_with_fp32(args: argparse.Namespace, prompts: list[list[int]]) -> int:
    """BF16 on the GPU, and vLLM's, against FP32 on the CPU."""
    reference = reference_logprobs(args.folder / "hf", prompts, args.reference)
    if not torch.cuda.is_available():
        print(f"no GPU: the FP32 reference is in {args.reference}")
        return 0
    peer = None if args.peer_site is None else peer_logprobs(args.folder, args.peer_site)
    config = ModelConfig.from_pretrained(args.folder / "hf")
    for scale in HEAD_SCALES:
        weights = scaled_head(args.folder / "hf", config, scale)
        ours = runtime_logprobs(config, weights, prompts, device="cuda", num_decodes=NUM_DECODES)
        value = distance(ours, reference, len(prompts), f"@{scale}")
        if peer is not None and scale == 1.0:
            theirs = distance(peer, reference, len(prompts), f"@{scale}")
            value |= {f"vllm_{name}": number for name, number in theirs.items()}
        written: dict[str, Any] = write_record(
            "engine",
            f"agreement with FP32, {args.folder.name}, lm_head x {scale}",
            results=args.results,
            value=value,
            correct={"mean |delta logprob| to FP32 on the CPU": value["mean"]},
        )
        print(written["case"], json.dumps(value), flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--reference", type=Path)
    parser.add_argument("--peer-site", type=Path)
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default="none")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    prompts = json.loads((args.folder / "prompts.json").read_text())["prompts"]
    if args.quantization != "none":
        return compare_quantized(args, prompts)
    return compare_with_fp32(args, prompts)


if __name__ == "__main__":
    sys.exit(main())
