"""python -m benchmarks.engine [--peer vllm --peer-site DIR] [--slices layers6 rank] [--profile]
                               [--quantization mxfp8]

Decode steps and prefills of the runtime on two slices of M3, on one GPU, beside vLLM on the same
slices in the same command (in processes of its own, one after the other).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import slices
from benchmarks.gpu_trace import trace_steps
from benchmarks.kernels.harness import floor_us
from benchmarks.record import RESULTS, write_record
from benchmarks.teacher_forcing import decode_against_prefill
from inference.config import QUANTIZATIONS, EngineConfig, ModelConfig
from inference.engine import Engine, Request, SamplingParams
from inference.models.weights import published_tensors

AGREEMENT = 0.1
"""Largest mean |Δ logprob| between decode and prefill with which a time is believed."""


class M3Driver:
    """The bundled runtime with random weights of a realistic size.

    BF16 ones, which the engine itself quantises as `quantization` says.
    """

    def __init__(self, num_experts: int, quantization: str = "none") -> None:
        self.config = ModelConfig.from_dict(slices.slice_config(num_experts), source="slice")
        self.engine = Engine(
            self.config,
            EngineConfig(
                dtype="bfloat16",
                device="cuda",
                quantization=quantization,
                num_pages=5200,
                max_model_len=slices.MAX_LEN,
                max_running_requests=128,
                max_tokens_per_step=8192,
                cuda_graph_sizes=(1, 2, 4, 8, 16, 32, 64, 128),
                enable_prefix_cache=False,
            ),
        )
        self.engine.load_weights(random_weights(self.config), version=1)
        self._count = 0
        self._generated = 0.0

    def add(self, prompt: list[int], group: str | None, max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=self._count)
        self.engine.add(Request(str(self._count), prompt, params, group))
        self._count += 1

    def step(self) -> int:
        self.engine.step()
        before, self._generated = self._generated, self.engine.stats()["generated_tokens"]
        return int(self._generated - before)

    def experts_hit(self, num_steps: int = 3) -> float:
        """Different experts that a layer's tokens go to in a step, the mean over layers and steps.

        Steps without a graph, so that hooks run.
        """
        worker, found = self.engine._worker, []
        moes = [layer.mlp for layer in worker.model.layers if layer.is_moe]
        hooks = [
            moe.register_forward_hook(lambda _m, _x, y: found.append(len(y[1].unique())))
            for moe in moes
        ]
        graphs, worker.graphs = worker.graphs, None
        for _ in range(num_steps):
            self.step()
        worker.graphs = graphs
        for hook in hooks:
            hook.remove()
        return statistics.mean(found)

    def abort(self) -> None:
        self.engine.abort()
        self.engine.step()
        self._generated = self.engine.stats()["generated_tokens"]


def random_weights(config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """A value for every published tensor, with the standard deviations of the peer's."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    for spec in published_tensors(config):
        std = 0.05 if "norm" in spec.name else 1.0 if "embed" in spec.name else 0.02
        std = 0.01 if "e_score" in spec.name else std
        dtype = torch.float32 if spec.is_fp32 else torch.bfloat16
        tensor = torch.empty(spec.shape, dtype=dtype, device="cuda")
        yield spec.name, tensor.normal_(0, std, generator=generator)


class Recorder:
    """One record a case of a slice, with the peer's time where it has one."""

    def __init__(
        self,
        results: Path,
        slice_name: str,
        quantization: str,
        peer_us: dict[str, list[float]],
        error: float,
    ) -> None:
        self._results, self._peer_us, self._error = results, peer_us, error
        self._title = slice_name if quantization == "none" else f"{slice_name} {quantization}"
        self._quantization = quantization

    def __call__(
        self,
        case: str,
        times: slices.StepTimes,
        value: dict[str, float],
        floor: float | None = None,
    ) -> None:
        fields: dict[str, object] = {"value": value}
        if floor is not None:
            fields["floor_us"] = floor
        if case in self._peer_us:
            fields |= {"peer": "vllm", "peer_us": statistics.median(self._peer_us[case])}
        p10, p90 = times.quantiles if len(times.us) > 1 else (times.median, times.median)
        record = write_record(
            "engine",
            f"{self._title} {case}",
            results=self._results,
            us=times.median,
            p10=p10,
            p90=p90,
            peak_bytes=torch.cuda.max_memory_allocated(),
            correct={"decode vs prefill, mean |delta logprob|": self._error},
            **fields,
        )
        shown = {
            k: record[k] for k in ("us", "x_floor", "peer_us", "ratio", "value") if k in record
        }
        print(record["case"], json.dumps(shown), flush=True)

    def floor(self, batch: int, ctx: int, experts_hit: float, num_shared: int = 0) -> float:
        """Microseconds that a decode step's bytes take at least, see `slices.decode_bytes`."""
        return floor_us(
            slices.decode_bytes(
                batch, ctx, experts_hit, num_shared=num_shared, quantization=self._quantization
            )
        )


def run_layers6(driver: M3Driver, record: Recorder, profile: bool) -> None:
    for batch, ctx in slices.DECODES:
        requests = [(p, None) for p in slices.prompts(batch, ctx, seed=ctx + batch)]
        value: dict[str, float] = {}

        def trace(value: dict[str, float] = value, name: str = f"b{batch}@{ctx}") -> None:
            value |= trace_steps(driver.step, name if profile else None)
            value["experts_hit"] = driver.experts_hit()

        times = slices.time_decode(driver, requests, trace)
        record(
            f"b{batch}@{ctx}", times, value, floor=record.floor(batch, ctx, value["experts_hit"])
        )


def run_rank(driver: M3Driver, record: Recorder, profile: bool) -> None:
    for count, length in slices.PREFILLS:
        times = slices.time_prefill(driver, count, length, 1 if length > 100_000 else 3)
        value = {"tokens_per_s": 1e6 * count * length / times.median}
        record(f"prefill {count}x{length}", times, value)
        if profile:
            for prompt in slices.prompts(count, length, seed=length):
                driver.add(prompt, None, 4)
            trace_steps(driver.step, f"prefill {count}x{length}", min(3, count * length // 8192))
            driver.abort()
    for groups, ctx in slices.GROUPS:
        size = slices.GROUP_SIZE
        requests = slices.group_requests(groups, ctx)
        name = f"groups {groups}x{size}@{ctx}"

        value: dict[str, float] = {}

        def trace(value: dict[str, float] = value, name: str = name) -> None:
            if profile:
                trace_steps(driver.step, name)
            value["experts_hit"] = driver.experts_hit()

        times = slices.time_decode(driver, requests, trace)
        value["tokens_per_s"] = 1e6 * groups * size / times.median
        floor = record.floor(groups * size, ctx, value["experts_hit"], num_shared=size)
        record(name, times, value, floor=floor)


SLICES: dict[str, tuple[int, Callable[[M3Driver, Recorder, bool], None]]] = {
    "layers6": (128, run_layers6),
    "rank": (16, run_rank),
}


def run_peer(name: str, quantization: str, site: Path, seconds: float) -> dict[str, list[float]]:
    """Times of vLLM by case; what it could not do in `seconds` is missing."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        env = os.environ | {"PYTHONPATH": os.pathsep.join([".", str(site)])}
        command = [sys.executable, "-m", "benchmarks.vllm_engine", name, str(out)]
        command += ["--quantization", quantization, "--seconds", str(seconds)]
        # vLLM starts processes of its own: a session of theirs is ended as a whole.
        peer = subprocess.Popen(command, env=env, start_new_session=True)
        try:
            peer.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            print(f"vllm {name}: stopped after {seconds:.0f} s", flush=True)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(peer.pid, signal.SIGKILL)
            peer.wait()
        return json.loads(out.read_text()) if out.exists() else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", choices=("vllm",))
    parser.add_argument("--peer-site", type=Path, help="folder with the peer's packages")
    parser.add_argument("--peer-seconds", type=float, default=300.0, help="most of each slice")
    parser.add_argument("--slices", nargs="+", choices=SLICES, default=list(SLICES))
    parser.add_argument(
        "--quantization", choices=QUANTIZATIONS, default="none", help="of both engines' weights"
    )
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("the engine is timed on a CUDA device, and there is none")
    if args.peer and args.peer_site is None:
        parser.error("--peer needs --peer-site, the folder with its packages")
    for name in args.slices:
        peer_us = (
            run_peer(name, args.quantization, args.peer_site, args.peer_seconds)
            if args.peer
            else {}
        )
        start = time.monotonic()
        num_experts, run = SLICES[name]
        driver = M3Driver(num_experts, args.quantization)
        print(f"m3rl {name}: started in {time.monotonic() - start:.0f} s", flush=True)
        error = decode_against_prefill(driver.engine, slices.prompts(4, 2500, seed=7), 32)
        assert error <= AGREEMENT, f"decode and prefill differ by {error}: no time means anything"
        record = Recorder(args.results, name, args.quantization, peer_us, error)
        run(driver, record, args.profile)
        del driver
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
