"""The small Qwen3 that ships: made by its script, embedding and head are one, half taught."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from inference.kernels.packing import Packing
from m3rl.config import Config
from m3rl.data import load_data
from m3rl.model_layout import max_positions, stop_ids, whole_layout
from m3rl.policy_any import TransformersPolicy
from m3rl.rollout.chat import ChatFormat
from m3rl.sft import answered

MODEL = Path("configs/models/tiny_qwen3")


def test_the_script_writes_the_shipped_files_byte_for_byte(tmp_path: Path) -> None:
    script = "configs/models/make_tiny_qwen3.py"
    subprocess.run([sys.executable, script, str(tmp_path / "made")], check=True)
    made = {p.name: p.read_bytes() for p in (tmp_path / "made").iterdir()}
    assert made
    assert made == {name: (MODEL / name).read_bytes() for name in made}


def test_it_is_small_and_holds_its_embedding_once() -> None:
    slots = whole_layout(MODEL, "float32")
    assert sum(int(np.prod(slot.shape)) for slot in slots) == 468_736
    assert "lm_head.weight" not in {slot.name for slot in slots}
    assert (MODEL / "model.safetensors").stat().st_size < 3_000_000
    assert max_positions(MODEL) == 1024
    assert stop_ids(MODEL) == (258, 256)


def test_it_samples_a_third_of_the_answers_right_so_that_grpo_has_something_to_learn_from() -> None:
    config = Config.load("configs/tiny_qwen3_sft.yaml")
    chat = ChatFormat.load(MODEL)
    data = load_data(config, chat)
    policy = TransformersPolicy(MODEL, dtype="float32")
    policy.load(MODEL)
    assert data.eval is not None
    chances = []
    for prompt in data.eval.first(100):
        question, answer = answered(chat, prompt)
        ids_T = torch.from_numpy(np.concatenate([question, answer]).astype(np.int64))
        places = torch.arange(len(question), len(ids_T))
        with torch.no_grad():
            packing = Packing.of([len(ids_T)], "cpu")
            logprobs_M, _ = policy(ids_T, packing, places, temperature=1.0)
        chances.append(float(logprobs_M.sum().exp()))
    assert 0.3 < np.mean(chances) < 0.5
