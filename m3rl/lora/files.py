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
"""Key of the weights file's metadata."""


def write_adapters(path: Path, adapters: Adapters, *, base_hash: str, model_path: str) -> None:
    """Write both files into directory `path`.

    Args:
        base_hash: of the weights that the adapters belong to.
        model_path: of the base, for peft.
    """
    tensors = {
        key: _as_stored(tensor, kind, stacks).detach().cpu().contiguous()
        for key, tensor, kind, stacks in _entries(adapters)
    }
    save_file(tensors, path / WEIGHTS_FILE, metadata={"format": "pt", BASE_HASH: base_hash})
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
        module, _, kind = name.rpartition(".")
        num_experts = len(adapter.A) if adapter.A.ndim == 3 else 0
        if num_experts and kind == "gate_up_proj":
            module += ".base_layer"
        for letter, tensor in (("A", adapter.A), ("B", adapter.B)):
            yield f"base_model.model.{module}.lora_{letter}.weight", tensor, letter, num_experts


def _as_stored(tensor: Tensor, kind: str, num_experts: int) -> Tensor:
    if not num_experts:
        return tensor
    if kind == "A":
        return tensor.flatten(0, 1)
    return tensor.permute(1, 2, 0).flatten(1)
