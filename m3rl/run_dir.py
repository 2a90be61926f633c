"""The run directory: whose it is, what it already holds, and whether this configuration may go on
with it.

runs/<name>/config.yaml  metrics.jsonl  evals.jsonl  run.log  rollouts/  checkpoints/  wandb/
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from m3rl.checkpoint import MODEL_FILES, newest_step
from m3rl.config import Config, ConfigError

logger = logging.getLogger(__name__)


class RunDirectory:
    """Open (and locked) for one process at a time; use as a context manager.

    What ends the run from inside, but for a ConfigError, leaves with a note on how to go on.
    """

    def __init__(self, config: Config, purpose: str) -> None:
        """
        Args:
            purpose: the command that owns the directory, 'train', 'rollout' or 'sft'.

        Raises:
            ConfigError: the directory belongs to another command or configuration (says what
                differs), or another process is running in it.
        """
        self.path = Path(config.run.dir)
        self._purpose = purpose
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("w")
        except OSError as error:
            raise ConfigError(
                f"run.dir={self.path} cannot be used: {error.strerror}; choose another run.dir"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise ConfigError(
                f"run.dir={self.path}: another m3rl process is running in this directory; "
                "wait for it, stop it, or choose another run.dir"
            ) from None
        self._log_handler = logging.FileHandler(self.path / "run.log")
        self._log_handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logging.getLogger("m3rl").addHandler(self._log_handler)
        try:
            self._claim(config, purpose)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and not isinstance(error, ConfigError | SystemExit):
            error.add_note(self._how_to_go_on())  # a ConfigError says what comes before that
        if error is not None and not isinstance(error, KeyboardInterrupt | SystemExit):
            logger.error("the run ended with an error", exc_info=(type(error), error, traceback))
        self.close()

    def close(self) -> None:
        logging.getLogger("m3rl").removeHandler(self._log_handler)
        self._log_handler.close()
        self._lock.close()

    def rollouts(self, step: int) -> Path:
        return self.path / "rollouts" / f"step_{step:06d}.parquet"

    def record_evaluation(self, record: dict[str, Any]) -> None:
        """Append one evaluation to evals.jsonl unless its (set, version) is there already."""
        if self.evaluation(record["set"], record["version"]) is None:
            self._write_evaluations([*self._evaluations(), record])

    def evaluation(self, name: str, version: int) -> dict[str, Any] | None:
        """The recorded evaluation of `name` at a policy version, if there is one."""
        for record in self._evaluations():
            if record["set"] == name and record["version"] == version:
                return record
        return None

    def cut_evaluations(self, step: int) -> None:
        """Forget evaluations after `step`, which the run makes again; all of them for step 0."""
        self._write_evaluations([r for r in self._evaluations() if step and r["step"] <= step])

    def _evaluations(self) -> list[dict[str, Any]]:
        path = self.path / "evals.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def _write_evaluations(self, records: list[dict[str, Any]]) -> None:
        """Replace the file whole: a kill leaves the old one or the new one."""
        path = self.path / "evals.jsonl"
        temporary = path.with_suffix(".jsonl.tmp")
        with temporary.open("w") as file:
            file.writelines(json.dumps(record, sort_keys=True) + "\n" for record in records)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)

    def _how_to_go_on(self) -> str:
        command = f"m3rl {self._purpose} {self.path / 'config.yaml'}"
        if self._purpose == "rollout":
            return f"`{command}` keeps the files that are there and collects the others"
        step = newest_step(self.path)
        if step is None:
            return f"there is no checkpoint yet: `{command}` begins again with the first step"
        return f"`{command}` resumes from step {step}"

    def _has_results(self) -> bool:
        metrics = self.path / "metrics.jsonl"
        has_lines = metrics.exists() and metrics.stat().st_size > 0
        folders = (self.path / "checkpoints", self.path / "rollouts")
        return has_lines or any(folder.is_dir() and any(folder.iterdir()) for folder in folders)

    def _claim(self, config: Config, purpose: str) -> None:
        if not self._has_results():  # begun and failed before its first result: free for all
            (self.path / "config.yaml").unlink(missing_ok=True)
            (self.path / "command").unlink(missing_ok=True)
        owner = self.path / "command"
        if owner.exists() and owner.read_text() != purpose:
            raise ConfigError(
                f"run.dir={self.path} belongs to `m3rl {owner.read_text()}`; "
                f"give `m3rl {purpose}` a directory of its own with run.dir=..."
            )
        stored = self.path / "config.yaml"
        if stored.exists():
            before = Config.load(stored, [])
            if differences := config.differences(before):
                listed = "\n  ".join(differences)
                raise ConfigError(
                    f"run.dir={self.path} was started with another configuration "
                    f"({stored}); these keys differ:\n  {listed}\n"
                    "Use the same values to go on with it, or another run.dir to start anew."
                )
            for change in config.free_differences(before):
                logger.info("changed for the rest of the run: %s", change)
        temporary = stored.with_suffix(".yaml.tmp")
        temporary.write_text(config.resolved_yaml())
        temporary.replace(stored)
        owner.write_text(purpose)


def model_files(path: str | Path) -> dict[str, bytes]:
    """Contents of the files that describe a model and its tokenizer, by name."""
    found = {name: Path(path) / name for name in MODEL_FILES}
    return {name: file.read_bytes() for name, file in found.items() if file.exists()}


def check_same_model(checkpoint: Path, model_path: str) -> None:
    """Refuse to resume a checkpoint on a model or tokenizer that changed since.

    Raises:
        ConfigError: names the file and, for config.json, the keys that differ.
    """
    was, now = model_files(checkpoint), model_files(model_path)
    for name in sorted(was.keys() | now.keys()):
        if was.get(name) == now.get(name):
            continue
        detail = ""
        if name == "config.json" and name in was and name in now:
            old, new = json.loads(was[name]), json.loads(now[name])
            keys = [k for k in sorted(old.keys() | new.keys()) if old.get(k) != new.get(k)]
            detail = "; ".join(f"{k}: was {old.get(k)!r}, is {new.get(k)!r}" for k in keys)
            detail = f" ({detail})"
        raise ConfigError(
            f"{Path(model_path) / name} changed since {checkpoint} was written{detail}; "
            "restore the file to resume, or start a new run.dir"
        )
