"""The small M3 that ships: made by its script, M3-shaped, really sparse in the demo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from inference.config import FULL, MOE, SPARSE, ModelConfig
from m3rl.config import Config
from m3rl.data import load_data
from m3rl.rollout.chat import ChatFormat

MODEL = Path("configs/models/tiny_m3")


def test_the_script_writes_the_shipped_files_byte_for_byte(tmp_path: Path) -> None:
    script = "configs/models/make_tiny_m3.py"
    subprocess.run([sys.executable, script, str(tmp_path / "made")], check=True)
    made = {p.name: p.read_bytes() for p in (tmp_path / "made").iterdir()}
    assert made
    assert made == {name: (MODEL / name).read_bytes() for name in made}


def test_it_has_both_kinds_of_attention_and_of_mlp_and_a_shared_expert() -> None:
    config = ModelConfig.from_pretrained(MODEL)
    assert set(config.layer_types) == {FULL, SPARSE}
    assert MOE in config.mlp_layer_types
    assert "dense" in config.mlp_layer_types
    assert config.shared_intermediate_size > 0


def test_every_prompt_of_the_demo_is_longer_than_what_the_sparse_layers_may_read() -> None:
    config = Config.load("configs/tiny_cpu.yaml", ["data.train.size=200", "data.eval.size=50"])
    data = load_data(config, ChatFormat.load(MODEL))
    model = ModelConfig.from_pretrained(MODEL)
    readable = model.index_topk_blocks * model.index_block_size
    assert data.eval is not None
    for prompts in (data.train, data.eval):
        assert min(len(p.ids) for p in prompts.first(len(prompts))) > readable
