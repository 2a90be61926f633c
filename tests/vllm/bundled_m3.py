"""The bundled runtime as the other side of a comparison, in a process of its own: vLLM's CPU build
puts placeholders in the place of parts of torch.cuda that the runtime names."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Answer(NamedTuple):
    token_ids: list[list[int]]
    logprobs: list[np.ndarray]
    finish_reasons: list[str]
    scores: list[np.ndarray]
    """Log-probabilities of the prompts."""


def answer(path: Path, prompts: Sequence[np.ndarray], max_tokens: int) -> Answer:
    """Greedy completions and scores by the checkpoint at `path`, in FP32."""
    from inference.config import EngineConfig
    from inference.engine import Engine, Request, SamplingParams
    from inference.engine.scoring import prompt_logprobs

    engine = Engine.from_pretrained(path, EngineConfig(dtype="float32", num_pages=64))
    for i, ids in enumerate(prompts):
        engine.add(Request(f"r{i}", ids, SamplingParams(temperature=0.0, max_tokens=max_tokens)))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    outputs.sort(key=lambda output: output.request_id)
    return Answer(
        [output.token_ids.tolist() for output in outputs],
        [output.logprobs for output in outputs],
        [output.finish_reason for output in outputs],
        [prompt_logprobs(engine, ids) for ids in prompts],
    )


def in_its_own_process(function: Callable, *args):
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *args).result(250)
