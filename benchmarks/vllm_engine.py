"""The peer of `benchmarks.engine`: vLLM on the same slices, in a process of its own.

python -m benchmarks.vllm_engine layers6|rank OUT [--seconds N] [--quantization mxfp8]
Needs vLLM importable. Writes OUT, {case: [microseconds, …]}, after every case.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "CUDA_CACHE_MAXSIZE": str(1 << 32),  # the driver compiles Marlin's kernels for half a minute
    "TOKENIZERS_PARALLELISM": "false",
}

from benchmarks import slices

CAPTURE_SIZES = [1, 2, 4, 8, 16, 32, 64, 128]


class VllmDriver:
    """vLLM's engine, stepped from outside."""

    def __init__(self, num_experts: int, quantization: str, *, prefix_cache: bool) -> None:
        from vllm import LLM

        folder = Path(tempfile.mkdtemp())
        (folder / "config.json").write_text(json.dumps(model_config(num_experts, quantization)))
        self.llm = LLM(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            block_size=128,
            max_model_len=slices.MAX_LEN,
            max_num_seqs=128,
            max_num_batched_tokens=8192,
            enable_prefix_caching=prefix_cache,
            gpu_memory_utilization=0.88,
            enable_flashinfer_autotune=False,
            compilation_config={"cudagraph_capture_sizes": CAPTURE_SIZES},
        )
        self.llm.apply_model(_random_weights)
        self._count = 0
        self._tokens: dict[str, int] = {}

    def add(self, prompt: list[int], group: str | None, max_tokens: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=1.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        name = str(self._count)
        self._count += 1
        self._tokens[name] = 0
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def step(self) -> int:
        new = 0
        for output in self.llm.llm_engine.step():
            name, count = output.request_id, len(output.outputs[0].token_ids)
            if name not in self._tokens:
                continue
            new += count - self._tokens[name]
            self._tokens[name] = count
        return new

    def abort(self) -> None:
        self.llm.llm_engine.abort_request(list(self._tokens))
        self._tokens.clear()


def model_config(num_experts: int, quantization: str) -> dict[str, Any]:
    """The slice's `config.json`, with a `quantization_config` where weights are MXFP8."""
    from inference.config import ModelConfig
    from inference.models.weights import published_tensors
    from inference.quantize import quantization_config

    config = slices.slice_config(num_experts)
    if quantization != "none":
        specs = published_tensors(ModelConfig.from_dict(config, source="slice"))
        by_name = {spec.name: spec for spec in specs}
        config["quantization_config"] = quantization_config(by_name, quantization)
    return config


def _random_weights(model: Any) -> int:
    """Values of a realistic size for every weight: the dummy loader's are nearly zero.

    MXFP8 weights are packed already: any bytes of e4m3 values with a standard deviation of 20,
    times 2**-10.
    """
    import torch

    bank = torch.randn(1 << 28, device="cuda", dtype=torch.bfloat16).mul_(20)
    packed = bank.to(torch.float8_e4m3fn).view(torch.uint8)
    count = 0
    for name, parameter in model.named_parameters():
        values = parameter.data
        if not values.is_cuda or not values.numel():
            continue
        flat = values.view(-1)
        count += 1
        if values.dtype in (torch.float8_e8m0fnu, torch.uint8) and "scale" in name:
            flat.view(torch.uint8).fill_(127 - 10)
        elif values.dtype in (torch.int32, torch.float8_e4m3fn) and "weight" in name:
            for part in flat.view(torch.uint8).split(packed.numel()):
                part.copy_(packed[: part.numel()])
        elif values.is_floating_point():
            std = 0.05 if "norm" in name else 1.0 if "embed" in name else 0.02
            std = 0.01 if "e_score" in name else std
            for part in flat.split(1 << 30):
                part.normal_(0, std)
        elif values.numel() > 1 << 20:
            raise TypeError(f"{name} is {values.dtype}: not known how to fill it")
    torch.cuda.synchronize()
    return count


def warm_prefixes(driver: VllmDriver, requests: list[tuple[list[int], str | None]]) -> None:
    """Bring each prompt into the prefix cache, so that the members of a group share its pages."""
    tokens = 0
    leaders = {group: prompt for prompt, group in requests}
    for prompt in leaders.values():
        driver.add(prompt, None, 1)
    while tokens < len(leaders):
        tokens += driver.step()
    driver.abort()


def run_layers6(driver: VllmDriver, report: Any) -> None:
    for batch, ctx in slices.DECODES:
        requests = [(p, None) for p in slices.prompts(batch, ctx, seed=ctx + batch)]
        report(f"b{batch}@{ctx}", lambda r=requests: slices.time_decode(driver, r, lambda: None))


def run_rank(driver: VllmDriver, report: Any) -> None:
    for count, length in slices.PREFILLS:
        reps = 1 if length > 100_000 else 3
        report(
            f"prefill {count}x{length}",
            lambda c=count, n=length, r=reps: slices.time_prefill(driver, c, n, r),
        )
    for groups, ctx in slices.GROUPS:
        requests = slices.group_requests(groups, ctx)

        def run(requests: list[Any] = requests) -> slices.StepTimes:
            warm_prefixes(driver, requests)
            return slices.time_decode(driver, requests, lambda: None)

        report(f"groups {groups}x16@{ctx}", run)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("slice", choices=("layers6", "rank"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--quantization", default="none", help="as EngineConfig names it")
    args = parser.parse_args()
    stop = time.monotonic() + args.seconds
    times: dict[str, list[float]] = {}

    def report(case: str, run: Callable[[], slices.StepTimes]) -> None:
        if time.monotonic() > stop:
            print(f"vllm {case}: no time left")
            return
        try:
            times[case] = run().us
        except Exception:
            traceback.print_exc()
            return
        args.out.write_text(json.dumps(times))
        print(f"vllm {case}: {statistics.median(times[case]):.0f} us", flush=True)

    start = time.monotonic()
    driver = VllmDriver(
        128 if args.slice == "layers6" else 16,
        args.quantization,
        prefix_cache=args.slice == "rank",
    )
    print(f"vllm {args.slice}: started in {time.monotonic() - start:.0f} s", flush=True)
    (run_layers6 if args.slice == "layers6" else run_rank)(driver, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
