"""Engines over two ranks against one: the same tokens, near logprobs, decode throughput.

Part of `benchmarks.parallel`. Every rank first runs an engine of its own (EP 1), then its part of
each division of two ranks.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import slices
from benchmarks.agreement import scaled_head
from benchmarks.engine import random_weights
from benchmarks.kernels.harness import Bench, Timing
from benchmarks.record import write_record
from benchmarks.teacher_forcing import prompt_logprobs
from inference.config import EngineConfig, ModelConfig
from inference.engine import Engine, Request, RequestOutput, SamplingParams
from inference.models.weights import published_tensors
from inference.parallel.config import ParallelConfig
from inference.parallel.groups import ParallelGroups

TIMEOUT_S = 120.0
BATCH, CONTEXT = 128, 512
FORCED = 24
"""Last tokens of a prompt that are computed one by one."""
MAX_NEAR = 5e-3
"""Mean |Δ logprob| between BF16 engines, with logits of the size of a trained model's."""
MAX_SLICE = 0.1
"""The same on the slice, whose random logits are wide: beyond it a time means nothing."""


def divisions() -> dict[str, ParallelConfig]:
    """Of two ranks."""
    return {"tp 2, ep 2": ParallelConfig(tp=2), "dp 2, ep 2": ParallelConfig(dp=2)}


class Clock:
    """Says, on rank 0, what of a part is done and how long it took."""

    def __init__(self, name: str, is_loud: bool) -> None:
        self._name, self._is_loud, self._last = name, is_loud, time.monotonic()

    def lap(self, what: str) -> None:
        torch.cuda.synchronize()
        before, self._last = self._last, time.monotonic()
        if self._is_loud:
            print(f"{self._name}: {what} {self._last - before:.1f} s", flush=True)


class EngineBench:
    """The cases of one rank; rank 0 writes the records."""

    def __init__(self, bench: Bench, results: Path, name: str) -> None:
        """`name`: of the part, in what is printed."""
        self._bench, self._results = bench, results
        self._rank = dist.get_rank()
        self._clock = Clock(name, is_loud=not self._rank)
        self._groups = {
            name: ParallelGroups.create(config, timeout_s=TIMEOUT_S)
            for name, config in divisions().items()
        }
        self._host = next(iter(self._groups.values())).host_group
        self._clock.lap("groups")

    def close(self) -> None:
        for groups in self._groups.values():
            groups.close()

    def everyone(self, mine: Any) -> list[Any]:
        """What each rank has, in order."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine, self._host)
        return found

    def tokens(self) -> None:
        """FP32 on a small model: every request's tokens and logprobs are those of one rank."""
        asked = _requests()
        one = _run(_small_engine(None), asked)
        self._clock.lap("EP 1")
        for name, groups in self._groups.items():
            dp, part = groups.config.dp, groups.config.dp_rank(groups.rank)
            engine = _small_engine(groups)
            self._compare(name, _run(engine, asked[part::dp]), one)
            if dp > 1:  # the other group computes padding, of prefills too
                self._compare(f"{name}, all in one", _run(engine, asked if part else []), one)

    def _compare(
        self, name: str, mine: dict[str, RequestOutput], one: dict[str, RequestOutput]
    ) -> None:
        merged: dict[str, RequestOutput] = {}
        for found in self.everyone(mine):
            merged |= found
        pairs = [(merged[key], wanted) for key, wanted in one.items()]
        differ = sum(int((a.token_ids != b.token_ids).sum()) for a, b in pairs)
        gap = max(float(np.abs(a.logprobs - b.logprobs).max()) for a, b in pairs)
        self._clock.lap(name)
        value = {"different_tokens": differ, "max_logprob_gap": gap}
        assert not differ, f"{name}: {differ} tokens differ from EP 1's, logprobs by {gap}"
        self._note(f"tokens in FP32, {name}", value, {"different tokens": differ})

    def _note(self, case: str, value: dict[str, float], correct: dict[str, float]) -> None:
        """A record without a time."""
        if self._rank:
            return
        print(case, json.dumps(value), flush=True)
        write_record("parallel", case, results=self._results, value=value, correct=correct)

    def agreement(self, folder: Path) -> None:
        """BF16 on a published small model, `lm_head` x 0.1: distance from one rank's logprobs."""
        prompts = json.loads((folder / "prompts.json").read_text())["prompts"][1::2]
        one = _forced(_folder_engine(folder, None), prompts)
        self._clock.lap("EP 1")
        for name, groups in self._groups.items():
            found = _forced(_folder_engine(folder, groups), prompts)
            error = max(self.everyone(float(np.abs(found - one).mean())))
            self._clock.lap(name)
            assert error <= MAX_NEAR, f"{name}: logprobs are {error} from EP 1's"
            value = {"mean_logprob_gap": error, "max": float(np.abs(found - one).max())}
            case = f"logprobs in BF16, {name}, {folder.name}, lm_head x 0.1"
            self._note(case, value, {"mean |delta logprob| to EP 1": error})

    def decode(self, quantization: str, *, is_rehearsal: bool) -> None:
        """Decode steps of the six-layer slice at a batch of 128 in all, and of 128 a dp group."""
        prompts = slices.prompts(2, 600, seed=7)
        wanted, (base,) = self._time_slice(quantization, "EP 1", None, prompts, [BATCH])
        if not is_rehearsal:
            self._record(f"{quantization}, EP 1, batch {BATCH}", base, 0.0, None, BATCH)
        for name, groups in self._groups.items():
            dp = groups.config.dp
            batches = [BATCH] if dp == 1 else [BATCH, BATCH * dp]
            found, times = self._time_slice(quantization, name, groups, prompts, batches)
            if is_rehearsal:
                continue
            error = float(np.abs(found - wanted).mean())
            for batch, each in zip(batches, times, strict=True):
                case = f"{quantization}, {name}, batch {batch}"
                self._record(case, each, error, base.us, batch)

    def _time_slice(
        self,
        quantization: str,
        name: str,
        groups: ParallelGroups | None,
        prompts: list[list[int]],
        batches: list[int],
    ) -> tuple[np.ndarray, list[Timing]]:
        """(logprobs of the prompts, decode steps of each batch, which the dp groups share)."""
        name = f"{quantization}, {name}"
        driver = SliceDriver(quantization, groups)
        self._clock.lap(f"{name}, loaded")
        logprobs = _forced(driver.engine, prompts)
        self._clock.lap(f"{name}, logprobs")
        dp, part = 1, 0
        if groups is not None:
            dp, part = groups.config.dp, groups.config.dp_rank(groups.rank)
        times = []
        for batch in batches:
            times.append(driver.time(batch // dp, part))
            self._clock.lap(f"{name}, batch {batch}")
        del driver
        gc.collect()
        torch.cuda.empty_cache()
        return logprobs, times

    def _record(
        self, case: str, times: Timing, error: float, base_us: float | None, batch: int
    ) -> None:
        slowest = max(self.everyone(times), key=lambda one: one.us)
        error = max(self.everyone(error))
        if self._rank:
            return
        value = {"tokens_per_s": 1e6 * batch / slowest.us}
        if base_us is not None:
            value["x_ep1"] = batch / slowest.us / (BATCH / base_us)
        self._bench.record(
            "parallel",
            f"layers6 decode@{CONTEXT}, {case}",
            slowest,
            correct={"mean |delta logprob| to EP 1": error},
            tolerance={"mean |delta logprob| to EP 1": MAX_SLICE},
            value=value,
        )
        print(case, json.dumps({"us": slowest.us, **value, "error": error}), flush=True)


class SliceDriver:
    """The six-layer slice with random weights, for `slices.time_decode`."""

    def __init__(self, quantization: str, groups: ParallelGroups | None) -> None:
        config = ModelConfig.from_dict(slices.slice_config(128), source="slice")
        options = EngineConfig(
            dtype="bfloat16",
            device="cuda",
            quantization=quantization,
            num_pages=1100,
            max_model_len=4096,
            max_running_requests=BATCH,
            max_tokens_per_step=8192,
            cuda_graph_sizes=(BATCH // 2, BATCH),
            enable_prefix_cache=False,
        )
        self.engine = Engine(config, options, groups=groups)
        self.engine.load_weights(random_weights(config), version=1)
        if groups is not None:
            self.engine.step()  # nobody has work
        self._count, self._generated = 0, 0.0

    def time(self, batch: int, part: int) -> Timing:
        asked = [(ids, None) for ids in slices.prompts(batch, CONTEXT, seed=part)]
        times = slices.time_decode(self, asked, lambda: None)
        return Timing(times.median, *times.quantiles)

    def add(self, prompt: list[int], group: str | None, max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=self._count)
        self.engine.add(Request(str(self._count), prompt, params, group))
        self._count += 1

    def step(self) -> int:
        self.engine.step()
        before, self._generated = self._generated, self.engine.stats()["generated_tokens"]
        return int(self._generated - before)

    def abort(self) -> None:
        self.engine.abort()
        while self.engine.has_work:
            self.engine.step()
        self._generated = self.engine.stats()["generated_tokens"]


def _small_engine(groups: ParallelGroups | None) -> Engine:
    """Narrow heads: FP32 products over M3's take the compiler a minute."""
    config = small_config()
    options = EngineConfig(
        device="cuda", num_pages=200, max_running_requests=8, cuda_graph_sizes=(4, 8)
    )
    engine = Engine(config, options, groups=groups)
    engine.load_weights(_small_weights(config), 0)
    return engine


def small_config() -> ModelConfig:
    """The slice with small sizes: blocks of 32, of which a query chooses 4."""
    raw = slices.slice_config(8)
    text = raw["text_config"]
    text |= {
        "hidden_size": 256,
        "vocab_size": 1024,
        "num_attention_heads": 16,
        "head_dim": 32,
        "rotary_dim": 16,
        "intermediate_size": 128,
        "dense_intermediate_size": 256,
        "shared_intermediate_size": 128,
        "max_position_embeddings": 4096,
    }
    text["sparse_attention_config"] |= {
        "sparse_index_dim": 32,
        "sparse_block_size": 32,
        "sparse_topk_blocks": 4,
    }
    return ModelConfig.from_dict(raw, source="small")


def _small_weights(config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator(device="cuda").manual_seed(0)
    for spec in published_tensors(config):
        std = (
            0.2 if len(spec.shape) == 1 else 1.0 if "embed" in spec.name else spec.shape[-1] ** -0.5
        )
        tensor = torch.empty(spec.shape, device="cuda").normal_(0, std, generator=generator)
        yield spec.name, tensor


def _requests() -> list[Request]:
    """Some alone, some in groups that share a prompt; of different lengths."""
    rng = np.random.default_rng(0)
    made = []
    for i, length in enumerate((3, 150, 17, 400, 260)):
        ids = rng.integers(3, 1024, length).tolist()
        for sample in range(2 if i % 2 else 1):
            temperature, seed = float(i % 2), 10 * i + sample
            params = SamplingParams(
                max_tokens=20 + i, temperature=temperature, seed=seed, ignore_eos=True
            )
            made.append(Request(f"{i}.{sample}", ids, params, f"group{i}"))
    return made


def _run(engine: Engine, asked: list[Request]) -> dict[str, RequestOutput]:
    for request in asked:
        engine.add(request)
    found = {output.request_id: output for output in engine.step()}
    while engine.has_work:
        found |= {output.request_id: output for output in engine.step()}
    return found


def _folder_engine(folder: Path, groups: ParallelGroups | None) -> Engine:
    config = ModelConfig.from_pretrained(folder / "hf")
    options = EngineConfig(dtype="bfloat16", device="cuda", num_pages=80)
    engine = Engine(config, options, groups=groups)
    engine.load_weights(scaled_head(folder / "hf", config, 0.1), version=0)
    if groups is not None:
        engine.step()
    return engine


def _forced(engine: Engine, prompts: list[list[int]]) -> np.ndarray:
    """Logprobs of all tokens of the prompts; all ranks compute the same ones at the same time."""
    return np.concatenate(
        [prompt_logprobs(engine, ids, num_decodes=min(FORCED, len(ids) - 1))[0] for ids in prompts]
    )
