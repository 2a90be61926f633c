"""The plan of a replica's memory: against what is really allocated, the release, and by hand."""

import dataclasses
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.config import ConfigError, EngineConfig, ModelConfig
from inference.engine import Engine
from inference.memory import count_parameters, plan_memory
from inference.models.weights import published_tensors
from inference.parallel.config import ParallelConfig
from inference.parallel.shards import runtime_shards
from tests.released_model import FOLDER
from tests.tiny_models import model_config, tiny_config

RELEASED = ModelConfig.from_pretrained(FOLDER)
H200_BYTES = 139 << 30
SCOPES = ["none", "mxfp8", "mxfp8_released"]
BLOCKS_OF_32 = {
    "intermediate_size": 64,
    "dense_intermediate_size": 128,
    "shared_intermediate_size": 64,
}
TINY = model_config(tiny_config(vocab_size=96, **BLOCKS_OF_32))


def on_h200(**options):
    return EngineConfig(dtype="bfloat16", device="cuda", **options)


def plan_for(options=None, **layout):
    """Of the released model."""
    return plan_memory(RELEASED, options or on_h200(), ParallelConfig(**layout))


def weights_of(model, quantization="none", **layout):
    return plan_memory(model, on_h200(quantization=quantization), ParallelConfig(**layout)).weights


def test_the_classes_of_the_released_model_have_their_known_sizes():
    assert count_parameters(RELEASED) == {
        "embedding": 200_064 * 6144,
        "head": 200_064 * 6144,
        "attention": 6_417_300_480,
        "index branch": 224_147_712,
        "dense MLP": 679_477_248,
        "routed experts": 413_122_166_784,
        "shared experts": 3_227_516_928,
        "router": 44_833_920,
        "norms": 743_424,
    }


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(0, 4), st.integers(1, 9), st.integers(1, 6))
def test_the_classes_add_up_to_the_model(layers, dense, experts, width):
    model = model_config(
        tiny_config(
            num_hidden_layers=layers,
            num_dense_layers=dense % layers,
            num_local_experts=experts + 1,
            intermediate_size=8 * width,
        )
    )
    assert sum(count_parameters(model).values()) == model.num_parameters


@pytest.mark.parametrize(("quantization", "gib"), [("none", 795.51), ("mxfp8_released", 413.27)])
def test_the_released_checkpoints_have_their_known_sizes(quantization, gib):
    vision, patch_embedding = 631_185_920 + 234_381_312, 1280 * 3 * 2 * 14 * 14
    text = sum(weights_of(RELEASED, quantization).values())
    assert round((text + 2 * (vision + patch_embedding)) / 2**30, 2) == gib
    assert sum(count_parameters(RELEASED).values()) + vision == 427_040_140_160


CLASSES = {
    "embed_tokens": "embedding",
    "lm_head": "head",
    "self_attn": "attention and index",
    "shared_experts": "shared experts",
    "experts": "routed experts",
    "gate": "router",
    "e_score_correction_bias": "router",
    "mlp": "dense MLP",
}
"""A part of a parameter's name -> its class; the first that occurs. Others are norms."""


def class_of(name):
    parts = name.split(".")
    return next((kind for part, kind in CLASSES.items() if part in parts), "norms")


def allocated_weights(engine):
    """Bytes of the parameters of a real engine, by class."""
    sizes = {}
    for name, tensor in engine._worker.model.state_dict().items():
        sizes[class_of(name)] = sizes.get(class_of(name), 0) + tensor.nbytes
    return sizes


def planned_weights(plan):
    """As `allocated_weights`: scales with their values, the index branch with the attention."""
    sizes = {}
    for name, size in plan.weights.items():
        kind = name.removesuffix(", scales")
        kind = "attention and index" if kind in ("attention", "index branch") else kind
        sizes[kind] = sizes.get(kind, 0) + size
    return sizes


@pytest.mark.parametrize("quantization", SCOPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plan_is_what_an_engine_allocates(dtype, quantization):
    options = EngineConfig(dtype=dtype, quantization=quantization, num_pages=6)
    plan = plan_memory(TINY, options)
    assert planned_weights(plan) == allocated_weights(Engine(TINY, options))


@pytest.mark.parametrize("quantization", SCOPES)
def test_a_shadow_is_all_weights_once_more(quantization):
    options = EngineConfig(quantization=quantization, num_pages=6, shadow_weights=True)
    plan = plan_memory(TINY, options)
    alone = plan_memory(TINY, dataclasses.replace(options, shadow_weights=False))
    held = Engine(TINY, options)._worker.weights._filled
    assert plan.weights["shadow copy"] == sum(tensor.nbytes for tensor in held.values())
    assert plan.total_bytes - alone.total_bytes == sum(alone.weights.values())
    assert "shadow copy" not in alone.weights


@pytest.mark.parametrize("kv_dtype", ["auto", "float8_e4m3fn"])
@pytest.mark.parametrize("index_dtype", ["auto", "float8_e4m3fn"])
def test_pages_captures_and_rope_table_are_what_an_engine_allocates(kv_dtype, index_dtype):
    options = EngineConfig(
        dtype="bfloat16",
        kv_dtype=kv_dtype,
        index_dtype=index_dtype,
        num_pages=7,
        max_model_len=21,
        capture_routing=True,
        capture_blocks=True,
    )
    worker = Engine(TINY, options)._worker
    plan = plan_memory(TINY, options)
    assert plan.cache == {
        "KV pages": sum(pages.k_pages.nbytes + pages.v_pages.nbytes for pages in worker.pages),
        "index pages": sum(
            pages.index_pages.nbytes for pages in worker.pages if pages.index_pages is not None
        ),
        "captured routing": worker.capture.routing.nbytes,
        "captured blocks": worker.capture.blocks.nbytes,
    }
    assert plan.buffers == {"rope table": worker.model.rope_SX.nbytes}


SPREAD = [(1, 1, 1), (2, 1, 1), (2, 1, 2), (4, 1, 2), (1, 2, 2), (2, 2, 2), (2, 2, 4), (4, 2, 8)]


@pytest.mark.parametrize(("tp", "dp", "ep"), SPREAD)
def test_the_plan_is_what_every_rank_holds_of_the_published_tensors(tp, dp, ep):
    parallel = ParallelConfig(tp, dp, ep)
    plan = plan_memory(TINY, EngineConfig(), parallel)  # FP32; 2 KV heads: 4 ranks copy them
    for rank in range(parallel.world):
        sizes = {}
        shards = runtime_shards(TINY, parallel, rank)
        for spec in published_tensors(TINY):
            if spec.name in shards:
                count = math.prod(stop - start for start, stop in shards[spec.name].bounds)
                kind = class_of(spec.name.replace("block_sparse_moe.", ""))
                sizes[kind] = sizes.get(kind, 0) + 4 * count
        assert planned_weights(plan) == sizes


@pytest.mark.parametrize("quantization", SCOPES)
def test_scales_are_split_with_their_weights(quantization):
    whole, quarter = weights_of(RELEASED, quantization), weights_of(RELEASED, quantization, tp=4)
    scales = [name for name in whole if name.endswith("scales")]
    assert len(scales) == {"none": 0, "mxfp8": 1, "mxfp8_released": 5}[quantization]
    for name in scales:
        copied = 3 * 57 * 128 * 6144 // 32 if name.startswith("index") else 0
        assert 4 * quarter[name] == whole[name] + copied


def test_every_way_to_spread_experts_over_the_same_gpus_costs_the_same():
    sizes = {weights_of(RELEASED, tp=4, dp=2, ep=ep)["routed experts"] for ep in (2, 4, 8)}
    assert sizes == {2 * 413_122_166_784 // 8}


def test_kv_heads_are_split_up_to_their_number_and_then_replicated_and_index_keys_always():
    pages = [plan_for(tp=tp).cache for tp in (1, 4, 8)]
    slots = 512 * 128
    assert [cache["KV pages"] for cache in pages] == [
        slots * 122_880,
        slots * 122_880 // 4,
        slots * 122_880 // 4,
    ]
    assert [cache["index pages"] for cache in pages] == [slots * 14_592] * 3
    q_and_o = 2 * 60 * 2 * 64 * 128 * 6144
    attention = [weights_of(RELEASED, tp=tp)["attention"] for tp in (4, 8)]
    assert attention[0] - attention[1] == q_and_o // 4 - q_and_o // 8


def test_a_data_parallel_rank_holds_the_attention_whole_and_exchanges_tokens():
    one, four = weights_of(RELEASED), weights_of(RELEASED, dp=4)
    for name in one.keys() - {"routed experts"}:
        assert one[name] == four[name]
    assert "exchange of tokens" not in plan_for(tp=4).buffers
    # 2,048 tokens of each of 4 ranks in BF16: as they arrive, as the experts read them, their sums
    exchange = plan_for(dp=4).buffers["exchange of tokens"]
    assert exchange == 3 * 4 * 2048 * 6144 * 2


def test_a_captured_size_costs_its_logits_twice():
    sizes = [
        plan_for(on_h200(cuda_graph_sizes=sizes)).buffers.get("CUDA graphs", 0)
        for sizes in ((), (128,), (64, 128))
    ]
    assert sizes[0] == 0
    launches = 2 * 60 * (128 << 10)
    assert sizes[2] - sizes[1] == 2 * 64 * 200_064 * 4 + launches


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"tp": 3}, r"tp=3 does not divide .*; use one of \[1, 2, 4, 8, 16, 32, 64\]"),
        ({"tp": 4, "ep": 3}, r"ep=3 does not divide .* use one of \[1, 2, 4\]"),
        ({"tp": 2, "dp": 4, "ep": 2}, r"ep=2 .* must be dp times .* use one of \[4, 8\]"),
    ],
    ids=str,
)
def test_what_does_not_divide_is_refused_with_the_values_that_do(layout, words):
    with pytest.raises(ConfigError, match=words):
        plan_for(**layout)


def test_a_split_keeps_the_blocks_of_mxfp8_whole():
    plan_for(tp=64)  # 3072 / 64 = 48 columns
    with pytest.raises(ConfigError, match=r"whole MXFP8 groups of 32.*\[1, 2, 4, 8, 16, 32\]"):
        plan_for(on_h200(quantization="mxfp8_released"), tp=64)


@pytest.mark.parametrize(
    ("quantization", "key"),
    [
        ("mxfp8", "intermediate_size"),
        ("mxfp8_released", "shared_intermediate_size"),
        ("mxfp8_released", "dense_intermediate_size"),
    ],
)
def test_a_length_that_blocks_of_32_do_not_fill_is_named(quantization, key):
    model = model_config(tiny_config(**(BLOCKS_OF_32 | {key: 80})))
    with pytest.raises(ConfigError, match=f"{key}=80 is no multiple of 32"):
        plan_memory(model, on_h200(quantization=quantization))


def refusal(options, **layout):
    with pytest.raises(ConfigError) as caught:
        plan_memory(RELEASED, options, ParallelConfig(**layout), gpu_bytes=H200_BYTES)
    return str(caught.value)


def test_the_released_model_does_not_fit_one_gpu_and_the_refusal_has_the_numbers():
    text, plan = refusal(on_h200()), plan_for()
    over = (plan.total_bytes - H200_BYTES) / 2**30
    assert f"has 139.0 GiB: {over:.1f} GiB too much" in text
    assert re.search(r"\n  routed experts +769\.5 GiB\n", text)
    gpus, tp, ep, dp = map(
        int,
        re.search(
            r"(\d+) GPU\(s\): quantization='mxfp8', tp=(\d+), ep=(\d+), dp=(\d+)", text
        ).groups(),
    )
    assert gpus == tp * dp == 4
    options = on_h200(quantization="mxfp8")
    plan_memory(RELEASED, options, ParallelConfig(tp, dp, ep), gpu_bytes=H200_BYTES)


def test_two_gpus_do_not_hold_the_released_model_in_mxfp8():
    assert "; 4 GPU(s): quantization='mxfp8', tp=4, ep=4" in refusal(on_h200(), tp=2)
    assert "what fits: 4 GPU(s): quantization='mxfp8'" in refusal(on_h200(quantization="mxfp8"))


@pytest.mark.parametrize("max_model_len", [None, 40_000])
def test_the_most_pages_are_those_that_fit_and_no_more(max_model_len):
    options = on_h200(quantization="mxfp8", num_pages=400, max_model_len=max_model_len)
    parallel = ParallelConfig(tp=4)
    plan = plan_memory(RELEASED, options, parallel, gpu_bytes=H200_BYTES)
    most = plan.max_num_pages
    full = dataclasses.replace(options, num_pages=most)
    assert plan_memory(RELEASED, full, parallel, gpu_bytes=H200_BYTES).max_num_pages == most
    text = refusal(dataclasses.replace(options, num_pages=most + 1), tp=4)
    assert f"what fits: num_pages={most} or less" in text


def test_fewer_pages_are_no_remedy_where_the_longest_request_would_not_fit():
    options = on_h200(quantization="mxfp8", num_pages=8192, max_model_len=1 << 20)
    assert "what fits: 8 GPU(s)" in refusal(options, tp=4)


def test_nothing_is_offered_where_nothing_fits():
    with pytest.raises(ConfigError, match="what fits: nothing with up to 256 GPUs"):
        plan_memory(RELEASED, on_h200(), gpu_bytes=1 << 30)


def test_a_shadow_that_does_not_fit_can_be_left_out():
    options = on_h200(quantization="mxfp8", num_pages=64, shadow_weights=True)
    text = refusal(options, tp=4)
    assert "what fits: shadow_weights=False; 8 GPU(s): quantization='mxfp8', tp=4, ep=8" in text
    plan_for(dataclasses.replace(options, shadow_weights=False), tp=4)
    assert "shadow_weights" not in refusal(dataclasses.replace(options, num_pages=10**6), tp=4)
    alone = dataclasses.replace(options, shadow_weights=False, num_pages=10**6)
    assert "shadow_weights" not in refusal(alone, tp=4)
