"""Parquet files of completions."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from m3rl.rollout.records import read_completions, write_completions
from m3rl.types import Completion


def completion(**changes) -> Completion:
    fields = {
        "prompt_ordinal": 5,
        "sample_index": 2,
        "group_id": "5",
        "prompt_ids": np.array([3, 1, 4], np.int32),
        "completion_ids": np.array([1, 5, 9, 2], np.int32),
        "text": "née ✓\n",
        "logprobs": np.array([-0.1, -1e-30, -2.5, -7.0], np.float32),
        "loss_mask": np.array([True, False, True, True]),
        "finish_reason": "length",
        "version_spans": np.array([[0, 3], [2, 4]], np.int64),
        "seed": 2**62 + 1,
        "turn_starts": np.array([0, 2], np.int32),
        "reward": 0.1,
        "reward_parts": {"exact": 0.0, "format": 0.1},
        "reward_status": "ok",
        "routing": np.arange(36, dtype=np.uint8).reshape(6, 3, 2),
        "blocks": np.arange(48, dtype=np.int32).reshape(6, 2, 2, 2) - 1,
    }
    return Completion(**{**fields, **changes})


def assert_equal(a: Completion, b: Completion) -> None:
    for name in Completion.__dataclass_fields__:
        left, right = getattr(a, name), getattr(b, name)
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype, name
            assert np.array_equal(left, right), name
        elif isinstance(left, float) and np.isnan(left):
            assert np.isnan(right), name
        else:
            assert left == right, name


def test_what_is_read_equals_what_was_written(tmp_path: Path) -> None:
    written = [
        completion(),
        completion(sample_index=3, routing=None, blocks=None, reward=float("nan")),
        completion(sample_index=4, reward_status="timeout", reward_parts={}),
    ]
    write_completions(tmp_path / "a" / "step_000001.parquet", written)
    read = read_completions(tmp_path / "a" / "step_000001.parquet")
    assert len(read) == 3
    for a, b in zip(written, read, strict=True):
        assert_equal(a, b)


def test_a_missing_reward_stays_nan_and_is_not_zero(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write_completions(path, [completion(reward=float("nan"), reward_status="error")])
    column = pq.read_table(path).column("reward").to_pylist()
    assert np.isnan(column[0])


def test_the_file_appears_whole_and_leaves_no_temporary(tmp_path: Path) -> None:
    write_completions(tmp_path / "x.parquet", [])
    assert [p.name for p in tmp_path.iterdir()] == ["x.parquet"]
    assert read_completions(tmp_path / "x.parquet") == []
