"""Prompts: from a generator or a file to a numbered, endless, resumable stream.

    dataset items ─▶ checked, encoded once ─▶ PromptSet ─▶ PromptStream: ordinal 0, 1, 2, …
                          │ dropped and counted: also held out · too long

The ordinal of a prompt is its place in the run's stream, never reused; epoch and place in the
epoch's order follow from it, so the next ordinal is all there is to save.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from m3rl.config import Config, ConfigError, DatasetConfig, FileDatasetConfig, ReasoningGymConfig
from m3rl.rollout.chat import ChatFormat
from m3rl.rollout.reward_worker import dataset_key
from m3rl.types import Prompt

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Item:
    """One entry of a dataset."""

    question: str
    payload: dict[str, Any]
    """What a scorer gets; 'answer' is there when the dataset has answers."""
    source: str
    """Where it is written, for error messages: 'file.jsonl:3', 'spell_backward[3]'."""


@dataclass(slots=True)
class Data:
    """The prompts of a run."""

    train: PromptSet
    eval: PromptSet | None
    counts: dict[str, int]
    """Prompts left out at loading: `data/removed_held_out`, `data/dropped_overlong`."""


class PromptSet:
    """Items of one dataset with their token ids."""

    def __init__(self, environment: str, items: Sequence[Item], ids: Sequence[np.ndarray]) -> None:
        self.environment = environment
        self._items = list(items)
        self._ids = list(ids)

    def __len__(self) -> int:
        return len(self._items)

    def prompt(self, index: int, ordinal: int) -> Prompt:
        """The item at `index` as the prompt numbered `ordinal`."""
        item = self._items[index]
        return Prompt(ordinal, self._ids[index], item.question, self.environment, item.payload)

    def source(self, index: int) -> str:
        """Where the item at `index` is written, for error messages."""
        return self._items[index].source

    def first(self, num_prompts: int) -> list[Prompt]:
        """The first items in the dataset's own order, numbered from 0 (for evaluations)."""
        return [self.prompt(i, i) for i in range(min(num_prompts, len(self)))]

    @cached_property
    def fingerprint(self) -> str:
        """Changes when any prompt, answer or their order does."""
        digest = hashlib.blake2b(digest_size=16)
        for item, ids in zip(self._items, self._ids, strict=True):
            answer = str(item.payload.get("answer")).encode()
            digest.update(f"{len(ids)} {len(answer)} ".encode() + ids.tobytes() + answer)
        return digest.hexdigest()


class PromptStream:
    """Endless prompts: a fresh seeded permutation each epoch (or the dataset's own order)."""

    def __init__(self, prompts: PromptSet, *, seed: int, shuffle: bool) -> None:
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._next = 0
        self._order: tuple[int, np.ndarray] | None = None

    def take(self, n: int) -> list[Prompt]:
        """The next `n` prompts; an epoch border may lie among them."""
        ordinals = range(self._next, self._next + n)
        self._next += n
        return [self._prompts.prompt(self._index(ordinal), ordinal) for ordinal in ordinals]

    @property
    def num_taken(self) -> int:
        """Prompts taken so far."""
        return self._next

    @property
    def epoch(self) -> float:
        """Epochs taken so far."""
        return self._next / len(self._prompts)

    def state(self) -> dict[str, Any]:
        """All that a resumed stream needs (JSON values)."""
        return {"next_ordinal": self._next, "fingerprint": self._prompts.fingerprint}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where the stream of `state` was.

        Raises:
            ConfigError: the dataset is no longer the one that `state` counts in.
        """
        if state["fingerprint"] != self._prompts.fingerprint:
            raise ConfigError(
                f"the training prompts changed since the checkpoint (they are {len(self._prompts)} "
                "now); restore the dataset and the tokenizer to resume, or start a new run.dir"
            )
        self._next = state["next_ordinal"]

    def _index(self, ordinal: int) -> int:
        epoch, place = divmod(ordinal, len(self._prompts))
        if not self._shuffle:
            return place
        if self._order is None or self._order[0] != epoch:
            generator = np.random.Generator(np.random.PCG64([self._seed, epoch]))
            self._order = epoch, generator.permutation(len(self._prompts))
        return int(self._order[1][place])


def load_data(config: Config, chat: ChatFormat) -> Data:
    """Read, check and encode the datasets of `config`.

    Held-out prompts are removed from train; prompts above data.max_prompt_tokens are dropped or
    refused (data.overlong); both are counted.

    Raises:
        ConfigError: a dataset is missing, empty, malformed, or nothing of it is left.
    """
    counts = {"data/removed_held_out": 0, "data/dropped_overlong": 0}
    eval_items: list[Item] = []
    eval_set: PromptSet | None = None
    if config.data.eval is not None:
        eval_items = read_items(config, config.data.eval, "data.eval")
        eval_set = _encode(config, config.data.eval, "data.eval", eval_items, chat, counts)
    train_items = read_items(config, config.data.train, "data.train")
    held_out = {item.question for item in eval_items}
    kept = [item for item in train_items if item.question not in held_out]
    counts["data/removed_held_out"] = len(train_items) - len(kept)
    if not kept:
        raise ConfigError(
            f"data.train: all {len(train_items)} prompts also occur in data.eval; "
            "give the two different seeds or files"
        )
    train_set = _encode(config, config.data.train, "data.train", kept, chat, counts)
    for name, count in counts.items():
        if count:
            logger.info("%s: %d prompts", name, count)
    return Data(train_set, eval_set, counts)


def read_items(config: Config, dataset: DatasetConfig, key: str) -> list[Item]:
    """All items of one dataset; `key` is its place in the configuration, for error messages."""
    items = list(iterate_items(config, dataset, key))
    if not items:
        raise ConfigError(f"{key}: the dataset is empty ({_name(config, dataset)})")
    return items


def iterate_items(config: Config, dataset: DatasetConfig, key: str) -> Iterator[Item]:
    """Items one by one, each checked: a prompt that is missing, no text or blank is an error."""
    reader = _read_generator if isinstance(dataset, ReasoningGymConfig) else _read_file
    for item in reader(config, dataset, key):  # type: ignore[arg-type]
        if not isinstance(item.question, str) or not item.question.strip():
            raise ConfigError(f"{key}: {item.source} has an empty prompt ({item.question!r})")
        yield item


def _encode(
    config: Config,
    dataset: DatasetConfig,
    key: str,
    items: list[Item],
    chat: ChatFormat,
    counts: dict[str, int],
) -> PromptSet:
    limit = config.data.max_prompt_tokens
    try:
        encoded = chat.encode_prompts([item.question for item in items])
    except ValueError as error:
        raise ConfigError(f"{key}: {error} ({_name(config, dataset)})") from error
    long = [i for i, ids in enumerate(encoded) if len(ids) > limit]
    if long and config.data.overlong == "error":
        longest = max(long, key=lambda i: len(encoded[i]))
        raise ConfigError(
            f"{key}: {len(long)} of {len(items)} prompts are longer than data.max_prompt_tokens="
            f"{limit}; the longest, {items[longest].source}, has {len(encoded[longest])} tokens "
            "with the chat template; raise the limit or set data.overlong: drop"
        )
    if len(long) == len(items):
        shortest = min(len(ids) for ids in encoded)
        raise ConfigError(
            f"{key}: all {len(items)} prompts are longer than data.max_prompt_tokens={limit} "
            f"(the shortest has {shortest} tokens); raise it"
        )
    counts["data/dropped_overlong"] += len(long)
    dropped = set(long)
    keep = [i for i in range(len(items)) if i not in dropped]
    environment = (
        dataset.name if isinstance(dataset, ReasoningGymConfig) else Path(dataset.path).stem
    )
    return PromptSet(environment, [items[i] for i in keep], [encoded[i] for i in keep])


def _read_generator(config: Config, dataset: ReasoningGymConfig, key: str) -> Iterator[Item]:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if dataset.name not in DATASETS:
        near = difflib.get_close_matches(dataset.name, DATASETS)
        hint = f"did you mean {near}?" if near else "see reasoning_gym.factory.DATASETS"
        raise ConfigError(f"{key}.name: reasoning_gym has no generator {dataset.name!r}; {hint}")
    try:
        made = reasoning_gym.create_dataset(
            dataset.name, size=dataset.size, seed=dataset.seed, **dataset.params
        )
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"{key}.params: {dataset.params} is refused by the generator {dataset.name}: {error} "
            f"({config.origin(f'{key}.params')})"
        ) from error
    scorer = dataset_key(dataset.name, dataset.params)
    for index in range(dataset.size):
        entry = made[index]
        payload = {**entry, "dataset": scorer}
        yield Item(entry["question"], payload, f"{dataset.name}[{index}]")


def _read_file(config: Config, dataset: FileDatasetConfig, key: str) -> Iterator[Item]:
    path = config.find(dataset.path)
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise ConfigError(f"{key}.path: {dataset.path} is neither .jsonl nor .parquet")
    if not path.is_file():
        raise ConfigError(
            f"{key}.path: no file {dataset.path} ({config.origin(f'{key}.path')}); relative paths "
            "start at the current directory or at the repository of the configuration"
        )
    for source, row in readers[path.suffix](path, key):
        for setting in ("prompt_key", "answer_key"):
            column = getattr(dataset, setting)
            if column is not None and column not in row:
                raise ConfigError(
                    f"{key}.{setting}: {source} has no {column!r}; it has {', '.join(row)}"
                )
        answer = {} if dataset.answer_key is None else {"answer": row[dataset.answer_key]}
        yield Item(row[dataset.prompt_key], {**row, **answer}, source)


def _read_jsonl(path: Path, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{key}.path: {path}:{number} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{key}.path: {path}:{number} is no JSON object: {line:.100}")
            yield f"{path}:{number}", row


def _read_parquet(path: Path, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{key}.path: {path} is not a readable Parquet file: {error}") from error
    for number, row in enumerate(table.to_pylist()):
        yield f"{path} row {number}", row


def _name(config: Config, dataset: DatasetConfig) -> str:
    if isinstance(dataset, ReasoningGymConfig):
        return f"reasoning_gym {dataset.name}, size {dataset.size}"
    return str(config.find(dataset.path))
