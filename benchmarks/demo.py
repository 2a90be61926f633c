"""The demo as a benchmark: wall time, peak memory, held-out accuracy before and after, one record a
seed.

python -m benchmarks.demo --seeds 0 1 2
python -m benchmarks.demo --config configs/tiny_vllm_cpu.yaml --seeds 0
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from benchmarks.record import write_record

CONFIG = Path("configs/tiny_cpu.yaml")
MISMATCH = "mismatch/logprob_abs_diff_mean"


class TreeMemory(threading.Thread):
    """Largest sum of PSS over a process and all its descendants, in bytes."""

    def __init__(self, pid: int, interval_s: float = 0.5) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self._root = psutil.Process(pid)
        self._interval_s = interval_s
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(self._interval_s):
            self.peak_bytes = max(self.peak_bytes, self._sum())

    def stop(self) -> int:
        self._done.set()
        self.join()
        return self.peak_bytes

    def _sum(self) -> int:
        total = 0
        try:
            family = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return 0
        for process in family:
            try:
                total += process.memory_full_info().pss
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return total


def run_demo(config: Path, seed: int, run_dir: Path, overrides: list[str]) -> dict[str, float]:
    """One run of the demo in a fresh process; raises when it fails."""
    command = [sys.executable, "-m", "m3rl.cli", "train", str(config)]
    command += [f"run.dir={run_dir}", f"run.seed={seed}", *overrides]
    start = time.perf_counter()
    process = subprocess.Popen(command)
    memory = TreeMemory(process.pid)
    memory.start()
    code = process.wait()
    peak_bytes = memory.stop()
    if code != 0:
        raise SystemExit(f"the demo with seed {seed} ended with exit code {code}")
    evaluations = [json.loads(line) for line in (run_dir / "evals.jsonl").read_text().splitlines()]
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        "wall_s": time.perf_counter() - start,
        "peak_bytes": peak_bytes,
        "accuracy_before": evaluations[0]["accuracy"],
        "accuracy_after": evaluations[-1]["accuracy"],
        # A step whose groups were all solved trains on nothing and compares nothing.
        "mismatch_max": max(step[MISMATCH] for step in steps if MISMATCH in step),
        "steps": len(steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=CONFIG, help="a YAML file")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("overrides", nargs="*", help="key=value, as for `m3rl train`")
    arguments = parser.parse_args()
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            result = run_demo(arguments.config, seed, Path(folder) / "run", arguments.overrides)
        gain = result["accuracy_after"] - result["accuracy_before"]
        record = write_record(
            bench="demo",
            case=f"{arguments.config.stem} seed {seed}",
            peak_bytes=int(result["peak_bytes"]),
            value={"accuracy_gain": gain, **result},
            correct={
                "compared": "trainer's and runtime's log-probabilities of the sampled tokens",
                "worst_step_mean_abs_diff": result["mismatch_max"],
            },
        )
        print(json.dumps(record))


if __name__ == "__main__":
    main()
