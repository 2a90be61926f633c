"""Reading config.json: the released form, transformers' form, and all that must be refused."""

import copy
import json
import re
import subprocess
import sys

import pytest
import torch

from inference.config import ConfigError, EngineConfig, ModelConfig
from inference.engine import Engine
from tests.released_model import released_config
from tests.tiny_models import tiny_config


def test_the_released_config_is_read_number_for_number():
    config = ModelConfig.from_dict(released_config(), source="release")
    assert config == ModelConfig(
        hidden_size=6144,
        num_hidden_layers=60,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=200064,
        max_position_embeddings=1048576,
        rms_norm_eps=1e-6,
        rope_theta=5e6,
        rotary_dim=64,
        swiglu_alpha=1.702,
        swiglu_limit=7.0,
        swiglu_beta=1.0,
        intermediate_size=3072,
        dense_intermediate_size=12288,
        shared_intermediate_size=3072,
        num_local_experts=128,
        num_experts_per_tok=4,
        routed_scaling_factor=2.0,
        layer_types=("full_attention",) * 3 + ("minimax_m3_sparse",) * 57,
        mlp_layer_types=("dense",) * 3 + ("sparse",) * 57,
        index_n_heads=4,
        index_head_dim=128,
        index_block_size=128,
        index_topk_blocks=16,
        index_local_blocks=1,
    )
    assert config.sparse_layers == config.moe_layers == tuple(range(3, 60))
    assert config.num_parameters == 427_040_140_160 - 631_185_920 - 234_381_312


def test_end_tokens_of_generation_config_are_added(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(eos_token_id=[2, 5])))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7], "top_p": 0.95}')
    assert ModelConfig.from_pretrained(tmp_path).eos_token_ids == (2, 5, 7)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 0}')
    assert ModelConfig.from_pretrained(tmp_path).eos_token_ids == (2, 5, 0)


def test_what_transformers_saves_is_the_same_model(tmp_path):
    from transformers import MiniMaxM3VLConfig, MiniMaxM3VLTextConfig

    expected = ModelConfig.from_dict(tiny_config(), source="tiny")
    published = {k: v for k, v in tiny_config().items() if k not in ("architectures", "model_type")}
    text = MiniMaxM3VLTextConfig(**copy.deepcopy(published))
    nested = MiniMaxM3VLConfig(text_config=copy.deepcopy(published))
    ours = MiniMaxM3VLTextConfig(**expected.to_transformers())
    for name, config in {"text": text, "nested": nested, "ours": ours}.items():
        config.save_pretrained(tmp_path / name)
        assert ModelConfig.from_pretrained(tmp_path / name) == expected


def test_to_transformers_says_what_transformers_reads_from_the_published_layout():
    from transformers import MiniMaxM3VLTextConfig

    config_dict = tiny_config(eos_token_id=[2, 3], pad_token_id=4, head_dim=44, rotary_dim=30)
    config_dict["partial_rotary_factor"] = 0.69  # 44 * 0.69 = 30.36, rounded down on both sides
    config = ModelConfig.from_dict(config_dict, source="tiny")
    ours = MiniMaxM3VLTextConfig(**config.to_transformers())
    known = MiniMaxM3VLTextConfig().to_dict().keys()
    published = {k: v for k, v in config_dict.items() if k not in ("architectures", "model_type")}
    theirs = MiniMaxM3VLTextConfig(**published).to_dict()
    mine = ours.to_dict()
    rope_mine, rope_theirs = mine.pop("rope_parameters"), theirs.pop("rope_parameters")
    assert {k: mine[k] for k in known if k in mine} == {k: theirs[k] for k in known if k in theirs}
    assert rope_mine["rope_theta"] == rope_theirs["rope_theta"]
    # 30 / 44 * 44 is below 30 in floating point, and transformers rounds down.
    assert int(44 * rope_mine["partial_rotary_factor"]) == config.rotary_dim == 30


def edited(**changes):
    """The released config with keys of the text part, of the sparse part or of the top replaced."""
    config = released_config()
    text = config["text_config"]
    for key, value in changes.items():
        place = text["sparse_attention_config"] if key.startswith("sparse_") else text
        if key == "sparse_attention_config" or key.startswith("top_"):
            place = config if key.startswith("top_") else text
        place[key.removeprefix("top_")] = value
    return config


def without(key):
    """The released config lacking one key of the text part or of the sparse part."""
    config = released_config()
    sparse = config["text_config"]["sparse_attention_config"]
    del (sparse if key in sparse else config["text_config"])[key]
    return config


REFUSED = {
    "another architecture": (
        edited(top_architectures=["MiniMaxM2ForCausalLM"]),
        r"'MiniMaxM2ForCausalLM'.*supported: MiniMaxM3SparseForConditionalGeneration",
    ),
    "another model type": (edited(top_model_type="llama"), r"model_type='llama'.*minimax_m3_vl"),
    "nothing known": ({"hidden_size": 4}, "is not a MiniMax-M3"),
    "silently dense": (without("sparse_attention_freq"), "no layer is sparse.*m3rl_allow_dense"),
    "all dense": (edited(sparse_attention_freq=[0] * 60), "no layer is sparse.*m3rl_allow_dense"),
    "sparse switched off": (
        edited(sparse_attention_config={"use_sparse_attention": False}),
        "sparse_num_index_heads .*is missing",
    ),
    "no expert list": (without("moe_layer_freq"), "moe_layer_freq .*is missing"),
    "short list": (edited(moe_layer_freq=[1] * 59), "mlp_layer_types has 59 entries.*=60"),
    "short sparse list": (
        edited(sparse_attention_freq=[0, 0, 0, 1]),
        "layer_types has 4 entries.*=60",
    ),
    "strange flag": (edited(moe_layer_freq=[2] * 60), "holds 2"),
    "two lists that differ": (
        edited(layer_types=["minimax_m3_sparse"] * 60),
        "layer_types contradicts the published",
    ),
    "unknown layer type": (
        edited(sparse_attention_freq=None, layer_types=["linear"] * 60),
        r"layer_types\[0\]='linear'|no layer is sparse",
    ),
    "index heads": (
        edited(sparse_num_index_heads=8),
        "index_n_heads=8 differs from num_key_value_heads=4",
    ),
    "query heads": (edited(num_attention_heads=63), "=4 does not divide num_attention_heads=63"),
    "rotary dim": (
        edited(rotary_dim=128),
        "rotary_dim=128 contradicts partial_rotary_factor=0.5.*128 times it is 64",
    ),
    "odd rotary dim": (edited(rotary_dim=1, partial_rotary_factor=0.01), "rotary_dim=1 must be"),
    "init block": (edited(sparse_init_block=1), "sparse_init_block=1 is not implemented"),
    "score type": (edited(sparse_score_type="lse"), "sparse_score_type='lse' is not implemented"),
    "too many local": (edited(sparse_local_block=17), "index_local_blocks=17.*topk_blocks=16"),
    "two values": (edited(index_topk_blocks=8), "index_topk_blocks=8 contradicts .*=16"),
    "yarn": (edited(rope_scaling={"type": "yarn", "factor": 4}), r"\['factor', 'yarn'\]"),
    "yarn in parameters": (edited(rope_parameters={"rope_type": "yarn"}), r"\['yarn'\]"),
    "two thetas": (edited(rope_parameters={"rope_theta": 1e4}), "rope_theta=5000000 contradicts"),
    "output gate": (edited(attention_output_gate=True), "attention_output_gate=True"),
    "index values": (
        edited(sparse_disable_index_value=[0] * 60),
        "sparse_disable_index_value has a 0 on a sparse layer",
    ),
    "tied": (edited(tie_word_embeddings=True), "tie_word_embeddings=True"),
    "tied at the top": (edited(top_tie_word_embeddings=True), "tie_word_embeddings=True"),
    "plain norm": (edited(use_gemma_norm=False), "use_gemma_norm=False"),
    "softmax": (edited(scoring_func="softmax"), "scoring_func='softmax'.*only 'sigmoid' is"),
    "beta": (edited(swiglu_beta=0.0), "swiglu_beta=0.0 is not implemented; only 1.0"),
    "reused selection": (edited(index_topk_freq=4), "index_topk_freq=4"),
    "no context length": (without("max_position_embeddings"), "max_position_embeddings is missing"),
    "no head dim": (without("head_dim"), "head_dim is missing; it is never guessed"),
    "no block size": (without("sparse_block_size"), "sparse_block_size .*is missing"),
    "text as a number": (edited(hidden_size="6144"), "hidden_size='6144' must be a whole number"),
    "boolean": (edited(num_experts_per_tok=True), "num_experts_per_tok=True must be"),
    "zero": (edited(rms_norm_eps=0), "rms_norm_eps=0 must be a number above 0"),
    "more chosen than there": (edited(num_experts_per_tok=129), "=129 exceeds .*=128"),
    "token out of range": (edited(eos_token_id=200064), "200064 is outside the vocabulary"),
    "token as text": (edited(eos_token_id=["</s>"]), "token id '</s>' is not a whole number"),
}


# BR-057, BR-067
@pytest.mark.parametrize("case", REFUSED)
def test_a_config_that_cannot_be_run_is_refused_with_its_place(case):
    config, message = REFUSED[case]
    with pytest.raises(ConfigError, match=f"^some/config.json: .*(?:{message})"):
        ModelConfig.from_dict(config, source="some/config.json")


# BR-057
def test_sparse_attention_switched_off_is_refused_even_with_its_numbers():
    config = released_config()
    config["text_config"]["sparse_attention_config"]["use_sparse_attention"] = False
    with pytest.raises(ConfigError, match="use_sparse_attention=False is not implemented"):
        ModelConfig.from_dict(config, source="x")


@pytest.mark.parametrize("place", ["top", "text"])
def test_a_dense_model_is_read_when_it_is_asked_for(place):
    config = without("sparse_attention_freq")
    (config if place == "top" else config["text_config"])["m3rl_allow_dense"] = True
    assert ModelConfig.from_dict(config, source="x").sparse_layers == ()


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config.json does not exist; give the directory"):
        ModelConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config.json is not JSON"):
        ModelConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="holds a list, not a JSON object"):
        ModelConfig.from_pretrained(tmp_path)


def test_reading_a_config_does_not_import_torch_or_transformers():
    code = (
        "import sys, inference.config; "
        "sys.exit(bool({'torch', 'transformers', 'numpy', 'safetensors'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_engine_limits_are_filled_in_from_the_model():
    model = ModelConfig.from_dict(tiny_config(), source="tiny")
    resolved = EngineConfig(num_pages=1000).resolve(model)
    assert (resolved.page_size, resolved.max_model_len) == (4, 512)
    resolved = EngineConfig(num_pages=100, page_size=4).resolve(model)
    assert (resolved.page_size, resolved.max_model_len) == (4, 400)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 8}, "page_size=8.*index_block_size=4"),
        ({"max_model_len": 401, "num_pages": 100}, "max_model_len=401.*at most 400, or more"),
        ({"dtype": "float16"}, "dtype='float16'; use 'float32' or 'bfloat16'"),
        ({"num_pages": 0}, "num_pages=0 must be a whole number of at least 1"),
        ({"max_tokens_per_step": 1.5}, "max_tokens_per_step=1.5"),
    ],
)
def test_engine_limits_that_cannot_hold_are_refused(options, message):
    model = ModelConfig.from_dict(tiny_config(), source="tiny")
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options).resolve(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu"}, "device='gpu'; use 'cpu', 'cuda'"),
        ({"kv_dtype": "fp8"}, "kv_dtype='fp8'; use 'auto' or 'float8_e4m3fn'"),
        ({"index_dtype": "bfloat16"}, "index_dtype='bfloat16'"),
        ({"cuda_graph_sizes": (4, 0)}, "cuda_graph_sizes"),
    ],
)
def test_engine_options_of_the_gpu_are_checked(options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        EngineConfig(**options)


def test_what_is_left_to_the_device_is_resolved():
    model = ModelConfig.from_dict(tiny_config(), source="tiny")
    plain = EngineConfig(max_running_requests=40).resolve(model)
    assert plain.cuda_graph_sizes == (1, 2, 4, 8, 16, 32, 40)
    assert plain.async_scheduling is False
    assert EngineConfig(device="cuda").resolve(model).async_scheduling is True
    few = EngineConfig(cuda_graph_sizes=(64, 2, 2), max_running_requests=16).resolve(model)
    assert few.cuda_graph_sizes == (2,)
    assert EngineConfig(cuda_graph_sizes=()).resolve(model).cuda_graph_sizes == ()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_an_engine_for_cuda_needs_a_device():
    model = ModelConfig.from_dict(tiny_config(), source="tiny")
    with pytest.raises(ConfigError, match=r"device='cuda': torch .* sees no CUDA device"):
        Engine(model, EngineConfig(device="cuda"))
