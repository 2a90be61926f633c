"""MiniMax-M3 in vLLM: natively on GPUs, and with dense attention in vLLM's CPU build.

vLLM has no sparse attention for the CPU. While a sequence is no longer than the blocks that every
query may read, sparse attention reads all keys, so dense attention computes the same; longer
sequences are refused. The index branch, which chooses blocks, then has no part in the result: its
weights are not kept (`index_names`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference.config import ModelConfig
from inference.models.name_map import published_tensors
from m3rl.model_layout import read_model_config
from m3rl.rollout.backend import BackendError

NATIVE = "MiniMaxM3SparseForCausalLM"
"""vLLM's own text model; the one with vision keeps tensors that no sync brings."""
DENSE = "MiniMaxM3VLForCausalLM"
"""transformers' text model, which vLLM runs as `vllm_m3_model.DenseM3`."""
_OF_THE_FILE = ("architectures", "model_type")
"""Keys of a config.json that a config's class sets itself."""


def register_dense_m3() -> None:
    """Tell vLLM of M3 with dense attention."""
    from vllm import ModelRegistry

    from m3rl.rollout.vllm_m3_model import DenseM3

    if DENSE not in ModelRegistry.get_supported_archs():
        # The class, not its name: of a name vLLM asks another process, which may not find m3rl.
        ModelRegistry.register_model(DENSE, DenseM3)


@dataclass(frozen=True, slots=True)
class TextOnly:
    """vLLM's `hf_overrides`: the text model of the M3 at `path`, natively or with dense attention,
    whether its config.json has vision beside it or not."""

    path: str
    is_dense: bool

    def __call__(self, config: Any) -> Any:
        if not hasattr(config, "text_config") and not hasattr(config, "hidden_size"):
            return config  # vLLM also asks what becomes of an empty one
        raw = read_model_config(Path(self.path))
        raw = raw.get("text_config") or raw
        settings = {key: value for key, value in raw.items() if key not in _OF_THE_FILE}
        return self._dense(settings) if self.is_dense else self._native(settings)

    @staticmethod
    def _dense(settings: dict[str, Any]) -> Any:
        from transformers import MiniMaxM3VLTextConfig

        text = MiniMaxM3VLTextConfig(**settings)
        text.architectures = [DENSE]
        text.layer_types = ["full_attention"] * text.num_hidden_layers
        return text

    @staticmethod
    def _native(settings: dict[str, Any]) -> Any:
        from vllm.transformers_utils.configs.minimax_m3 import MiniMaxM3TextConfig

        text = MiniMaxM3TextConfig(**settings)
        text.architectures = [NATIVE]
        return text


def index_names(path: str) -> frozenset[str]:
    """Published names of the index branch of the M3 at `path`."""
    specs = published_tensors(ModelConfig.from_pretrained(path))
    return frozenset(spec.name for spec in specs if spec.role == "index")


def require_dense_is_exact(path: str, max_model_len: int) -> None:
    """
    Raises:
        BackendError: sparse attention would leave something out of a sequence of `max_model_len`.
    """
    config = ModelConfig.from_pretrained(path)
    num_kept = config.index_topk_blocks * config.index_block_size
    if config.sparse_layers and max_model_len > num_kept:
        raise BackendError(
            f"rollout.backend.engine.max_model_len={max_model_len}: vLLM's CPU build computes M3 "
            f"with dense attention, which is exact up to {num_kept} tokens (index_topk_blocks="
            f"{config.index_topk_blocks} times index_block_size={config.index_block_size} in "
            f"{Path(path) / 'config.json'}); shorten it, or set rollout.backend.kind: m3"
        )
