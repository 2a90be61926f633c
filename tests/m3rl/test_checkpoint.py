import errno
import json
import os
import shutil
import subprocess
import sys
import textwrap

import pytest
from safetensors import SafetensorError

from m3rl import checkpoint
from m3rl.checkpoint import CheckpointError, find_latest, save, write_model_directory


def writer(text):
    def write(path):
        (path / "model").mkdir()
        (path / "model" / "weights").write_text(text)
        (path / "optimizer").write_text(text * 2)
        (path / "config.json").write_text(text)

    return write


def names(run_dir):
    return sorted(p.name for p in (run_dir / "checkpoints").iterdir())


def test_what_was_saved_is_found_again(tmp_path):
    path = save(tmp_path, 4, writer("abc"), {"next_ordinal": 64}, keep=2)
    found = find_latest(tmp_path)
    assert (found.step, found.path, found.state) == (4, path, {"next_ordinal": 64})
    assert (found.path / "model" / "weights").read_text() == "abc"
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_000004\n"


def test_the_manifest_lists_size_and_hash_of_every_file(tmp_path):
    path = save(tmp_path, 1, writer("abc"), {}, keep=1)
    files = json.loads((path / "manifest.json").read_text())["files"]
    assert set(files) == {"model/weights", "optimizer", "config.json", "state.json"}
    abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert files["model/weights"] == {"bytes": 3, "sha256": abc}


def test_a_run_without_checkpoints_has_no_latest(tmp_path):
    assert find_latest(tmp_path) is None
    (tmp_path / "checkpoints").mkdir()
    assert find_latest(tmp_path) is None


def test_only_the_newest_are_kept(tmp_path):
    for step in (1, 2, 3, 10):
        save(tmp_path, step, writer(str(step)), {}, keep=2)
    assert names(tmp_path) == ["latest", "step_000003", "step_000010"]
    assert find_latest(tmp_path).step == 10


# BR-049
@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda p: os.truncate(p / "optimizer", 2), "optimizer has 2 bytes instead of 6"),
        (lambda p: (p / "optimizer").write_text("xxxxxx"), "does not match its hash"),
        (lambda p: (p / "model" / "weights").unlink(), "model/weights is missing"),
        (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda p: (p / "manifest.json").write_text("{"), "is not a manifest"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path, caplog, damage, fault):
    save(tmp_path, 1, writer("abc"), {"at": 1}, keep=3)
    damage(save(tmp_path, 2, writer("abc"), {"at": 2}, keep=3))
    assert find_latest(tmp_path).state == {"at": 1}
    assert fault in caplog.text
    assert "falling back to the checkpoint of step 1" in caplog.text


# BR-049
def test_a_faulty_newer_checkpoint_is_set_aside_and_what_is_saved_next_survives(tmp_path):
    save(tmp_path, 4, writer("abc"), {"at": 4}, keep=2)
    (save(tmp_path, 6, writer("abc"), {"at": 6}, keep=2) / "optimizer").write_text("xxxxxx")
    assert find_latest(tmp_path).step == 4
    assert names(tmp_path) == [".faulty_step_000006", "latest", "step_000004"]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_000004\n"
    save(tmp_path, 5, writer("abc"), {"at": 5}, keep=1)
    assert find_latest(tmp_path).state == {"at": 5}
    assert names(tmp_path) == [".faulty_step_000006", "latest", "step_000005"]
    # A second fault of the same step takes the place of the first.
    (save(tmp_path, 6, writer("new"), {"at": 6}, keep=2) / "optimizer").unlink()
    assert find_latest(tmp_path).step == 5
    assert names(tmp_path) == [".faulty_step_000006", "latest", "step_000005"]
    faulty = tmp_path / "checkpoints" / ".faulty_step_000006"
    assert (faulty / "model" / "weights").read_text() == "new"


def test_a_checkpoint_without_the_models_configuration_is_not_complete(tmp_path, caplog):
    save(tmp_path, 1, writer("abc"), {"at": 1}, keep=2)
    save(tmp_path, 2, lambda path: (path / "optimizer").write_text("abc"), {"at": 2}, keep=2)
    assert find_latest(tmp_path).state == {"at": 1}
    assert "manifest.json does not list config.json" in caplog.text


def test_saving_never_deletes_the_step_just_written(tmp_path):
    save(tmp_path, 4, writer("abc"), {"at": 4}, keep=1)
    (save(tmp_path, 6, writer("abc"), {"at": 6}, keep=1) / "optimizer").write_text("xxxxxx")
    save(tmp_path, 5, writer("abc"), {"at": 5}, keep=1)
    assert find_latest(tmp_path).state == {"at": 5}


def test_only_complete_checkpoints_count_as_kept(tmp_path):
    for step in (1, 2, 3):
        path = save(tmp_path, step, writer("abc"), {"at": step}, keep=3)
    os.truncate(path / "optimizer", 2)
    save(tmp_path, 4, writer("abc"), {"at": 4}, keep=2)
    assert names(tmp_path) == ["latest", "step_000002", "step_000003", "step_000004"]


def test_a_kill_before_the_pointer_moved_does_not_hide_the_newest(tmp_path):
    save(tmp_path, 1, writer("abc"), {"at": 1}, keep=2)
    save(tmp_path, 2, writer("abc"), {"at": 2}, keep=2)
    (tmp_path / "checkpoints" / "latest").write_text("step_000001\n")
    assert find_latest(tmp_path).step == 2


# BR-049
def test_when_no_checkpoint_is_complete_the_run_does_not_start_over_in_silence(tmp_path):
    path = save(tmp_path, 1, writer("abc"), {}, keep=1)
    (path / "optimizer").unlink()
    with pytest.raises(CheckpointError, match="delete them to start the run from its first step"):
        find_latest(tmp_path)
    assert names(tmp_path) == ["latest", "step_000001"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        ),
    ],
)
def test_a_full_disk_leaves_the_older_checkpoint_intact(tmp_path, error):
    save(tmp_path, 1, writer("abc"), {"at": 1}, keep=1)

    def write(path):
        (path / "half").write_text("half")
        raise error

    with pytest.raises(CheckpointError, match=r"disk is full.*intact \(step_000001\)"):
        save(tmp_path, 2, write, {}, keep=1)
    assert names(tmp_path) == ["latest", "step_000001"]
    assert find_latest(tmp_path).state == {"at": 1}
    save(tmp_path, 2, writer("abc"), {"at": 2}, keep=1)
    assert find_latest(tmp_path).state == {"at": 2}


def test_a_full_disk_while_the_manifest_is_written_leaves_the_older_intact(tmp_path, monkeypatch):
    save(tmp_path, 1, writer("abc"), {"at": 1}, keep=1)
    real = checkpoint._write_text

    def full(path, text):
        if path.name == "manifest.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, text)

    monkeypatch.setattr(checkpoint, "_write_text", full)
    with pytest.raises(CheckpointError, match="disk is full"):
        save(tmp_path, 2, writer("abc"), {"at": 2}, keep=1)
    assert find_latest(tmp_path).state == {"at": 1}


def test_an_error_of_the_writer_passes_through_and_leaves_nothing_behind(tmp_path):
    def write(path):
        raise RuntimeError("rank 1 died")

    with pytest.raises(RuntimeError, match="rank 1 died"):
        save(tmp_path, 1, write, {}, keep=1)
    assert names(tmp_path) == []


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 1, writer("old"), {"at": "old"}, keep=2)
    save(tmp_path, 1, writer("new"), {"at": "new"}, keep=2)
    assert find_latest(tmp_path).state == {"at": "new"}
    assert names(tmp_path) == ["latest", "step_000001"]


def test_keeping_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"checkpoint\.keep=0"):
        save(tmp_path, 1, writer("abc"), {}, keep=0)


KILLED = textwrap.dedent(
    """
    import os, pathlib, sys
    from m3rl import checkpoint

    run_dir, moment = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    calls = 0

    def dying(function):
        def wrapped(*args, **kwargs):
            global calls
            if calls == moment:
                os._exit(9)
            calls += 1
            return function(*args, **kwargs)
        return wrapped

    checkpoint._write_text = dying(checkpoint._write_text)
    checkpoint.sync_path = dying(checkpoint.sync_path)
    pathlib.Path.rename = dying(pathlib.Path.rename)

    def write(path):
        for name in ("a", "b", "config.json"):
            dying((path / name).write_text)(name)

    checkpoint.save(run_dir, 2, write, {"at": 2}, keep=2)
    os._exit(0)
    """
)


# BR-049
def test_a_kill_at_any_moment_of_a_save_leaves_a_complete_checkpoint(tmp_path):
    # Moments: three files, state, manifest, six syncs, rename, pointer and its rename, last sync.
    outcomes = []
    for moment in range(40):
        run_dir = tmp_path / str(moment)
        save(run_dir, 1, writer("abc"), {"at": 1}, keep=2)
        code = subprocess.run([sys.executable, "-c", KILLED, run_dir, str(moment)]).returncode
        found = find_latest(run_dir)
        outcomes.append(found.state["at"])
        if code == 0:
            break
        assert code == 9
        # The next save goes through whatever was left behind.
        save(run_dir, 3, writer("abc"), {"at": 3}, keep=2)
        assert find_latest(run_dir).state == {"at": 3}
        assert not [n for n in names(run_dir) if n.startswith((".writing", ".replaced"))]
    assert code == 0
    assert outcomes == sorted(outcomes)
    assert outcomes[:11] == [1] * 11
    assert outcomes[-1] == 2


def model_writer(text):
    def write(path):
        (path / "model.safetensors").write_text(text)
        (path / "config.json").write_text(text)

    return write


def test_a_model_directory_replaces_an_older_or_half_written_one(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "shard-00000.safetensors").write_text("half")
    (model / "vocab.json").write_text("older")
    write_model_directory(model, model_writer("new"))
    assert sorted(p.name for p in model.iterdir()) == ["config.json", "model.safetensors"]
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_model_that_could_not_be_written_leaves_the_older_one(tmp_path):
    write_model_directory(tmp_path / "model", model_writer("old"))

    def write(path):
        model_writer("half")(path)
        raise CheckpointError("no space")

    with pytest.raises(CheckpointError, match="no space"):
        write_model_directory(tmp_path / "model", write)
    assert (tmp_path / "model" / "config.json").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_directory_with_other_things_in_it_is_not_replaced(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match=r"holds thesis\.tex, which is no part of a model"):
        write_model_directory(tmp_path, model_writer("new"))
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    with pytest.raises(CheckpointError, match="holds a file"):
        write_model_directory(tmp_path / "thesis.tex", model_writer("new"))


KILLED_MODEL = KILLED.replace(
    'checkpoint.save(run_dir, 2, write, {"at": 2}, keep=2)',
    "checkpoint.write_model_directory(run_dir, write)",
).replace('("a", "b", "config.json")', '("config.json", "model.safetensors")')


def test_a_kill_at_any_moment_leaves_a_whole_model_or_none_and_the_next_write_goes_through(
    tmp_path,
):
    assert "write_model_directory" in KILLED_MODEL
    for moment in range(20):
        folder = tmp_path / str(moment)
        folder.mkdir()
        write_model_directory(folder / "model", model_writer("old"))
        command = [sys.executable, "-c", KILLED_MODEL, folder / "model", str(moment)]
        code = subprocess.run(command).returncode
        model = folder / "model" if (folder / "model").exists() else folder / ".replaced_model"
        assert sorted(p.name for p in model.iterdir()) == ["config.json", "model.safetensors"]
        assert len({p.read_text() == "old" for p in model.iterdir()}) == 1
        write_model_directory(folder / "model", model_writer("next"))
        assert [p.name for p in folder.iterdir()] == ["model"]
        if code == 0:
            break
    assert (code, moment) == (0, 8)  # two files, three syncs, two renames, the folder's sync


def test_a_writer_that_hides_why_it_failed_on_a_full_disk_is_understood(tmp_path, monkeypatch):
    """torch's zip writer says `unexpected pos 704 vs 598` and nothing of the disk."""
    save(tmp_path, 1, writer("x"), {}, keep=2)
    nothing_left = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr("m3rl.checkpoint.shutil.disk_usage", lambda path: nothing_left)

    def write(path):
        raise RuntimeError("unexpected pos 704 vs 598")

    with pytest.raises(CheckpointError, match="the disk is full"):
        save(tmp_path, 2, write, {}, keep=2)
    assert find_latest(tmp_path).step == 1
