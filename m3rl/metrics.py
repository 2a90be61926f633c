"""One record a step: a line in metrics.jsonl, the same numbers in wandb, a line of progress.

`metrics.jsonl` is the truth: appended in one write, synced to disk, cut back to the checkpoint on
resume. wandb gets every number on its own x axis `train/global_step`; its internal step only ever
rises, also over resumptions, because a server drops what comes with a step it has seen.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import netrc
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tqdm import tqdm

from m3rl.config import ConfigError, WandbConfig
from m3rl.report import SAMPLE_COLUMNS, Sample

logger = logging.getLogger(__name__)

STEP_AXIS = "train/global_step"


class MetricsWriter:
    """Writes the metrics of one run, one call a step."""

    def __init__(
        self,
        run_dir: Path,
        config: Mapping[str, Any],
        settings: WandbConfig,
        *,
        resume_step: int = 0,
        resume_line: Mapping[str, float] | None = None,
    ) -> None:
        """
        Args:
            config: the resolved configuration as plain values, with `run.name`.
            resume_step: last step of the checkpoint that the run goes on from; later lines, which
                the run will write again, are cut. 0 begins anew.
            resume_line: metrics of `resume_step`, written again if a kill lost that line.

        Raises:
            ConfigError: wandb should be online and no key is set.
        """
        self.path = Path(run_dir) / "metrics.jsonl"
        self._step = resume_step
        cut_metrics(self.path, resume_step)
        self._wandb = WandbRun.start(Path(run_dir), config, settings)
        if resume_line is not None and last_step(self.path) != resume_step:
            self._write(resume_step, resume_line)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of `step`, which follows the last one.

        A number that is not finite is null in the file (JSON has no NaN) and itself in wandb.
        """
        assert step == self._step + 1, f"step {step} was logged after step {self._step}"
        self._step = step
        self._write(step, metrics)

    def log_apart(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send numbers to wandb alone, such as an evaluation that is no part of a step's line."""
        if self._wandb is not None:
            self._wandb.log(step, metrics)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Show sample completions as a wandb table."""
        if self._wandb is not None:
            self._wandb.log_samples(step, samples)

    def finish(self, exit_code: int = 0) -> None:
        """Flush and end the wandb run; safe to call twice."""
        if self._wandb is not None:
            self._wandb.finish(exit_code)
            self._wandb = None

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        record = {"step": step, **{key: _json_number(value) for key, value in metrics.items()}}
        line = json.dumps(record, allow_nan=False) + "\n"
        with self.path.open("ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        self.log_apart(step, metrics)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics.jsonl; one cut by a kill in its middle is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def last_step(path: Path) -> int:
    """Step of the last whole line, 0 when there is none."""
    records = read_metrics(path)
    return records[-1]["step"] if records else 0


def cut_metrics(path: Path, step: int) -> None:
    """Keep the lines up to `step`; the file is replaced whole, or not at all."""
    if not path.exists():
        return
    kept = [record for record in read_metrics(path) if record["step"] <= step]
    temporary = path.with_suffix(".jsonl.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class WandbRun:
    """The wandb run of a run directory: one id for life, an internal step that only rises."""

    def __init__(self, run: Any, wandb: Any, state_path: Path, state: dict[str, Any]) -> None:
        self._run = run
        self._wandb = wandb
        self._state_path = state_path
        self._state = state
        run.define_metric(STEP_AXIS)
        run.define_metric("*", step_metric=STEP_AXIS)

    @classmethod
    def start(
        cls, run_dir: Path, config: Mapping[str, Any], settings: WandbConfig
    ) -> WandbRun | None:
        """Begin or continue the run; None when wandb is disabled. Never asks for a key."""
        mode = wandb_mode(settings.mode)
        if mode == "disabled":
            return None
        wandb: Any = importlib.import_module("wandb")  # half a second that a disabled one saves
        state_path = run_dir / "wandb" / "run.json"
        state_path.parent.mkdir(parents=True, exist_ok=True)
        state: dict[str, Any] = {"id": secrets.token_hex(4), "step": 0}
        if state_path.exists():
            state = json.loads(state_path.read_text())
        arguments = {
            "dir": str(run_dir),
            "id": state["id"],
            "resume": "allow",
            "project": settings.project,
            "entity": settings.entity,
            "name": config["run"]["name"],
            "config": dict(config),
            "allow_val_change": True,
            "settings": wandb.Settings(console="off", silent=True),
        }
        try:
            run = wandb.init(mode=mode, **arguments)
        except wandb.errors.CommError as error:
            if settings.mode != "auto":
                raise
            mode = "offline"
            logger.warning("wandb cannot be reached (%s); this run is kept offline", error)
            run = wandb.init(mode=mode, **arguments)
        logger.info("wandb: %s run %s", mode, state["id"])
        return cls(run, wandb, state_path, state)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._state["step"] += 1  # written before use: a step is skipped rather than used twice
        temporary = self._state_path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self._state))
        temporary.replace(self._state_path)
        self._run.log({STEP_AXIS: step, **metrics}, step=self._state["step"])

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        rows = [[step, *sample] for sample in samples]
        table = self._wandb.Table(columns=["step", *SAMPLE_COLUMNS], data=rows)
        self.log(step, {"samples": table})

    def finish(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


def wandb_mode(mode: str) -> str:
    """'online', 'offline' or 'disabled' for a configured mode; 'auto' is online where a key is set.

    Raises:
        ConfigError: 'online' without a key.
    """
    if mode == "auto":
        if os.environ.get("WANDB_MODE") in ("online", "offline", "disabled"):
            return os.environ["WANDB_MODE"]
        return "online" if wandb_key_source() else "offline"
    if mode == "online" and not wandb_key_source():
        raise ConfigError(
            "logging.wandb.mode: 'online' needs a key, and neither WANDB_API_KEY nor ~/.netrc has "
            "one; run `wandb login`, or use mode auto or offline"
        )
    return mode


def wandb_key_source() -> str | None:
    """Where wandb would find credentials, without reading them out: a variable, a file, or None."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        if os.environ.get(name):
            return name
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    try:
        machines = netrc.netrc(path).hosts
    except (OSError, netrc.NetrcParseError):
        return None
    return str(path) if host in machines else None


class Progress:
    """A line a step with the time left: a bar on a terminal, else through logging."""

    def __init__(self, total: int, done: int, unit: str = "step") -> None:
        self._total = total
        self._done = self._first = done
        self._start = time.monotonic()
        self._unit = unit
        self._bar = (
            tqdm(total=total, initial=done, unit=unit, dynamic_ncols=True)
            if sys.stderr.isatty()
            else None
        )

    def update(self, shown: Mapping[str, float]) -> None:
        """One more is done; `shown` are the few numbers worth watching."""
        self._done += 1
        numbers = " ".join(f"{name} {value:.4g}" for name, value in shown.items())
        if self._bar is not None:
            self._bar.set_postfix_str(numbers, refresh=False)
            self._bar.update()
            return
        per_item = (time.monotonic() - self._start) / (self._done - self._first)
        left = duration(per_item * (self._total - self._done))
        logger.info("%s %d/%d  %s  %s left", self._unit, self._done, self._total, numbers, left)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def duration(seconds: float) -> str:
    """`75` -> '1:15', `3700` -> '1:01:40'."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _json_number(value: float) -> Any:
    """Plain Python numbers (numpy scalars are not JSON); None for what is not finite."""
    if isinstance(value, str | bool | int) or value is None:
        return value
    number = float(value)
    return number if math.isfinite(number) else None
