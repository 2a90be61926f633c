"""python -m benchmarks.kernels [--only FAMILY ...] [--peers vllm flashinfer] [--seconds N]

Times every kernel at M3's shapes on one GPU. Each family runs in a process of its own, so that one
that fails takes no other along; peers are imported only if asked for.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.kernels.harness import Bench
from benchmarks.record import RESULTS

FAMILIES = (
    "index_decode",
    "index_prefill",
    "sparse_decode",
    "sparse_prefill",
    "dense_decode",
    "dense_prefill",
    "moe",
    "linear",
    "small",
)
"""Modules of this package, each with a `run(bench)`."""


def run_family(name: str, args: argparse.Namespace) -> int:
    bench = Bench(args.seconds, args.results, args.peers)
    importlib.import_module(f"benchmarks.kernels.{name}").run(bench)
    print(bench.summary(), flush=True)
    return 1 if bench.failures else 0


def run_in_child(name: str, args: argparse.Namespace) -> int:
    command = [sys.executable, "-m", "benchmarks.kernels", "--only", name]
    command += ["--seconds", str(args.seconds), "--results", str(args.results)]
    if args.peers:
        command += ["--peers", *args.peers]
    return subprocess.run(command, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--peers", nargs="*", choices=("vllm", "flashinfer"), default=())
    parser.add_argument("--seconds", type=float, default=90.0, help="most of each family")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("kernels are timed on a CUDA device, and there is none")
    if len(args.only) == 1:
        return run_family(args.only[0], args)
    codes = [run_in_child(name, args) for name in args.only]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
