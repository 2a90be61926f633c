import errno
import os
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import pytest
from ray.exceptions import RayTaskError

from m3rl import cli
from m3rl.checkpoint import CheckpointError
from m3rl.cli import RUNS, main
from m3rl.rollout.backend import BackendError
from m3rl.rollout.rewards import RewardError
from m3rl.weight_sync.errors import NotReadyError, SyncError

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("quiet_logging")


class FakeRuns:
    """Stands in for every module that runs something, and records what it was asked."""

    def __init__(self):
        self.calls = []
        self.outcome = lambda: 0

    def __getattr__(self, name):
        def run(config):
            self.calls.append((name, config))
            return self.outcome()

        return run


@pytest.fixture
def runs(monkeypatch):
    fake = FakeRuns()
    for place, _ in RUNS.values():
        monkeypatch.setitem(sys.modules, place.partition(":")[0], fake)
    monkeypatch.setattr("m3rl.cli.signal.signal", lambda *_: None)
    return fake


@pytest.mark.parametrize(
    ("command", "function"),
    [("train", "train"), ("rollout", "rollout"), ("eval", "evaluate"), ("sft", "sft")],
)
def test_each_command_calls_its_function_with_the_loaded_configuration(
    file, runs, command, function
):
    assert main([command, file, "train.steps=3", "rollout.num_prompts=2"]) == 0
    [(name, config)] = runs.calls
    assert name == function
    assert (config.train.steps, config.rollout.num_prompts) == (3, 2)


def test_the_exit_code_is_the_functions(file, runs):
    runs.outcome = lambda: 1
    assert main(["train", file]) == 1


# BR-054
@pytest.mark.parametrize("word", ["lerning_rate=1", "num-epochs=2", "lr=1", "optimizer.lr=abc"])
def test_a_mistake_in_a_setting_ends_with_2_and_no_traceback(file, runs, capsys, word):
    assert main(["train", file, word]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"error: {word.partition('=')[0]}: ")
    assert "Traceback" not in errors
    assert runs.calls == []


def test_what_cannot_work_is_refused_before_anything_starts(file, runs, tmp_path, capsys):
    (tmp_path / "model" / "model.safetensors").unlink()
    assert main(["train", file]) == 2
    assert "neither model.safetensors nor" in capsys.readouterr().err
    assert runs.calls == []


@pytest.mark.parametrize(
    ("command", "code"), [("train", 2), ("sft", 2), ("rollout", 0), ("eval", 0)]
)
def test_weights_in_mxfp8_serve_where_nothing_is_trained(file, runs, tmp_path, command, code):
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b'"F32"', b'"F8_E4M3"', 1))
    size = int.from_bytes(weights.read_bytes()[:8], "little") + len("F8_E4M3") - len("F32")
    weights.write_bytes(size.to_bytes(8, "little") + weights.read_bytes()[8:])
    assert main([command, file]) == code


def test_supervised_training_from_random_weights_needs_none(file, runs, tmp_path):
    (tmp_path / "model" / "model.safetensors").unlink()
    assert main(["sft", file, "sft.init=random"]) == 0
    assert main(["sft", file, "sft.init=path"]) == 2


def test_ctrl_c_ends_with_130(file, runs, capsys):
    def interrupted():
        raise KeyboardInterrupt

    runs.outcome = interrupted
    assert main(["train", file]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_an_interrupt_is_told_with_how_to_go_on(file, runs, capsys):
    def interrupted():
        error = KeyboardInterrupt()
        error.add_note("`m3rl train c.yaml` resumes from step 3")
        raise error

    runs.outcome = interrupted
    assert main(["train", file]) == 130
    assert capsys.readouterr().err == "interrupted\n`m3rl train c.yaml` resumes from step 3\n"


def test_a_termination_is_told_and_ends_with_143(file, runs, capsys):
    runs.outcome = cli._terminate
    assert main(["train", file]) == 143
    assert capsys.readouterr().err == "terminated\n"


def test_a_termination_that_comes_back_as_an_interrupt_of_rays_own_ends_with_143(
    file, runs, capsys
):
    def waiting():
        with suppress(KeyboardInterrupt):
            cli._terminate()
        raise KeyboardInterrupt

    runs.outcome = waiting
    assert main(["train", file]) == 143
    assert capsys.readouterr().err == "terminated\n"
    test_ctrl_c_ends_with_130(file, runs, capsys)


def test_another_exit_is_left_alone(file, runs):
    def ending():
        sys.exit(3)

    runs.outcome = ending
    with pytest.raises(SystemExit) as ended:
        main(["train", file])
    assert ended.value.code == 3


@pytest.mark.parametrize("command", [[], ["train"], ["sft"]])
def test_the_exit_codes_are_in_the_help(capsys, command):
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    assert "143 terminated" in capsys.readouterr().out


def test_what_does_nothing_is_told_before_a_run(file, runs, caplog):
    assert main(["train", file, "weight_sync.delta_full_every=3"]) == 0
    assert "weight_sync.delta_full_every does nothing" in caplog.text


EXPECTED = [
    CheckpointError("the disk is full"),
    BackendError("no replica is left"),
    SyncError("0 replicas hold version 3"),
    NotReadyError("too few replicas"),
    RewardError("9 of 9 rewards failed"),
    OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "metrics.jsonl"),
]


def raising(error):
    def run():
        raise error

    return run


@pytest.mark.parametrize("error", EXPECTED, ids=lambda error: type(error).__name__)
def test_an_expected_failure_ends_with_1_and_its_message_alone(file, runs, capsys, error):
    runs.outcome = raising(error)
    assert main(["train", file]) == 1
    assert capsys.readouterr().err == f"error: {error}\n"


def test_an_expected_failure_of_a_ray_worker_is_told_without_the_traceback_from_there(
    file, runs, capsys
):
    error = RayTaskError("save", "a traceback\nof many lines", CheckpointError("the disk is full"))
    runs.outcome = raising(error.as_instanceof_cause())
    assert main(["train", file]) == 1
    assert capsys.readouterr().err == "error: the disk is full\n"


@pytest.mark.parametrize("error", [RuntimeError("a fault of ours"), PermissionError(13, "no")])
def test_other_errors_keep_their_traceback(file, runs, error):
    runs.outcome = raising(error)
    with pytest.raises(type(error)) as caught:
        main(["train", file])
    assert caught.value is error


def test_the_traceback_of_an_expected_failure_is_in_the_run_log_and_not_on_the_console(
    file, tmp_path
):
    program = """
        import sys, types
        from m3rl.cli import main
        from m3rl.errors import M3rlError
        from m3rl.run_dir import RunDirectory

        def train(config):
            with RunDirectory(config, "train"):
                raise M3rlError("this is all there is to say")

        sys.modules["m3rl.trainer"] = types.SimpleNamespace(train=train)
        sys.exit(main(["train", sys.argv[1]]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), file],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    again = f"`m3rl train {tmp_path / 'run' / 'config.yaml'}` begins again with the first step"
    assert done.stderr.endswith(
        f"error: this is all there is to say\nthere is no checkpoint yet: {again}\n"
    )
    assert "Traceback" not in done.stderr
    assert "Traceback" in (tmp_path / "run" / "run.log").read_text()


@pytest.mark.parametrize("arguments", [[], ["fly"], ["check", "x.yaml", "--gpus", "0"]])
def test_a_command_that_does_not_exist_ends_with_2(arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


def test_doctor_tells_what_is_missing_by_its_exit_code(file, tmp_path, capsys):
    assert main(["doctor", file]) == 0
    (tmp_path / "model" / "config.json").unlink()
    assert main(["doctor", file]) == 1
    assert "something is missing" in capsys.readouterr().out


def test_an_interrupt_while_libraries_load_waits_until_they_are_loaded():
    events = []

    def load_interrupted():
        with cli._interrupts_held():
            os.kill(os.getpid(), signal.SIGINT)
            events.append("loaded")

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        load_interrupted()
    assert events == ["loaded"]
    assert signal.getsignal(signal.SIGINT) is before
