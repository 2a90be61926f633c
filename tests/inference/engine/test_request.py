"""What may be asked."""

import numpy as np
import pytest

from inference.engine.request import Request, SamplingParams, make_live


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -0.1}, r"temperature=-0.1 must be a finite number >= 0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0.0}, r"top_p=0.0 must be in \(0, 1\]"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"top_k": -1}, "top_k=-1 must be >= 0; 0 keeps all tokens"),
        ({"min_p": 1.1}, "min_p=1.1"),
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1"),
        ({"stop": "ab"}, r"stop='ab' is one string; write stop=\('ab',\)"),
        ({"stop": ("",)}, "non-empty strings"),
        ({"stop_token_ids": (-3,)}, "token ids >= 0"),
        ({"seed": 2**63}, "64-bit signed integer"),
    ],
)
def test_sampling_params_out_of_range_are_refused(params, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)


@pytest.mark.parametrize(
    ("prompt_ids", "message"),
    [
        ([], "'r': the prompt is empty"),
        ("text", "prompt_ids is text"),
        ([[1, 2]], r"shape \(1, 2\)"),
        ([1.5], "dtype float64"),
        ([3, -1], "-1 is not a token id"),
        ([2**31], "2147483648 is not a token id"),
    ],
)
def test_a_prompt_that_is_no_list_of_token_ids_is_refused(prompt_ids, message):
    with pytest.raises(ValueError, match=message):
        Request("r", prompt_ids)


def test_lists_in_params_become_tuples_and_prompts_int32_arrays():
    params = SamplingParams(stop=["a"], stop_token_ids=[np.int64(5)])
    assert params == SamplingParams(stop=("a",), stop_token_ids=(5,))
    request = Request("r", [4, 5], params)
    assert request.prompt_ids.dtype == np.int32
    assert request.prompt_ids.tolist() == [4, 5]


def test_the_engine_does_not_keep_the_callers_array():
    ids = np.array([4, 5], np.int32)
    request = Request("r", ids)
    ids[0] = 9
    assert request.prompt_ids.tolist() == [4, 5]


# BR-025
def test_a_missing_seed_is_drawn_anew_each_time():
    seeds = {make_live(Request("r", [1]), ()).seed for _ in range(8)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_eos_ends_a_completion_unless_ignored():
    eos = (2, 7)
    assert make_live(Request("r", [1]), eos).stop_ids.tolist() == [2, 7]
    stops = SamplingParams(stop_token_ids=(5,), ignore_eos=True)
    assert make_live(Request("r", [1], stops), eos).stop_ids.tolist() == [5]
