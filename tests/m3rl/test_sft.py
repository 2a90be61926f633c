"""The warm start around its ranks: what it writes, and that it may be started again."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from m3rl import sft
from m3rl.config import ConfigError
from m3rl.errors import M3rlError
from m3rl.model_layout import whole_layout
from m3rl.train_rank import TrainRank
from tests.m3rl.run_files import config, write_model


class OneRank:
    """`launch.TrainerRanks` without processes; dies before a save of the model when asked to."""

    dies = False

    def __init__(self, settings, num_ranks, *, num_threads):
        self._rank = TrainRank(settings, 0, 1)

    def all(self, method, *args):
        if method == "save_model" and self.dies:
            raise RuntimeError("killed")
        return [getattr(self._rank, method)(*args)]

    def save(self, path):
        self._rank.save(path)

    def close(self):
        self._rank.close()


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Two steps from random weights; the accuracy is that of a measurement that is not made."""
    write_model(tmp_path / "model")
    monkeypatch.setattr(sft, "TrainerRanks", OneRank)
    monkeypatch.setattr(sft, "ray_cluster", lambda _: nullcontext())
    monkeypatch.setattr(sft, "measure", lambda config, path: {"eval/spell_backward/accuracy": 0.25})
    return config(
        tmp_path,
        sft={"init": "random", "steps": 2, "batch_size": 2},
        logging={"wandb": {"mode": "disabled"}},
    )


def model_files(tmp_path):
    return {p.name: p.read_bytes() for p in (tmp_path / "run" / "model").iterdir()}


def test_a_finished_warm_start_may_be_started_again_and_tells_its_accuracy_again(
    settings, tmp_path, capsys
):
    assert sft.sft(settings) == 0
    told, made = capsys.readouterr().out, model_files(tmp_path)
    assert f"held-out accuracy 25.0 %; model: {tmp_path}/run/model" in told
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= made.keys()
    assert sft.sft(settings) == 0
    assert capsys.readouterr().out == told
    assert model_files(tmp_path) == made


def test_a_warm_start_killed_before_its_model_was_whole_makes_it_from_the_checkpoint(
    settings, tmp_path, monkeypatch
):
    monkeypatch.setattr(OneRank, "dies", True)
    with pytest.raises(RuntimeError, match="killed"):
        sft.sft(settings)
    (tmp_path / "run" / "model").mkdir()
    (tmp_path / "run" / "model" / "shard-00000.safetensors").write_text("half")
    monkeypatch.setattr(OneRank, "dies", False)
    assert sft.sft(settings) == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000002" / "model.safetensors"
    assert model_files(tmp_path)["model.safetensors"] == checkpoint.read_bytes()
    assert "shard-00000.safetensors" not in model_files(tmp_path)


def test_an_output_directory_with_other_things_in_it_is_refused_before_the_first_step(
    settings, tmp_path
):
    output = tmp_path / "run" / "model"
    output.mkdir(parents=True)
    (output / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"sft\.output: .*holds notes\.txt"):
        sft.sft(settings)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_warm_start_stops_after_too_many_skipped_steps_and_stays_stopped(
    settings, tmp_path, monkeypatch
):
    step = TrainRank.sft_step
    monkeypatch.setattr(
        TrainRank, "sft_step", lambda *args: step(*args) | {"optim/update_skipped": 1.0}
    )
    limited = settings.model_copy(
        update={
            "train": settings.train.model_copy(update={"max_skipped_updates": 0}),
            "checkpoint": settings.checkpoint.model_copy(update={"every": 1}),
        }
    )
    for _ in range(2):  # started again it is as untrustworthy as before
        with pytest.raises(M3rlError, match=r"1 steps were skipped.*sft\.lr"):
            sft.sft(limited)
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.parametrize(("tokens", "positions"), [(42, 256), (1000, 42)])
def test_items_that_no_rank_can_compute_are_refused_before_the_ranks_start(
    settings, tmp_path, monkeypatch, tokens, positions
):
    write_model(tmp_path / "model", max_position_embeddings=positions)
    lines = [{"question": "a", "answer": "b"}] + [
        {"question": "a" * n, "answer": "b" * 30} for n in (20, 25, 22)
    ]
    file = tmp_path / "long.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(sft, "TrainerRanks", None)
    long = config(
        tmp_path,
        data={
            "train": {
                "kind": "file",
                "path": str(file),
                "prompt_key": "question",
                "answer_key": "answer",
            },
            "max_prompt_tokens": 40,
        },
        reward={"kind": "exact"},
        eval={"at_start": False, "at_end": False},
        rollout={"max_tokens": 2},
        policy={"dtype": "float32", "micro_batch_tokens": tokens},
        sft={"init": "random", "steps": 2, "batch_size": 2},
    )
    limits = rf"micro_batch_tokens={tokens}, max_position_embeddings={positions}"
    with pytest.raises(ConfigError, match=rf"3 of 4 items .*{limits}.*long\.jsonl:3, has"):
        sft.sft(long)


def test_another_architecture_is_trained_and_its_accuracy_is_the_trainers(
    settings, tmp_path, monkeypatch, capsys
):
    """The bundled runtime cannot generate with it."""
    monkeypatch.setattr(sft, "measure", None)
    monkeypatch.setattr(TrainRank, "greedy_accuracy", lambda *_: 0.75)
    path = Path("configs/models/tiny_qwen3")
    other = settings.model_copy(
        update={"model": settings.model.model_copy(update={"path": str(path)})}
    )
    assert sft.sft(other) == 0
    assert "held-out accuracy 75.0 %" in capsys.readouterr().out
    made, shipped = tmp_path / "run" / "model", whole_layout(path, "float32")
    assert whole_layout(made, "float32") == shipped
    assert (made / "tokenizer.json").read_bytes() == (path / "tokenizer.json").read_bytes()
