"""The engine on the GPU: the same tokens as on the CPU in FP32, by every way through the engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inference.config import EngineConfig
from inference.engine import Engine, Request, SamplingParams
from tests.inference.engine.engines import assert_same, poison_pages, run
from tests.tiny_models import model_config, random_tensors, tiny_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TINY = tiny_config()
HEADS = {"64/4": (64, 4), "16/1": (16, 1), "8/1": (8, 1)}


def m3_like(num_heads: int, num_kv_heads: int) -> dict:
    """Few layers and narrow, but heads, blocks and top-k near M3's own."""
    return tiny_config(
        hidden_size=256,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=128,
        vocab_size=1024,
        max_position_embeddings=4096,
        intermediate_size=128,
        dense_intermediate_size=256,
        shared_intermediate_size=128,
        num_experts_per_tok=4,
        sparse_block_size=128,
        sparse_topk_blocks=4,
    )


def engine_of(raw: dict, device: str, dtype: str = "float32", **options) -> Engine:
    options = {"num_pages": 160, "max_running_requests": 16} | options
    engine = Engine(model_config(raw), EngineConfig(dtype=dtype, device=device, **options))
    poison_pages(engine)
    engine.load_weights(random_tensors(raw, 0).items(), 0)
    return engine


def requests(raw: dict, lengths: list[int], max_tokens: int, **params) -> list[Request]:
    rng = np.random.default_rng(0)
    made = []
    for i, length in enumerate(lengths):
        ids = rng.integers(3, raw["vocab_size"], length).tolist()
        for sample in range(2 if i % 2 else 1):
            seed = 10 * i + sample
            sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=seed, **params)
            made.append(Request(f"{i}.{sample}", ids, sampling, f"group{i}"))
    return made


WAYS = {
    "graphs": {},
    "no graphs": {"cuda_graph_sizes": ()},
    "padded graphs": {"cuda_graph_sizes": (16,)},
    "settled steps": {"async_scheduling": False},
    "chunked prefill": {"max_tokens_per_step": 24},
    "no prefix cache": {"enable_prefix_cache": False},
    "preemption": {"num_pages": 32, "max_running_requests": 5},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_fp32_gives_the_tokens_of_the_cpu_by_every_way(way, temperature):
    lengths = [3, 9, 17, 40, 21, 66]
    asked = requests(TINY, lengths, 24, temperature=temperature)
    wanted = run(engine_of(TINY, "cpu"), asked)
    found = run(engine_of(TINY, "cuda", **WAYS[way]), asked)
    for output, expected in zip(found, wanted, strict=True):
        assert_same(output, expected)


def test_cut_distributions_and_captured_choices_are_those_of_the_cpu():
    options = {"capture_routing": True, "capture_blocks": True}
    params = {"top_k": 7, "top_p": 0.9, "min_p": 0.01, "routing": True, "blocks": True}
    asked = requests(TINY, [5, 30, 41], 20, **params)
    wanted = run(engine_of(TINY, "cpu", **options), asked)
    found = run(engine_of(TINY, "cuda", **options), asked)
    for output, expected in zip(found, wanted, strict=True):
        assert_same(output, expected)
        assert np.array_equal(output.routing, expected.routing)
        assert np.array_equal(output.blocks, expected.blocks)


@pytest.mark.parametrize("heads", HEADS)
def test_fp32_at_m3_head_shapes(heads):
    raw = m3_like(*HEADS[heads])
    asked = requests(raw, [5, 127, 700, 1025], 12, temperature=0.0)
    wanted = run(engine_of(raw, "cpu"), asked)
    found = run(engine_of(raw, "cuda"), asked)
    for output, expected in zip(found, wanted, strict=True):
        assert output.token_ids.tolist() == expected.token_ids.tolist()
        np.testing.assert_allclose(output.logprobs, expected.logprobs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("pages", ["auto", "float8_e4m3fn"])
def test_bf16_logprobs_are_near_those_of_fp32(heads, pages):
    raw = m3_like(*HEADS[heads])
    sampled = run(
        engine_of(raw, "cuda", "bfloat16", kv_dtype=pages, index_dtype=pages),
        requests(raw, [5, 127, 700, 1025], 24, temperature=1.0),
    )
    deltas = []
    oracle = engine_of(raw, "cpu", enable_prefix_cache=False)
    for output in sampled:
        forced = logprobs_of(oracle, output.prompt_ids.tolist(), output.token_ids.tolist())
        deltas.append(np.abs(forced - output.logprobs))
    mean = float(np.concatenate(deltas).mean())
    assert mean < (0.05 if pages == "auto" else 0.25)


def logprobs_of(engine: Engine, prompt_ids: list[int], token_ids: list[int]) -> np.ndarray:
    from benchmarks.teacher_forcing import prompt_logprobs

    logprobs, _ = prompt_logprobs(engine, [*prompt_ids, *token_ids])
    return logprobs[-len(token_ids) :]


def test_graphs_read_new_weights_at_the_same_place():
    asked = requests(TINY, [9, 20], 12, temperature=0.0)
    engine = engine_of(TINY, "cuda")
    run(engine, asked)
    engine.load_weights(random_tensors(TINY, 1).items(), 1)
    fresh = Engine(model_config(TINY), EngineConfig(device="cpu", num_pages=160))
    fresh.load_weights(random_tensors(TINY, 1).items(), 1)
    for output, expected in zip(run(engine, asked), run(fresh, asked), strict=True):
        assert_same(output, expected)
        assert output.version_spans.tolist() == [[0, 1]]
