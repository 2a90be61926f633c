"""Policies of any architecture, and which one a model gets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from inference.kernels.packing import Packing
from m3rl.grpo.replay import ChoiceObserver, ChoiceStats, Record
from m3rl.index_alignment import IndexLoss
from m3rl.lora.policy import LoraPolicy
from m3rl.model_layout import is_m3
from m3rl.parallel.mesh import RankMesh
from m3rl.policy import Policy
from m3rl.policy_packed import NO_RECORD, RUNS_MODEL, PackedPolicy
from m3rl.policy_transformers import TransformersArchitecture
from m3rl.rank_settings import RankSettings

if TYPE_CHECKING:
    from m3rl.grpo.micro import MicroBatch
    from m3rl.types import TrainBatch


def policy_of(settings: RankSettings, path: str | Path, mesh: RankMesh | None) -> PackedPolicy:
    """What a trainer rank trains, in the shape that the files in `path` give.

    Raises:
        ValueError: what only M3 has is asked of another architecture.
        ArchitectureError: see `TransformersArchitecture`.
    """
    common: dict[str, Any] = {
        "dtype": settings.dtype,
        "activation_checkpointing": settings.activation_checkpointing,
        "mesh": mesh,
    }
    if not is_m3(Path(path)):
        _require_plain(settings, path)
        return TransformersPolicy.for_model(path, **common)
    options = common | {
        "replay_routing": settings.replay_routing,
        "replay_blocks": settings.replay_blocks,
        "trains_index": settings.index_loss.coef > 0,
    }
    if settings.lora is None:
        return Policy.for_model(path, **options)
    return LoraPolicy.for_model(path, lora=settings.lora, **options)


def _require_plain(settings: RankSettings, path: str | Path) -> None:
    """`m3rl check` refuses these too, by the keys of the configuration."""
    wanted = {
        "policy.replay_routing": settings.replay_routing,
        "policy.replay_blocks": settings.replay_blocks,
        "policy.index_loss": settings.index_loss.coef > 0,
        "policy.index_drift_every": settings.index_drift_every > 0,
        "policy.lora": settings.lora is not None,
        "train.parallel.ep": settings.ep > 1,
        "train.parallel.cp": settings.cp > 1,
    }
    if asked := [key for key, is_wanted in wanted.items() if is_wanted]:
        raise ValueError(
            f"{', '.join(asked)}: of MiniMax-M3 alone, and {path} is another architecture; leave "
            "it out"
        )


class TransformersPolicy(PackedPolicy):
    """A policy of a model that transformers has, with plain causal attention.

    Args:
        path: a folder with its config.json.
        dtype: see `PolicyWeights`.
        activation_checkpointing: keep only the inputs of all decoder layers but the last for the
            backward pass, and compute the layers again there.
        mesh: share the model with these ranks; None: this process holds all of it.

    Raises:
        ArchitectureError: see `TransformersArchitecture`.
    """

    architecture: TransformersArchitecture

    def __init__(
        self,
        path: str | Path,
        *,
        dtype: str,
        activation_checkpointing: bool = False,
        mesh: RankMesh | None = None,
    ) -> None:
        architecture = TransformersArchitecture(path, recomputes=activation_checkpointing)
        super().__init__(architecture, dtype, mesh, runs_model=RUNS_MODEL)
        self._path = path
        self._recomputes = activation_checkpointing

    @classmethod
    def for_model(cls, path: str | Path, **options: Any) -> TransformersPolicy:
        return cls(path, **options)

    def has_shape_of(self, path: str | Path) -> bool:
        return self.architecture.is_same(path)

    def hidden_states(
        self,
        ids_T: Tensor,
        packing: Packing,
        *,
        record: Record = NO_RECORD,
        stats: ChoiceObserver | None = None,
        index_loss: IndexLoss | None = None,
    ) -> Tensor:
        self._require_fitting(ids_T, packing, self.architecture.max_positions)
        assert index_loss is None, "there is no index branch"
        base = getattr(self.model, self.model.base_model_prefix)
        hidden_TC: Tensor = base(
            input_ids=ids_T[None],
            position_ids=packing.positions_T[None],
            use_cache=False,
            packing=packing,
        ).last_hidden_state[0]
        return hidden_TC

    def record_of(self, batch: TrainBatch, micro: MicroBatch) -> Record:
        """Nothing: choices of other architectures are not compared."""
        return NO_RECORD

    def new_stats(self, device: torch.device) -> ChoiceStats:
        return ChoiceStats.zeros(0, 0, device)

    def _twin(self) -> TransformersPolicy:
        return TransformersPolicy(
            self._path,
            dtype=self.dtype_name,
            activation_checkpointing=self._recomputes,
            mesh=self.mesh,
        )
