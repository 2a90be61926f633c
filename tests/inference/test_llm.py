"""The offline door: a directory, prompts, completions in order."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from inference import LLM, SamplingParams
from inference.config import ConfigError
from inference.llm import derived_seed, stored_dtype, stored_quantization
from inference.quantize import quantize_checkpoint
from tests.inference.engine.engines import RAW, char_tokenizer, greedy, prompt, run_alone
from tests.tiny_models import random_checkpoint, tiny_config


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The weights of `run_alone`, as the multimodal release lays them out, with a tokenizer."""
    path = tmp_path_factory.mktemp("checkpoint")
    random_checkpoint(path, RAW, seed=0)
    char_tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def llm(checkpoint):
    return LLM(checkpoint, num_pages=64, max_running_requests=3)


def test_token_ids_in_give_completions_in_order(llm):
    prompts = [prompt(n, seed=n) for n in (9, 1, 12, 3, 5)]
    params = [greedy(n) for n in (9, 1, 5, 7, 3)]
    outputs = llm.generate(prompts, params)
    for ids, each, output in zip(prompts, params, outputs, strict=True):
        assert output.prompt_ids.tolist() == ids
        expected = run_alone(ids, each)
        assert output.token_ids.tolist() == expected.token_ids.tolist()
        assert output.finish_reason == "length"
        np.testing.assert_allclose(output.logprobs, expected.logprobs, rtol=0, atol=1e-5)


def test_text_in_gives_text_out(llm):
    tokenizer = char_tokenizer()
    (output,) = llm.generate(["1+1="], greedy(6))
    assert output.prompt_ids.tolist() == [tokenizer.token_to_id(char) for char in "1+1="]
    assert output.text == tokenizer.decode(output.token_ids.tolist())
    assert llm.generate("1+1=", greedy(6))[0].token_ids.tolist() == output.token_ids.tolist()


def test_stop_strings_work_from_text(llm):
    (whole,) = llm.generate(["1+1="], greedy(12))
    (cut,) = llm.generate(["1+1="], greedy(12, stop=(whole.text[3:5],)))
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index(whole.text[3:5])]


# BR-025
def test_one_seed_for_equal_prompts_gives_different_completions_that_repeat(llm):
    params = SamplingParams(max_tokens=12, seed=7, ignore_eos=True)
    first = llm.generate([prompt(5)] * 8, params)
    again = llm.generate([prompt(5)] * 8, params)
    ids = [tuple(output.token_ids.tolist()) for output in first]
    assert len(set(ids)) >= 7
    assert [tuple(output.token_ids.tolist()) for output in again] == ids
    assert first[0].seed == 7
    alone = SamplingParams(max_tokens=12, seed=first[5].seed, ignore_eos=True)
    assert llm.generate([prompt(5)], alone)[0].token_ids.tolist() == list(ids[5])


# BR-025
def test_no_seed_gives_another_completion_each_time(llm):
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    ids = {
        tuple(output.token_ids.tolist())
        for _ in range(2)
        for output in llm.generate([prompt(5)] * 4, params)
    }
    assert len(ids) == 8


def test_derived_seeds_are_64_bit_and_distinct():
    seeds = {derived_seed(seed, index) for seed in (0, 1, -(2**63)) for index in range(200)}
    assert len(seeds) == 600
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)


def test_a_bad_prompt_stops_the_call_and_leaves_the_engine_clean(llm):
    with pytest.raises(ValueError, match="token id 97 is outside the vocabulary"):
        llm.generate([prompt(5), [97]], greedy(4))
    assert not llm.engine.has_work
    assert len(llm.generate([prompt(5)], greedy(4))[0].token_ids) == 4
    assert llm.generate([]) == []


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([5, 6, 7], None, "prompt 5 is neither text nor a list of token ids"),
        ([[5], [6]], [SamplingParams()], "1 SamplingParams for 2 prompts"),
        ([""], None, "the prompt is empty"),
    ],
)
def test_misshapen_calls_are_explained(llm, prompts, params, message):
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, params)


def test_text_without_a_tokenizer_is_refused(checkpoint, tmp_path):
    for file in checkpoint.iterdir():
        if file.name != "tokenizer.json":
            (tmp_path / file.name).symlink_to(file)
    llm = LLM(tmp_path, num_pages=16)
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        llm.generate(["text"])
    assert llm.generate([[5]], greedy(2))[0].text is None


def test_an_unknown_option_is_refused_with_a_suggestion(checkpoint):
    with pytest.raises(TypeError, match="'num_page'; did you mean 'num_pages'"):
        LLM(checkpoint, num_page=4)
    with pytest.raises(ConfigError, match="dtype='float8'"):
        LLM(checkpoint, dtype="float8")
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        LLM(checkpoint / "elsewhere")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, "float32"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"dtype": "torch.float32", "text_config": {"dtype": "bfloat16"}}, "float32"),
    ],
)
def test_the_dtype_is_the_one_that_config_json_names(tmp_path, content, expected):
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert stored_dtype(tmp_path) == expected


def test_a_bfloat16_model_generates(checkpoint):
    llm = LLM(checkpoint, dtype="bfloat16", num_pages=16)
    assert llm.engine._worker.pages[0].k_pages.dtype == torch.bfloat16
    (output,) = llm.generate([prompt(9)], greedy(4, raw_logprobs=True))
    # BF16 rounds to 3 digits; on logits of deviation 1 the likeliest token moves little.
    expected = run_alone(prompt(9), greedy(1)).logprobs[0]
    assert output.raw_logprobs[0] == pytest.approx(expected, abs=0.2)


def test_the_config_is_there_without_torch():
    code = "import sys, inference, inference.config; print('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("scope", "held"), [("experts", "mxfp8"), ("released", "mxfp8_released"), (None, "none")]
)
def test_what_is_stored_in_mxfp8_is_held_so_unless_asked_otherwise(tmp_path, scope, held):
    raw = tiny_config(intermediate_size=32, dense_intermediate_size=32, shared_intermediate_size=32)
    random_checkpoint(tmp_path / "bf16", raw, seed=0, dtype=torch.bfloat16)
    path = tmp_path / "bf16"
    if scope is not None:
        path = tmp_path / "mxfp8"
        quantize_checkpoint(tmp_path / "bf16", path, scope=scope)
    assert stored_quantization(path) == held
    assert LLM(path, num_pages=8).engine.engine_config.quantization == held
    widened = LLM(path, num_pages=8, quantization="none")
    assert {slot.storage for slot in widened.engine.weight_layout()} == {"plain"}


@pytest.mark.parametrize("said", [None, {"quant_method": "mxfp8"}, ["mxfp8"]])
def test_the_stored_dtypes_decide_whatever_the_config_says(tmp_path, said):
    raw = tiny_config(intermediate_size=32, dense_intermediate_size=32, shared_intermediate_size=32)
    random_checkpoint(tmp_path / "bf16", raw, seed=0, dtype=torch.bfloat16)
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "mxfp8", scope="experts")
    for name, held in (("bf16", "none"), ("mxfp8", "mxfp8")):
        file = tmp_path / name / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": said}))
        assert stored_quantization(tmp_path / name) == held
