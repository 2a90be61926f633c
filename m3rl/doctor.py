"""Looks for what a run would miss on this machine: packages, cores, disk, GPUs, a key, a model."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

from m3rl.config import Config, ConfigError
from m3rl.metrics import wandb_key_source
from m3rl.plan import make_plan
from m3rl.report import table
from m3rl.rollout.backend import BackendError
from m3rl.rollout.vllm_version import installed_version

MIN_DISK_BYTES = 2 << 30
MIN_SHM_BYTES = 512 << 20
"""Ray keeps its objects in shared memory; with less it falls back to slow files in /tmp."""


class Finding(NamedTuple):
    """One thing looked at; `state` is 'ok', 'note' (works, but know it) or 'missing'."""

    state: str
    what: str
    detail: str


def examine(config: Config | None = None) -> tuple[str, bool]:
    """The findings as a table, and whether nothing required is missing."""
    findings = [
        _python(),
        *_packages(),
        _cores(),
        _space("disk", Path.cwd() if config is None else _existing(config.run.dir), MIN_DISK_BYTES),
        _space("shared memory", Path("/dev/shm"), MIN_SHM_BYTES),
        _gpus(),
        _vllm(),
        _wandb(),
    ]
    if config is not None:
        findings += _model(config)
    is_healthy = all(finding.state != "missing" for finding in findings)
    text = table(["state", "what", "detail"], findings)
    return f"{text}\n\n{'nothing is missing' if is_healthy else 'something is missing'}", is_healthy


def _python() -> Finding:
    return Finding("ok", "python", f"{platform.python_version()} at {sys.executable}")


def _packages() -> Iterator[Finding]:
    """Installed versions against the ranges that m3rl's own metadata asks for."""
    try:
        requirements = importlib.metadata.requires("m3rl") or []
    except importlib.metadata.PackageNotFoundError:
        requirements = _source_requirements()
        if not requirements:
            yield Finding("missing", "m3rl", "not installed; run `make setup`")
    for requirement in requirements:
        wanted = Requirement(requirement)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        name = wanted.name
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding("missing", name, f"not installed; {requirement}: `make setup`")
            continue
        is_right = wanted.specifier.contains(version, prereleases=True)
        detail = version if is_right else f"{version}, but {requirement}: `make setup`"
        yield Finding("ok" if is_right else "missing", name, detail)


def _source_requirements() -> list[str]:
    """Dependencies of the source tree, where m3rl runs from one without being installed."""
    import tomllib

    project = Path(__file__).parent.parent / "pyproject.toml"
    if not project.is_file():
        return []
    dependencies: list[str] = tomllib.loads(project.read_text())["project"]["dependencies"]
    return dependencies


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0))
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    detail = f"{cores} for this process, OMP_NUM_THREADS {threads}"
    return Finding("ok" if cores >= 2 else "note", "cores", detail)


def _space(what: str, path: Path, needed: int) -> Finding:
    if not path.exists():
        return Finding("note", what, f"{path} is not there")
    free = shutil.disk_usage(path).free
    detail = f"{free / (1 << 30):.1f} GiB free at {path}"
    if free >= needed:
        return Finding("ok", what, detail)
    return Finding("note", what, f"{detail}; {needed / (1 << 30):.1f} GiB are advisable")


def _existing(path: str) -> Path:
    """The path itself or the nearest folder above it that exists."""
    place = Path(path).absolute()
    while not place.exists():
        place = place.parent
    return place


def _gpus() -> Finding:
    try:
        import torch
    except ImportError as error:
        return Finding("missing", "gpu", f"torch cannot be imported: {error}")
    if not torch.cuda.is_available():
        return Finding("note", "gpu", "none that torch sees; the tiny models run on the CPU")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Finding("ok", "gpu", f"{len(names)}: {', '.join(sorted(set(names)))}")


def _vllm() -> Finding:
    """Only a note where it is not there: a configuration that wants it is refused by its plan."""
    try:
        return Finding("ok", "vllm", installed_version())
    except BackendError:
        return Finding(
            "note", "vllm", "none that rollout.backend.kind: vllm can use; others do without"
        )


def _wandb() -> Finding:
    source = wandb_key_source()
    if source is None:
        return Finding("note", "wandb", "no key; runs are kept offline (`wandb sync` sends them)")
    return Finding("ok", "wandb", f"key from {source}")


def _model(config: Config) -> Iterator[Finding]:
    path = config.find(config.model.path)
    try:
        make_plan(config)
    except ConfigError as error:
        problems = [line for line in str(error).splitlines() if not line.startswith(" ")]
        yield from (Finding("missing", "configuration", problem) for problem in problems)
        return
    yield Finding("ok", "model", f"config, tokenizer and weights at {path}")
