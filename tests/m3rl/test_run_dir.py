"""The run directory: one owner, one configuration, one process."""

import json
from pathlib import Path

import pytest

from m3rl.checkpoint import save
from m3rl.config import Config, ConfigError
from m3rl.errors import M3rlError
from m3rl.run_dir import RunDirectory, check_same_model


def config(tmp_path: Path, *overrides: str) -> Config:
    return Config.load("configs/tiny_cpu.yaml", [f"run.dir={tmp_path / 'run'}", *overrides])


def begin(tmp_path: Path, *overrides: str, purpose: str = "train") -> None:
    """A run that has come to its first result."""
    with RunDirectory(config(tmp_path, *overrides), purpose) as run:
        (run.path / "metrics.jsonl").write_text('{"step": 1}\n')


def test_a_run_that_failed_before_its_first_result_leaves_the_directory_free(
    tmp_path: Path,
) -> None:
    with RunDirectory(config(tmp_path, "rollout.group_size=4"), "rollout"):
        pass
    with RunDirectory(config(tmp_path), "train") as run:
        assert Config.load(run.path / "config.yaml", []).rollout.group_size == 8


def test_the_same_configuration_and_a_longer_one_may_go_on(tmp_path: Path) -> None:
    begin(tmp_path)
    longer = config(tmp_path, "train.steps=1000", "checkpoint.every=7", "run.name=other")
    with RunDirectory(longer, "train") as run:
        assert Config.load(run.path / "config.yaml", []).train.steps == 1000


def test_what_differs_is_named_with_both_values(tmp_path: Path) -> None:
    begin(tmp_path)
    with pytest.raises(ConfigError, match=r"rollout\.group_size: 4 here, 8 there"):
        RunDirectory(config(tmp_path, "rollout.group_size=4"), "train")
    with RunDirectory(config(tmp_path), "train"):  # the refusal left it as it was, and unlocked
        pass


def test_what_leaves_the_results_alone_may_change_and_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begin(tmp_path)
    with caplog.at_level("INFO", "m3rl.run_dir"):
        patience = ("weight_sync.timeout_s=90", "rollout.timeout_s=900", "train.timeout_s=60")
        patient = config(tmp_path, *patience)
        with RunDirectory(patient, "train") as run:
            assert Config.load(run.path / "config.yaml", []).rollout.timeout_s == 900
    assert caplog.messages == [
        "changed for the rest of the run: rollout.timeout_s: 300.0 before, 900.0 now",
        "changed for the rest of the run: train.timeout_s: 1800.0 before, 60.0 now",
        "changed for the rest of the run: weight_sync.timeout_s: 60.0 before, 90.0 now",
    ]


def end(tmp_path: Path, error: BaseException, purpose: str = "train") -> list[str]:
    """Notes with which an error leaves a run."""
    words = ["rollout.num_prompts=8"] if purpose == "rollout" else []
    with pytest.raises(type(error)) as caught, RunDirectory(config(tmp_path, *words), purpose):
        raise error
    return getattr(caught.value, "__notes__", [])


@pytest.mark.parametrize("error", [M3rlError("lost"), ZeroDivisionError(), KeyboardInterrupt()])
def test_what_ends_a_run_says_how_to_go_on(tmp_path: Path, error: BaseException) -> None:
    command = f"m3rl train {tmp_path / 'run' / 'config.yaml'}"
    begins_again = f"there is no checkpoint yet: `{command}` begins again with the first step"
    assert end(tmp_path, error) == [begins_again]
    for step in (20, 40):
        save(tmp_path / "run", step, lambda path: (path / "config.json").touch(), {}, keep=2)
    assert end(tmp_path, type(error)()) == [f"`{command}` resumes from step 40"]
    (tmp_path / "run/checkpoints/step_000040/config.json").unlink()
    assert end(tmp_path, type(error)()) == [f"`{command}` resumes from step 20"]
    is_logged = "resumes from step 20" in (tmp_path / "run" / "run.log").read_text()
    assert is_logged != isinstance(error, KeyboardInterrupt)  # an interrupt is no error


def test_a_collection_that_ends_early_says_that_it_keeps_its_files(tmp_path: Path) -> None:
    (note,) = end(tmp_path, M3rlError("lost"), purpose="rollout")
    assert note == (
        f"`m3rl rollout {tmp_path / 'run' / 'config.yaml'}` keeps the files that are there and "
        "collects the others"
    )


def test_a_configuration_that_cannot_work_is_to_be_mended_first(tmp_path: Path) -> None:
    assert end(tmp_path, ConfigError("checkpoint.resume is never")) == []


def test_the_configuration_of_a_run_goes_on_with_it(tmp_path: Path) -> None:
    begin(tmp_path, "grpo.preset=gspo", "train.steps=7")
    again = Config.load(tmp_path / "run" / "config.yaml")
    with RunDirectory(again, "train") as run:
        assert run.path == tmp_path / "run"
    assert again.train.steps == 7


def test_another_seed_is_another_run(tmp_path: Path) -> None:
    begin(tmp_path)
    with pytest.raises(ConfigError, match=r"run\.seed"):
        RunDirectory(config(tmp_path, "run.seed=1"), "train")


def test_a_directory_belongs_to_one_command(tmp_path: Path) -> None:
    begin(tmp_path)
    with pytest.raises(ConfigError, match="belongs to `m3rl train`"):
        RunDirectory(config(tmp_path), "rollout")


def test_a_second_holder_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    with (
        RunDirectory(config(tmp_path), "train"),
        pytest.raises(ConfigError, match="another m3rl process"),
    ):
        RunDirectory(config(tmp_path), "train")
    with RunDirectory(config(tmp_path), "train"):
        pass


def test_a_path_that_cannot_be_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ConfigError, match="cannot be used: File exists"):
        RunDirectory(config(tmp_path), "train")


def test_evaluations_are_kept_once_and_cut_where_the_run_goes_on(tmp_path: Path) -> None:
    def record(version: int, accuracy: float) -> dict:
        return {"set": "a", "version": version, "step": version, "accuracy": accuracy}

    with RunDirectory(config(tmp_path), "train") as run:
        run.record_evaluation(record(0, 0.25))
        run.record_evaluation(record(0, 0.99))
        run.record_evaluation(record(5, 0.5))
        assert run.evaluation("a", 0) == record(0, 0.25)
        assert run.evaluation("a", 5) == record(5, 0.5)
        assert run.evaluation("b", 0) is None
        run.cut_evaluations(4)
        assert run.evaluation("a", 0) == record(0, 0.25)
        assert run.evaluation("a", 5) is None
        run.cut_evaluations(0)  # begun anew, perhaps with other weights: nothing of it holds
        assert run.evaluation("a", 0) is None


def test_a_changed_model_config_is_refused_with_the_key_and_both_values(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder, topk in ((old, 2), (new, 4)):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"hidden_size": 8, "topk": topk}))
        (folder / "tokenizer.json").write_text("{}")
    check_same_model(old, str(old))
    with pytest.raises(ConfigError, match=r"config\.json changed .*topk: was 2, is 4"):
        check_same_model(old, str(new))
    (new / "config.json").write_text((old / "config.json").read_text())
    (new / "tokenizer.json").write_text('{"a": 1}')
    with pytest.raises(ConfigError, match=r"tokenizer\.json changed"):
        check_same_model(old, str(new))
