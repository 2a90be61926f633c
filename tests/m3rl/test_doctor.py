import importlib.metadata

from m3rl import doctor
from tests.m3rl.run_files import config, write_model


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
