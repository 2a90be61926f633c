"""The offline door: a checkpoint, prompts, completions."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from inference.config import EngineConfig
from inference.engine.engine import Engine
from inference.engine.request import Request, RequestOutput, SamplingParams
from inference.kernels.mix64 import GOLDEN, as_int64, mix64
from inference.models.checkpoint import list_tensors
from inference.models.config_json import read_json

Prompt = str | Sequence[int] | np.ndarray


class LLM:
    """One engine over a published checkpoint, for prompts that are all known beforehand.

    >>> llm = LLM("path/to/checkpoint")                                       # doctest: +SKIP
    >>> llm.generate(["1 + 1 ="], SamplingParams(temperature=0.0))[0].text    # doctest: +SKIP
    """

    def __init__(self, path: str | Path, dtype: str | None = None, **engine_options: Any) -> None:
        """
        Args:
            path: directory with config.json, safetensors and, for text, tokenizer.json.
            dtype: 'float32' or 'bfloat16'; None: the one that config.json names, else 'float32',
                which loses nothing of any checkpoint.
            engine_options: fields of `inference.config.EngineConfig`. Without `quantization`, what
                the checkpoint stores in MXFP8 is held so.

        Raises:
            ConfigError, CheckpointError: what is wrong in which file.
            TypeError: an unknown engine option.
        """
        _check_options(engine_options)
        dtype = stored_dtype(path) if dtype is None else dtype
        engine_options.setdefault("quantization", stored_quantization(path))
        self.engine = Engine.from_pretrained(path, EngineConfig(dtype=dtype, **engine_options))
        self._request_ids = itertools.count()

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """One completion a prompt, in the order of the prompts.

        Args:
            prompts: texts, encoded as they stand (no BOS or template is added), or token ids.
            params: for all prompts, or one for each. When one with a seed serves several prompts,
                prompt 0 uses the seed itself and the others seeds derived from it, so that equal
                prompts get different completions; each output reports its own.

        Raises:
            ValueError: a prompt that cannot be served, with its numbers; nothing is generated then.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        requests = [
            Request(f"prompt-{next(self._request_ids)}", self._encode(prompt), each)
            for prompt, each in zip(prompts, _params_of_each(params, len(prompts)), strict=True)
        ]
        outputs: dict[str, RequestOutput] = {}
        try:
            for request in requests:
                self.engine.add(request)
            while self.engine.has_work:
                outputs |= {output.request_id: output for output in self.engine.step()}
        except BaseException:
            self.engine.abort()
            self.engine.step()
            raise
        return [outputs[request.request_id] for request in requests]

    def _encode(self, prompt: Prompt) -> Sequence[int] | np.ndarray:
        if not isinstance(prompt, str):
            if np.ndim(prompt) == 0:
                raise ValueError(
                    f"prompt {prompt!r} is neither text nor a list of token ids; give a list of "
                    "prompts, also when there is only one"
                )
            return prompt
        if self.engine.tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer.json; give prompts as token ids")
        return self.engine.tokenizer.encode(prompt, add_special_tokens=False).ids


def stored_dtype(path: str | Path) -> str:
    """The dtype that the config.json of a checkpoint names; 'float32' when it names none."""
    config = read_json(Path(path) / "config.json")
    for part in (config, config.get("text_config") or {}):
        for key in ("dtype", "torch_dtype"):
            if part.get(key) is not None:
                return str(part[key]).removeprefix("torch.")
    return "float32"


def stored_quantization(path: str | Path) -> str:
    """`EngineConfig.quantization` that holds what a checkpoint stores in MXFP8 as it is stored.

    The tensors' own dtypes decide, whatever config.json says of them.

    Raises:
        CheckpointError: no checkpoint is there, or a file of it is damaged.
    """
    names = [name for name, place in list_tensors(Path(path)).items() if place.dtype == "F8_E4M3"]
    if any(".self_attn." in name for name in names):
        return "mxfp8_released"
    return "mxfp8" if names else "none"


def derived_seed(seed: int, index: int) -> int:
    """Seed of prompt `index` when one seed serves many prompts; the seed itself for prompt 0."""
    if index == 0:
        return seed
    return int(mix64(torch.tensor([as_int64(seed + index * GOLDEN)]))[0])


def _params_of_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if not isinstance(params, SamplingParams):
        if len(params) != count:
            raise ValueError(f"{len(params)} SamplingParams for {count} prompts; give one for each")
        return list(params)
    if params.seed is None:
        return [params] * count
    return [
        dataclasses.replace(params, seed=derived_seed(params.seed, index)) for index in range(count)
    ]


def _check_options(options: dict[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(EngineConfig)]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"use one of {known}"
            raise TypeError(f"LLM: unknown engine option {name!r}; {hint}")
