"""Tiny engines for the tests of this folder: weights by seed, poisoned pages, the oracle."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from inference.config import EngineConfig
from inference.engine import Engine, Request, RequestOutput, SamplingParams
from tests.tiny_models import model_config, random_tensors, tiny_config, transformers_model

RAW = tiny_config()
"""Block 4, top-k 2: from position 8 on a sparse layer leaves blocks out."""
VOCAB = RAW["vocab_size"]
EOS = RAW["eos_token_id"]


@functools.cache
def weights(seed: int) -> dict[str, torch.Tensor]:
    return random_tensors(RAW, seed)


@functools.cache
def oracle(seed: int = 0) -> Any:
    return transformers_model(RAW, weights(seed))


def empty_engine(tokenizer: Tokenizer | None = None, **options: Any) -> Engine:
    options = {"num_pages": 128, "max_running_requests": 16} | options
    engine = Engine(model_config(RAW), EngineConfig(**options), tokenizer)
    poison_pages(engine)
    return engine


def make_engine(seed: int = 0, version: int = 0, **options: Any) -> Engine:
    engine = empty_engine(**options)
    engine.load_weights(weights(seed).items(), version)
    return engine


def poison_pages(engine: Engine) -> None:
    """Whatever reads a place that no token was written to gets NaN."""
    for layer in engine._worker.pages:
        for pages in (layer.k_pages, layer.v_pages, layer.index_pages):
            if pages is not None:
                pages.fill_(torch.nan)


def greedy(max_tokens: int, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **params)


def sampled(max_tokens: int, seed: int, **params: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True, **params)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()


def step_to_end(engine: Engine) -> dict[str, RequestOutput]:
    """Outputs by request id; the page invariant is checked after every step."""
    outputs: dict[str, RequestOutput] = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
        engine._scheduler.check()
    return outputs


def run(engine: Engine, requests: Iterable[Request]) -> list[RequestOutput]:
    """Add all, step to the end; outputs in the order of `requests`."""
    requests = list(requests)
    for request in requests:
        engine.add(request)
    outputs = step_to_end(engine)
    return [outputs[request.request_id] for request in requests]


def run_alone(prompt_ids: list[int], params: SamplingParams, seed: int = 0) -> RequestOutput:
    """The same request on a fresh engine, whole prefill, no cache, no company."""
    engine = make_engine(seed, enable_prefix_cache=False)
    return run(engine, [Request("alone", prompt_ids, params)])[0]


def assert_same(output: RequestOutput, expected: RequestOutput) -> None:
    """Equal tokens; logprobs within 1e-5, the size of FP32 sums taken in another order."""
    assert output.token_ids.tolist() == expected.token_ids.tolist()
    assert output.finish_reason == expected.finish_reason
    np.testing.assert_allclose(output.logprobs, expected.logprobs, rtol=0, atol=1e-5)


def oracle_logits(token_ids: np.ndarray | list[int], seed: int = 0) -> torch.Tensor:
    """[S, V] logits of transformers' model for one sequence."""
    with torch.no_grad():
        return oracle(seed)(torch.tensor(np.array([token_ids], np.int64))).logits[0]


def char_tokenizer() -> Tokenizer:
    """One token a byte, ids 3 to 96 are the characters '!' to '~'; 0 to 2 are special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [chr(code) for code in range(33, 124)]
    others = [char for char in alphabet if char not in printable]
    vocab = {"<pad>": 0, "<bos>": 1, "<eos>": 2}
    for char in printable + others:
        vocab[char] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    return tokenizer
