"""python -m benchmarks.agreement FOLDER [--reference FILE] [--peer-site DIR]

How far the BF16 runtime on the GPU is from FP32 on the CPU, and how far vLLM is, on a seeded random
M3. FOLDER holds `hf/` (published names), `vllm/` (the peer's names) and `prompts.json`
({"prompts": [[token ids], …]}). `--reference` keeps the FP32 logprobs between runs.
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
from inference.config import EngineConfig, ModelConfig
from inference.engine import Engine
from inference.models.weights import read_checkpoint

NUM_DECODES = 24
"""Last tokens of each prompt that are computed one by one."""
HEAD_SCALES = (1.0, 0.1)
"""The scale of the logits sets the distance: at 0.1 their standard deviation is near 0.3."""

Logprobs = dict[str, np.ndarray]


def scaled_head(path: Path, config: ModelConfig, scale: float) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in read_checkpoint(path, config):
        yield name, tensor * scale if name == "lm_head.weight" else tensor


def runtime_logprobs(
    path: Path, prompts: list[list[int]], scale: float, *, device: str, num_decodes: int
) -> Logprobs:
    """By prompt: `lp<i>` of its tokens, `top<i>` the likeliest next tokens."""
    config = ModelConfig.from_pretrained(path)
    dtype = "bfloat16" if device == "cuda" else "float32"
    engine = Engine(config, EngineConfig(dtype=dtype, device=device, num_pages=80))
    engine.load_weights(scaled_head(path, config, scale), version=0)
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
    for scale in HEAD_SCALES:
        once = runtime_logprobs(path, prompts, scale, device="cpu", num_decodes=0)
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


def distance(found: Logprobs, reference: Logprobs, scale: float, count: int) -> dict[str, float]:
    """Over all tokens of all prompts: mean and 99th percentile of |Δ logprob|, top-1 agreement."""
    delta = np.concatenate(
        [np.abs(found[f"lp{i}"] - reference[f"lp{i}@{scale}"]) for i in range(count)]
    )
    same = np.concatenate([found[f"top{i}"] == reference[f"top{i}@{scale}"] for i in range(count)])
    return {
        "mean": float(delta.mean()),
        "p99": float(np.quantile(delta, 0.99)),
        "top1": float(same.mean()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--reference", type=Path)
    parser.add_argument("--peer-site", type=Path)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    prompts = json.loads((args.folder / "prompts.json").read_text())["prompts"]
    reference = reference_logprobs(args.folder / "hf", prompts, args.reference)
    if not torch.cuda.is_available():
        print(f"no GPU: the FP32 reference is in {args.reference}")
        return 0
    peer = None if args.peer_site is None else peer_logprobs(args.folder, args.peer_site)
    for scale in HEAD_SCALES:
        ours = runtime_logprobs(
            args.folder / "hf", prompts, scale, device="cuda", num_decodes=NUM_DECODES
        )
        value = distance(ours, reference, scale, len(prompts))
        if peer is not None and scale == 1.0:
            theirs = distance(peer, reference, scale, len(prompts))
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


if __name__ == "__main__":
    sys.exit(main())
