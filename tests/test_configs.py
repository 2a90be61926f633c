from pathlib import Path

import pytest

from m3rl.config import Config

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_file_in_configs_loads_and_its_resolved_form_loads_to_the_same(file, tmp_path):
    loaded = Config.load(file)
    again = tmp_path / "config.yaml"
    again.write_text(loaded.resolved_yaml())
    assert Config.load(again) == loaded


def test_the_embedded_default_is_among_them():
    assert "tiny_cpu.yaml" in [file.name for file in FILES]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_model_that_a_configuration_names_is_in_the_repository_or_is_the_users(
    file, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    loaded = Config.load(file)
    if loaded.model.path.startswith("configs/"):
        assert (loaded.find(loaded.model.path) / "config.json").is_file()
