"""Engine arguments as vLLM itself has and checks them; no engine is started."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.engine.arg_utils import EngineArgs

from m3rl.rollout.backend import BackendError
from m3rl.rollout.vllm_settings import make_config
from m3rl.vllm_arguments import ALLOWED, KEY, REFUSED
from tests.vllm.conftest import settings


def test_vllm_has_every_argument_that_is_allowed_or_refused_by_name():
    names = {each.name for each in dataclasses.fields(EngineArgs)}
    assert (ALLOWED | REFUSED.keys()) - names == set()
    assert ALLOWED & REFUSED.keys() == set()


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"block_size": "banana"}, "block_size='banana': Input should be a valid integer"),
        ({"kernel_config": {"moe_backend": "no"}}, "kernel_config.moe_backend='no': Input should"),
        ({"kv_cache_dtype": "fp8_no"}, "kv_cache_dtype='fp8_no': Input should be 'auto'"),
    ],
)
def test_a_value_that_vllm_refuses_is_told_with_its_key(qwen3, extra: dict[str, Any], said: str):
    with pytest.raises(BackendError) as caught:
        make_config(settings(qwen3 / "1", extra=extra))
    assert f"{KEY}.{said}" in str(caught.value)


def test_an_architecture_that_nobody_knows_is_told_without_the_advice_to_upgrade(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "strange"}))
    with pytest.raises(BackendError) as caught:
        make_config(settings(tmp_path))
    assert "do not know model_type 'strange'" in str(caught.value)
    assert "pip install" not in str(caught.value)
