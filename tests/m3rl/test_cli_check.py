"""`m3rl check`: every file is looked at, sizes are planned, in seconds."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from m3rl.cli import main

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("quiet_logging")


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
