"""What a plan finds wrong outside of the model: datasets, the run directory, a reward's module."""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from m3rl.config import Config, ConfigError, DatasetConfig
from m3rl.data import iterate_items

CHECKED_ITEMS = 100
"""Items of each dataset that are looked at; the whole of it is checked when a run starts."""


def is_here(path: Path, part: str) -> bool:
    files = {
        "tokenizer": ("tokenizer.json",),
        "weights": ("model.safetensors", "model.safetensors.index.json"),
    }
    return any((path / name).is_file() for name in files[part])


def missing_reward(config: Config) -> list[str]:
    """A module of the user's that cannot be imported here; it is looked for, not imported."""
    target = config.reward.target
    package = "" if target is None else target.partition(":")[0].partition(".")[0]
    if not package or importlib.util.find_spec(package) is not None:
        return []
    return [f"reward.target: no module {package!r} here; put it on the path of Python (PYTHONPATH)"]


def run_dir_problems(config: Config) -> list[str]:
    """The nearest folder that is there already must be one that can be written to."""
    path = Path(config.run.dir).absolute()
    nearest = next(folder for folder in (path, *path.parents) if folder.exists())
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return []
    fault = "cannot be written to" if nearest.is_dir() else "is not a directory"
    return [f"run.dir: {nearest} {fault} ({config.origin('run.dir')}); choose another run.dir"]


def dataset_problems(config: Config) -> Iterator[tuple[str, bool]]:
    """What is wrong with each dataset, and whether it is a file that is missing."""
    datasets: tuple[tuple[str, DatasetConfig | None], ...]
    datasets = ("data.train", config.data.train), ("data.eval", config.data.eval)
    for key, dataset in datasets:
        if dataset is None:
            continue
        try:
            if not list(itertools.islice(iterate_items(config, dataset, key), CHECKED_ITEMS)):
                yield f"{key}: the dataset is empty", False
        except ConfigError as error:
            file = dataset.path if dataset.kind == "file" else None
            yield str(error), file is not None and not config.find(file).exists()
