"""Adapters as files that peft reads and writes: `adapter_config.json`, `adapter_model.safetensors`.

peft's names are those of its model on top of transformers' one: for each adapted module
`base_model.model.<module>.lora_A.weight` [r, in] and `.lora_B.weight` [out, r]. Stacked experts are
parameters of one module; it wraps the module once for each, the last one outermost, and lays
A [E, r, in] out as [E · r, in] and B [E, out, r] as [out, r · E].
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from m3rl.checkpoint import CheckpointError
from m3rl.lora.adapters import Adapter, Adapters
from m3rl.lora.settings import LoraSettings

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
BASE_HASH = "base_hash"
DTYPE = "dtype"
FROZEN_EXPERTS = "frozen_experts"
"""Keys of the weights file's metadata."""


def write_adapters(
    path: Path, adapters: Adapters, *, base_hash: str, model_path: str, dtype: str
) -> None:
    """Write both files into directory `path`.

    Args:
        base_hash: of the weights that the adapters belong to.
        model_path: of the base, for peft.
        dtype: in which the base is held, and merged weights are.
    """
    tensors = {
        key: _as_stored(tensor, kind, stacks).detach().cpu().contiguous()
        for key, tensor, kind, stacks in _entries(adapters)
    }
    metadata = {"format": "pt", BASE_HASH: base_hash, DTYPE: dtype}
    metadata[FROZEN_EXPERTS] = "mxfp8" if adapters.settings.mxfp8_experts else "auto"
    save_file(tensors, path / WEIGHTS_FILE, metadata=metadata)
    config = peft_config(adapters.settings, model_path)
    (path / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True))


def peft_config(settings: LoraSettings, model_path: str) -> dict[str, object]:
    """What peft's `LoraConfig` needs to know."""
    modules = "|".join(re.escape(name) for name in settings.modules)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model_path,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
        # A pattern: by their last names the index branch's projections would be adapted, too.
        "target_modules": rf".*\.(?:{modules})" if modules else [],
        "target_parameters": list(settings.parameters) or None,
    }


@torch.no_grad()
def read_adapters(path: Path, adapters: Adapters, *, base_hash: str) -> None:
    """Fill `adapters` from files that `write_adapters` wrote.

    Raises:
        CheckpointError: they are not there, of other shapes or targets, or belong to another base.
    """
    file = path / WEIGHTS_FILE
    try:
        with safe_open(file, framework="pt") as stored:
            found = (stored.metadata() or {}).get(BASE_HASH)
            if found != base_hash:
                raise CheckpointError(
                    f"{file} belongs to a base of hash {found}, and the base here has {base_hash}; "
                    "resume with the model, policy.dtype and policy.lora.frozen_experts that the "
                    "run began with"
                )
            entries = list(_entries(adapters))
            if set(stored.keys()) != {key for key, *_ in entries}:
                raise CheckpointError(
                    f"{file} holds adapters of other modules than policy.lora.targets="
                    f"{list(adapters.settings.targets)}"
                )
            for key, tensor, kind, stacks in entries:
                _fill(file, key, tensor, stored.get_tensor(key), kind, stacks)
    except (FileNotFoundError, SafetensorError) as error:
        raise CheckpointError(f"{file}: {error}") from error


@dataclass(frozen=True, slots=True)
class StoredAdapters:
    """Adapters in a folder that `write_adapters` wrote, read one at a time."""

    path: Path
    rank: int
    scale: float
    model_path: str
    """Of the base, as it was when they were written."""
    base_hash: str
    dtype: str
    mxfp8_experts: bool
    keys: frozenset[str]

    @classmethod
    def open(cls, path: Path) -> StoredAdapters:
        """
        Raises:
            CheckpointError: `path` holds none, or none that this project wrote.
        """
        try:
            config = json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))
            with safe_open(path / WEIGHTS_FILE, framework="pt") as stored:
                metadata, keys = stored.metadata() or {}, frozenset(stored.keys())
            return cls(
                path=path,
                rank=int(config["r"]),
                scale=config["lora_alpha"] / config["r"],
                model_path=str(config["base_model_name_or_path"]),
                base_hash=metadata[BASE_HASH],
                dtype=metadata[DTYPE],
                mxfp8_experts=metadata[FROZEN_EXPERTS] == "mxfp8",
                keys=keys,
            )
        except KeyError as error:
            raise CheckpointError(
                f"{path}: the adapters do not say their {error}; only those of a checkpoint of "
                "`m3rl train` are read, others merge with peft"
            ) from None
        except (OSError, ValueError, TypeError, SafetensorError) as error:
            raise CheckpointError(f"{path}: no adapters can be read: {error}") from error

    def pair(self, param: str) -> tuple[Tensor, Tensor] | None:
        """A and B of a parameter, transformers' name, laid out as `Adapter` has them; None: it is
        not adapted."""
        is_stack = not param.endswith(".weight")
        letters = {letter: _key(param, letter, is_stack) for letter in "AB"}
        if not self.keys.issuperset(letters.values()):
            return None
        with safe_open(self.path / WEIGHTS_FILE, framework="pt") as stored:
            a, b = (stored.get_tensor(key) for key in letters.values())
        if is_stack:
            a = a.unflatten(0, (-1, self.rank))
            b = b.reshape(len(b), self.rank, -1).permute(2, 0, 1)
        return a, b


def _fill(
    file: Path, key: str, tensor: Tensor, source: Tensor, kind: str, num_experts: int
) -> None:
    expected = _as_stored(tensor, kind, num_experts).shape
    if source.shape != expected:
        raise CheckpointError(
            f"{file}: {key} has shape {list(source.shape)}, policy.lora.rank asks for "
            f"{list(expected)}"
        )
    if num_experts and kind == "A":
        source = source.reshape(tensor.shape)
    elif num_experts:
        source = source.reshape(len(source), -1, num_experts).permute(2, 0, 1)
    tensor.copy_(source)


def _entries(adapters: Adapters) -> Iterator[tuple[str, Tensor, str, int]]:
    """(peft's key, A or B, 'A' or 'B', number of experts or 0)."""
    for name in adapters.names:
        adapter: Adapter = adapters[name]
        num_experts = len(adapter.A) if adapter.A.ndim == 3 else 0
        for letter, tensor in (("A", adapter.A), ("B", adapter.B)):
            yield _key(name, letter, num_experts > 0), tensor, letter, num_experts


def _key(param: str, letter: str, is_stack: bool) -> str:
    """peft's, of the parameter `param` by transformers' name."""
    module, _, kind = param.rpartition(".")
    if is_stack and kind == "gate_up_proj":
        module += ".base_layer"
    return f"base_model.model.{module}.lora_{letter}.weight"


def _as_stored(tensor: Tensor, kind: str, num_experts: int) -> Tensor:
    if not num_experts:
        return tensor
    if kind == "A":
        return tensor.flatten(0, 1)
    return tensor.permute(1, 2, 0).flatten(1)
