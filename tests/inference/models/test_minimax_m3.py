"""The runtime's forward pass against transformers' M3, and against itself along other paths."""

import pytest
import torch

from inference.models.minimax_m3 import Capture
from inference.models.weights import runtime_placement
from tests.paged_model import PagedModel, runtime_model
from tests.tiny_models import model_config, random_tensors, tiny_config, transformers_model

SHAPES = {
    "block4_top2": {},
    "block8_top3_local2": {
        "sparse_block_size": 8,
        "sparse_topk_blocks": 3,
        "sparse_local_block": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "num_local_experts": 4,
        "swiglu_alpha": 1.3,
        "swiglu_limit": 0.5,
        "routed_scaling_factor": 1.5,
    },
    "lists_apart": {
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "partial_rotary_factor": 0.25,
        "moe_layer_freq": [1, 0, 1, 0],
        "sparse_attention_freq": [0, 1, 0, 1],
        "sparse_disable_index_value": [0, 1, 0, 1],
        "sparse_index_dim": 24,
        "num_experts_per_tok": 3,
    },
}
# FP32 on both sides, logits of size 1: what is left is the order of sums over some hundred terms.
TOLERANCE = 1e-5


class Case:
    """One tiny model in both implementations, and a text that passes top-k · block three times."""

    def __init__(self, name: str) -> None:
        self.config_dict = tiny_config(**SHAPES[name])
        self.tensors = random_tensors(self.config_dict, seed=len(name))
        self.model = runtime_model(self.config_dict, self.tensors)
        config = self.model.config
        self.block = config.index_block_size
        self.reach = config.index_topk_blocks * self.block
        generator = torch.Generator().manual_seed(5)
        self.ids = torch.randint(97, (3 * self.reach + 1,), generator=generator).tolist()
        self.oracle = transformers_model(self.config_dict, self.tensors)
        self.routing, self.blocks = [], []
        for layer in self.oracle.model.layers:
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.register_forward_hook(lambda *a: self.routing.append(a[-1][2]))
            if layer.self_attn.indexer is not None:
                layer.self_attn.indexer.register_forward_hook(lambda *a: self.blocks.append(a[-1]))

    @torch.no_grad()
    def expected(self, length: int) -> torch.Tensor:
        self.routing.clear()
        self.blocks.clear()
        return self.oracle(torch.tensor([self.ids[:length]])).logits[0]


@pytest.fixture(scope="module", params=SHAPES)
def case(request):
    return Case(request.param)


# BR-064
def test_logits_equal_transformers_around_every_border(case):
    block, reach = case.block, case.reach
    for length in (1, block - 1, block, block + 1, reach - 1, reach, reach + 1, 3 * reach):
        actual = PagedModel(case.model).step({"a": case.ids[:length]})["a"]
        torch.testing.assert_close(actual, case.expected(length), atol=TOLERANCE, rtol=0)


def test_decoding_token_by_token_equals_transformers(case):
    paged, start = PagedModel(case.model), case.reach - 2
    logits = [paged.step({"a": case.ids[:start]})["a"]]
    logits += [paged.step({"a": [token]})["a"] for token in case.ids[start:]]
    torch.testing.assert_close(
        torch.cat(logits), case.expected(len(case.ids)), atol=TOLERANCE, rtol=0
    )


@pytest.mark.parametrize("chunk", [3, 4, 5, 7])
def test_chunked_prefill_equals_whole_prefill(case, chunk):
    paged = PagedModel(case.model)
    starts = range(0, len(case.ids), chunk)
    chunked = [paged.step({"a": case.ids[start : start + chunk]})["a"] for start in starts]
    whole = PagedModel(case.model).step({"a": case.ids})["a"]
    torch.testing.assert_close(torch.cat(chunked), whole, atol=TOLERANCE, rtol=0)


# BR-061
@pytest.mark.parametrize("num_new", [1, 4, 5])
def test_a_cached_prefix_is_read_by_dense_and_sparse_layers(case, num_new):
    paged, prefix = PagedModel(case.model), 2 * case.reach
    paged.step({"first": case.ids[: prefix + 1]})
    paged.share("first", "second", prefix)
    warm = paged.step({"second": case.ids[prefix : prefix + num_new]})["second"]
    cold = PagedModel(case.model).step({"a": case.ids[: prefix + num_new]})["a"]
    torch.testing.assert_close(warm, cold[prefix:], atol=TOLERANCE, rtol=0)


def test_requests_in_one_batch_do_not_see_one_another(case):
    ids = {"a": case.ids, "b": case.ids[::-1], "c": case.ids[3:9]}
    alone = {name: PagedModel(case.model).step({name: text})[name] for name, text in ids.items()}
    paged = PagedModel(case.model)
    start = {name: text[:-3] for name, text in ids.items()}
    first = paged.step(start)
    second = paged.step({"a": ids["a"][-3:-2], "b": ids["b"][-3:], "c": ids["c"][-3:-1]})
    last = paged.step({"a": ids["a"][-2:], "c": ids["c"][-1:]})
    for name, expected in alone.items():
        parts = [step[name] for step in (first, second, last) if name in step]
        torch.testing.assert_close(torch.cat(parts), expected, atol=TOLERANCE, rtol=0)


def test_captured_choices_are_those_of_transformers(case):
    paged = PagedModel(case.model, capture=True)
    cut = case.reach + 1
    paged.step({"a": case.ids[:cut]})
    paged.step({"a": case.ids[cut:]})
    case.expected(len(case.ids))
    slots = paged.slots("a")
    routing = paged.capture.routing[slots].long().sort(-1).values
    expected = torch.stack(case.routing, 1).sort(-1).values
    assert torch.equal(routing, expected)
    blocks = paged.capture.blocks[slots].long().sort(-1).values
    expected = torch.stack([layer[0].transpose(0, 1) for layer in case.blocks], 1)
    assert torch.equal(blocks, expected.sort(-1).values)
    assert routing.unique().numel() == case.model.config.num_local_experts
    assert not torch.equal(blocks[:, 0, 0], blocks[:, -1, 0]), "layers must choose for themselves"


@pytest.fixture(scope="module")
def tiny():
    config_dict = tiny_config()
    return config_dict, random_tensors(config_dict, seed=1)


# BR-064
def test_sparse_equals_dense_up_to_top_k_blocks_and_not_beyond(tiny):
    _, tensors = tiny
    ids = list(range(21))
    sparse = PagedModel(runtime_model(tiny_config(), tensors)).step({"a": ids})["a"]
    all_blocks = runtime_model(tiny_config(sparse_topk_blocks=100), tensors)
    dense = PagedModel(all_blocks).step({"a": ids})["a"]
    torch.testing.assert_close(sparse[:8], dense[:8], atol=TOLERANCE, rtol=0)
    assert (sparse[8:] - dense[8:]).abs().amax(-1).min() > 0.01


# BR-060
def test_padding_rows_change_and_write_nothing(tiny):
    model = runtime_model(*tiny)
    plain, padded = PagedModel(model, capture=True), PagedModel(model, capture=True)
    expected = plain.step({"a": [3, 1, 4], "b": [5]})
    actual = padded.step({"a": [3, 1, 4], "b": [5]}, num_padding=5)
    for name, logits in expected.items():
        torch.testing.assert_close(actual[name], logits, atol=TOLERANCE, rtol=0)
    for before, after in zip(plain.pages, padded.pages, strict=True):
        assert torch.equal(before.k_pages.isnan(), after.k_pages.isnan())
        assert torch.equal(before.v_pages.isnan(), after.v_pages.isnan())
    assert torch.equal(plain.capture.routing[:-1], padded.capture.routing[:-1])
    assert torch.equal(plain.capture.blocks[:-1], padded.capture.blocks[:-1])


# BR-060
def test_a_step_of_padding_alone_runs(tiny):
    paged = PagedModel(runtime_model(*tiny))
    assert paged.step({}, num_padding=2) == {}
    assert paged.step({}, num_padding=0) == {}
    assert paged.pages[1].index_pages.isnan().all()


# BR-068
def test_the_router_stays_fp32_in_a_bf16_model(tiny):
    config_dict, tensors = tiny
    model = runtime_model(config_dict, tensors, dtype=torch.bfloat16)
    mlp = model.layers[1].mlp
    name = "model.layers.1.block_sparse_moe"
    assert torch.equal(mlp.gate.weight, tensors[f"{name}.gate.weight"])
    assert torch.equal(mlp.e_score_correction_bias, tensors[f"{name}.e_score_correction_bias"])
    logits = PagedModel(model).step({"a": list(range(20))})["a"]
    exact = PagedModel(runtime_model(config_dict, tensors)).step({"a": list(range(20))})["a"]
    # 8 bits of mantissa through 4 layers; a flipped expert or block may move single tokens further.
    assert logits.dtype == torch.float32
    assert (logits - exact).abs().median() < 0.03


def test_bf16_logits_are_the_fp32_product_also_under_autocast(tiny, monkeypatch):
    model = runtime_model(*tiny, dtype=torch.bfloat16)
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = hidden.double() @ model.lm_head.weight.double().T
    monkeypatch.setattr("inference.kernels.linear.reference.MAX_ROWS", 10)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model.logits(hidden)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), expected, atol=1e-6, rtol=0)


def test_every_parameter_element_is_one_published_element():
    for changes in SHAPES.values():
        config_dict = tiny_config(**changes)
        model = runtime_model(config_dict, {})
        counts = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
        for place in runtime_placement(model.config).values():
            place.view(counts).add_(1)
        assert all((count == 1).all() for count in counts.values())


def test_capture_of_blocks_is_as_narrow_as_the_longest_context_allows():
    config_dict = tiny_config(max_position_embeddings=4 * 32767)
    narrow = Capture.allocate(model_config(config_dict), 4, "cpu", routing=False, blocks=True)
    config_dict = tiny_config(max_position_embeddings=4 * 32768)
    wide = Capture.allocate(model_config(config_dict), 4, "cpu", routing=False, blocks=True)
    assert (narrow.routing, narrow.blocks.dtype) == (None, torch.int16)
    assert wide.blocks.dtype == torch.int32


def test_more_experts_than_a_byte_counts_cannot_be_captured():
    config = model_config(tiny_config(num_local_experts=257))
    with pytest.raises(ValueError, match=r"num_local_experts=257.*at most 256"):
        Capture.allocate(config, 4, "cpu", routing=True, blocks=False)
