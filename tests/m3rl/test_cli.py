import errno
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from ray.exceptions import RayTaskError

from m3rl import cli
from m3rl.checkpoint import CheckpointError
from m3rl.cli import RUNS, main
from m3rl.rollout.backend import BackendError
from m3rl.rollout.rewards import RewardError
from m3rl.weight_sync.errors import NotReadyError, SyncError
from tests.m3rl.run_files import settings, write_model

ROOT = Path(__file__).parents[2]


@pytest.fixture
def file(tmp_path):
    write_model(tmp_path / "model")
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(settings(tmp_path)))
    return str(path)


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


def test_check_looks_at_every_file_also_after_one_that_fails(file, tmp_path, capsys):
    bad = tmp_path / "bad.yaml"
    bad.write_text("run: {nmae: x}\n")
    assert main(["check", str(bad), file, "rollout.max_tokens=13"]) == 2
    out, err = capsys.readouterr()
    assert f"error: {bad}: run.nmae: unknown key" in err
    assert f"{file}: checked" in out
    assert "tokens of a training step: at most 904" in out  # 4 prompts of 2 times 100 + 13


def test_the_rows_of_a_refused_memory_plan_are_no_errors_of_their_own(file, capsys):
    sizes = ["rollout.backend.device=cuda", "rollout.backend.gpu_memory_gib=1"]
    assert main(["check", file, *sizes]) == 2
    first, *rows = capsys.readouterr().err.splitlines()
    assert first.startswith(f"error: {file}: rollout.backend: ")
    assert any(row.startswith("    KV pages ") for row in rows)
    assert rows[-1].startswith("  what fits: ")


def test_check_plans_sizes_without_the_weights(file, tmp_path, capsys):
    (tmp_path / "model" / "model.safetensors").unlink()
    assert main(["check", file, "--gpus", "1,4"]) == 0
    out = capsys.readouterr().out
    assert "refused: train.num_ranks and one replica are 2 GPUs" in out
    assert main(["check", file, "--gpus", "1"]) == 2


def test_files_that_are_not_here_are_needed_at_launch_and_the_plan_is_printed(
    file, tmp_path, capsys
):
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "model" / "tokenizer.json").unlink()
    far = [
        "data.train={kind: file, path: far/train.jsonl}",
        "reward={kind: function, target: 'no_such_module.inside:score'}",
    ]
    assert main(["check", file, *far]) == 0
    out, err = capsys.readouterr()
    needs = [line for line in out.splitlines() if line.startswith("needed at launch: ")]
    assert [need.split(": ")[1].rpartition("/")[2] for need in needs] == [
        "tokenizer.json",
        "model",
        "data.train.path",
        "reward.target",
    ]
    assert "no module 'no_such_module' here" in needs[-1]
    assert "weight sync: " in out
    assert f"{file}: checked; a launch needs 4 more things" in out
    assert err == ""
    assert main(["train", file, *far]) == 2
    assert main(["doctor", file, *far]) == 1


def test_files_that_are_here_and_wrong_are_errors_of_a_check(file, tmp_path, capsys):
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    (tmp_path / "train.jsonl").write_text("{}\n")
    rows = f"data.train={{kind: file, path: {tmp_path}/train.jsonl}}"
    assert main(["check", file, rows, "reward={kind: exact}"]) == 2
    err = capsys.readouterr().err
    assert "truncated or damaged" in err
    assert "has no 'question'" in err


def test_the_real_model_is_planned_from_its_config_alone(capsys):
    files = [str(ROOT / "configs" / name) for name in ("m3_256gpu.yaml", "m3_128gpu_mxfp8.yaml")]
    assert main(["check", *files]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("426,174,572,928") == 2
    split = "128 trainer rank(s) in shards: ep=8, cp=1, 8 replica(s), each of 16 ranks: tp=16, dp=1"
    assert f"m3_256gpu: {split}" in out
    for balance, seconds, floor_s in zip(
        re.findall(r"from a mean one \(balance (.*?)\)", out),
        re.findall(r"projected on H200s: (.*?) s,", out),
        re.findall(r"projected on H200s: .* s, floor (.*?) s, at 50 GB/s", out),
        strict=True,
    ):
        assert float(balance) <= 1.05
        assert float(seconds) <= 1.2 * float(floor_s)
    assert out.count("minimax_m3/tokenizer.json: missing") == 2
    assert out.count("neither model.safetensors nor") == 2
    assert out.count("data.train.path: no file data/dapo_math_17k.jsonl") == 2


def test_check_needs_a_file(capsys):
    assert main(["check", "train.steps=1"]) == 2
    assert "needs at least one configuration file" in capsys.readouterr().err


@pytest.mark.parametrize("sizes", ["a,b", "8,,16", "0", "-8", "8,1.5", ""])
def test_sizes_that_are_no_numbers_of_gpus_are_refused_with_what_they_should_be(capsys, sizes):
    with pytest.raises(SystemExit) as ended:
        main(["check", "x.yaml", f"--gpus={sizes}"])
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert f"argument --gpus: {sizes!r} is no list of numbers of GPUs" in err


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


@pytest.mark.parametrize("kind", ["m3", "vllm"])
def test_check_answers_in_seconds_without_importing_what_a_run_starts(file, kind):
    program = (
        "import sys; from m3rl.cli import RUNS, main; code = main(['check', *sys.argv[1:]]); "
        "heavy = {'ray', 'torch', 'transformers', 'vllm', 'wandb', 'accelerate'}; "
        "assert not heavy & set(sys.modules), heavy & set(sys.modules); "
        "import resource; used = resource.getrusage(resource.RUSAGE_SELF); "
        "assert used.ru_utime + used.ru_stime < 5; sys.exit(code)"
    )
    words = [f"rollout.backend.kind={kind}", "data.max_prompt_tokens=4", "rollout.max_tokens=4"]
    done = subprocess.run(
        [sys.executable, "-c", program, file, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"{file}: checked" in done.stdout


@pytest.fixture(autouse=True)
def quiet_logging():
    """`main` sets up logging for a process; tests keep their own."""
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    yield
    root.setLevel(before[0])
    root.handlers[:] = before[1]


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
