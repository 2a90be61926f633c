"""One engine for each model and test session: a start takes 10 to 30 s, most of it imports."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from m3rl.rollout.vllm_replica import VllmReplica
from m3rl.rollout.vllm_settings import VllmSettings
from tests.m3rl.tiny_tokenizer import write_tokenizer
from tests.tiny_models import random_checkpoint, tiny_config
from tests.vllm.tiny_hf import write_qwen3

M3_LEN = 64
M3_CONFIG = tiny_config(
    num_hidden_layers=3, head_dim=32, sparse_block_size=16, sparse_topk_blocks=M3_LEN // 16
)
"""Dense attention is exact in it up to M3_LEN tokens."""


@pytest.fixture(scope="session", autouse=True)
def _environment() -> None:
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory) -> Path:
    """Checkpoints of one tied tiny Qwen3: folders `1`, `2`; characters are its tokens."""
    folder = tmp_path_factory.mktemp("qwen3")
    for seed in (1, 2):
        write_qwen3(folder / str(seed), seed, tied=True)
        write_tokenizer(folder / str(seed))
    return folder


@pytest.fixture(scope="session")
def m3(tmp_path_factory) -> Path:
    """Checkpoints of one tiny M3 in the published layout, vision's config beside: `1`, `2`."""
    folder = tmp_path_factory.mktemp("m3")
    for seed in (1, 2):
        (folder / str(seed)).mkdir()
        random_checkpoint(folder / str(seed), M3_CONFIG, seed)
    return folder


def settings(path: Path, **changes: Any) -> VllmSettings:
    options = {"max_model_len": 128, "max_num_seqs": 4, "kv_cache_gib": 0.1}
    options |= {"extra": {"block_size": 32}, "timeout_s": 60.0}
    return VllmSettings(str(path), "float32", "cpu", **options | changes)


@pytest.fixture(scope="session")
def qwen3_replica(qwen3) -> Iterator[VllmReplica]:
    replica = VllmReplica(settings(qwen3 / "1"))
    yield replica
    replica.engine.close()


@pytest.fixture(scope="session")
def m3_replica(m3) -> Iterator[VllmReplica]:
    replica = VllmReplica(settings(m3 / "1", max_model_len=M3_LEN))
    yield replica
    replica.engine.close()
