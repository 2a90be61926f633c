"""python -m benchmarks.kernels [--only FAMILY ...] [--peers vllm flashinfer] [--seconds N]"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

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


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--peers", nargs="*", choices=("vllm", "flashinfer"), default=())
    parser.add_argument("--seconds", type=float, default=90.0, help="most of each family")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    failures = 0
    for name in args.only:
        bench = Bench(args.seconds, args.results, args.peers)
        importlib.import_module(f"benchmarks.kernels.{name}").run(bench)
        print(bench.summary(), flush=True)
        failures += len(bench.failures)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
