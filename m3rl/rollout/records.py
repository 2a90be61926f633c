"""Completions in Parquet: one row a completion, the names of `Completion`, arrays as Arrow
lists."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from m3rl.types import Completion

SCHEMA = pa.schema(
    [
        ("prompt_ordinal", pa.int64()),
        ("sample_index", pa.int32()),
        ("group_id", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("completion_ids", pa.list_(pa.int32())),
        ("text", pa.string()),
        ("logprobs", pa.list_(pa.float32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("reward", pa.float64()),
        ("reward_parts", pa.string()),
        ("reward_status", pa.string()),
        ("finish_reason", pa.string()),
        ("version_spans", pa.list_(pa.int64())),
        ("seed", pa.int64()),
        ("turn_starts", pa.list_(pa.int32())),
        ("routing", pa.binary()),
        ("routing_shape", pa.list_(pa.int32())),
        ("blocks", pa.binary()),
        ("blocks_shape", pa.list_(pa.int32())),
    ]
)
"""`reward_parts` is a JSON object of its few numbers by name; `version_spans` is flattened pairs;
`routing` (uint8) and `blocks` (little-endian int32) are bytes in C order, their shapes beside."""


def write_completions(path: Path, completions: Sequence[Completion]) -> None:
    """Write one file under a temporary name and rename it: it is whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
    for completion in completions:
        for name, value in _row(completion).items():
            columns[name].append(value)
    table = pa.table({name: pa.array(columns[name], SCHEMA.field(name).type) for name in columns})
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        pq.write_table(table.cast(SCHEMA), temporary, compression="zstd")
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_completions(path: Path) -> list[Completion]:
    """The completions of one file, equal to what was written."""
    return [_completion(row) for row in pq.read_table(path).to_pylist()]


def _row(completion: Completion) -> dict[str, Any]:
    routing, blocks = completion.routing, completion.blocks
    return {
        "prompt_ordinal": completion.prompt_ordinal,
        "sample_index": completion.sample_index,
        "group_id": completion.group_id,
        "prompt_ids": completion.prompt_ids,
        "completion_ids": completion.completion_ids,
        "text": completion.text,
        "logprobs": completion.logprobs,
        "loss_mask": completion.loss_mask,
        "reward": completion.reward,
        "reward_parts": json.dumps(completion.reward_parts, sort_keys=True),
        "reward_status": completion.reward_status,
        "finish_reason": completion.finish_reason,
        "version_spans": completion.version_spans.reshape(-1),
        "seed": completion.seed,
        "turn_starts": completion.turn_starts,
        "routing": None if routing is None else np.ascontiguousarray(routing, np.uint8).tobytes(),
        "routing_shape": None if routing is None else list(routing.shape),
        "blocks": None if blocks is None else np.ascontiguousarray(blocks, "<i4").tobytes(),
        "blocks_shape": None if blocks is None else list(blocks.shape),
    }


def _completion(row: dict[str, Any]) -> Completion:
    return Completion(
        prompt_ordinal=row["prompt_ordinal"],
        sample_index=row["sample_index"],
        group_id=row["group_id"],
        prompt_ids=np.asarray(row["prompt_ids"], np.int32),
        completion_ids=np.asarray(row["completion_ids"], np.int32),
        text=row["text"],
        logprobs=np.asarray(row["logprobs"], np.float32),
        loss_mask=np.asarray(row["loss_mask"], np.bool_),
        finish_reason=row["finish_reason"],
        version_spans=np.asarray(row["version_spans"], np.int64).reshape(-1, 2),
        seed=row["seed"],
        turn_starts=np.asarray(row["turn_starts"], np.int32),
        reward=row["reward"],
        reward_parts=json.loads(row["reward_parts"]),
        reward_status=row["reward_status"],
        routing=_array(row["routing"], row["routing_shape"], "u1"),
        blocks=_array(row["blocks"], row["blocks_shape"], "<i4"),
    )


def _array(raw: bytes | None, shape: list[int] | None, dtype: str) -> np.ndarray | None:
    return None if raw is None else np.frombuffer(raw, dtype).reshape(shape)
