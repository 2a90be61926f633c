"""MiniMax-M3 for training: transformers' modules over FP32 masters, run with the wire's values.

Every weight is kept in FP32 and enters the forward pass rounded to `policy.dtype`, exactly as the
rollout workers receive it; router weight, correction bias and the head's arithmetic stay FP32. A
forward pass takes samples packed one after the other (`policy_layers`) through the runtime's own
selection, attention and router, so trainer and runtime break ties alike, and it can replay recorded
experts and blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from inference.config import ModelConfig
from inference.kernels.packing import Packing
from m3rl.grpo.replay import ChoiceObserver, ChoiceStats, Record, record_of
from m3rl.index_alignment import IndexLoss
from m3rl.parallel.mesh import RankMesh
from m3rl.policy_layers import ForwardPass, cos_sin
from m3rl.policy_m3 import M3Architecture
from m3rl.policy_packed import NO_RECORD, RUNS_MODEL, PackedPolicy

if TYPE_CHECKING:
    from m3rl.grpo.micro import MicroBatch
    from m3rl.types import TrainBatch


class Policy(PackedPolicy):
    """A MiniMax-M3 language model, trained in place, exported and hashed by published name.

    The index branch is frozen, unless `trains_index`: it only chooses blocks, and a choice has no
    gradient. All weights are NaN until `load` or `init_random`.

    Args:
        dtype: of `DTYPES`: what the forward pass computes with and the wire carries.
        replay_routing: take the experts of a record, where one is given.
        replay_blocks: take its key blocks.
        activation_checkpointing: keep only the inputs of all decoder layers but the last for the
            backward pass, and their choices, and compute the layers again there.
        trains_index: the index branch is trained, by an `IndexLoss` of each forward pass.
        mesh: share the model with these ranks, all of which then call what says so here, and its
            forward, at the same time; None: this process holds all of it, on the CPU at first.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: str,
        replay_routing: bool = False,
        replay_blocks: bool = False,
        activation_checkpointing: bool = False,
        trains_index: bool = False,
        mesh: RankMesh | None = None,
    ) -> None:
        if config.swiglu_beta != 1.0:
            raise ValueError(
                f"swiglu_beta={config.swiglu_beta} cannot be trained: transformers knows only 1.0"
            )
        architecture = M3Architecture(config, trains_index=trains_index)
        super().__init__(architecture, dtype, mesh, runs_model=RUNS_MODEL)
        self.config = config
        self.replay_routing = replay_routing
        self.replay_blocks = replay_blocks
        self.activation_checkpointing = activation_checkpointing

    @classmethod
    def for_model(cls, path: str | Path, **options: Any) -> Policy:
        """A policy of the shape that the config.json in `path` gives."""
        return cls(ModelConfig.from_pretrained(path), **options)

    def has_shape_of(self, path: str | Path) -> bool:
        """Whether the model in `path` has the same configuration."""
        return ModelConfig.from_pretrained(path) == self.config

    def hidden_states(
        self,
        ids_T: Tensor,
        packing: Packing,
        *,
        record: Record = NO_RECORD,
        stats: ChoiceObserver | None = None,
        index_loss: IndexLoss | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, [Q, C] in the policy's dtype.

        Every sample of the packed row computes as if it stood alone. `Q` is all tokens, or the
        queries of `packing` where ranks share the row.

        Args:
            ids_T: [T] int64.
            record: choices recorded of these tokens; a kind that is not replayed is only compared.
            stats: is told the choices.
            index_loss: of this forward pass; see `forward`.

        Raises:
            ValueError: ids of another number than `packing` has tokens; a sample beyond
                `max_position_embeddings`.
        """
        self._require_fitting(ids_T, packing, self.config.max_position_embeddings)
        model = self.model.model
        queries = slice(packing.first, packing.first + packing.num_queries)
        run = ForwardPass(
            config=self.config,
            packing=packing,
            cos_sin_TX=cos_sin(model.rotary_emb, packing.positions_T[queries]),
            record=record.of(queries),
            replays_experts=self.replay_routing,
            replays_blocks=self.replay_blocks,
            stats=stats,
            index_loss=index_loss,
            mesh=self.mesh,
        )
        # Rounding the rows that are looked up is rounding the table.
        x_TC: Tensor = model.embed_tokens(ids_T[queries]).to(self.dtype)
        for index, layer in enumerate(model.layers):
            compute: Callable[..., Tensor] = partial(self._on_wire, layer, f"model.layers.{index}")
            # The last layer would be computed again as soon as it is.
            is_last = index + 1 == len(model.layers)
            if self.activation_checkpointing and torch.is_grad_enabled() and not is_last:
                compute = partial(
                    checkpoint, compute, use_reentrant=False, preserve_rng_state=False
                )
            x_TC = compute(x_TC, index, run)
        return self._on_wire(model.norm, "model.norm", x_TC)

    def _on_wire(self, module: nn.Module, name: str, *args: Any) -> Tensor:
        """`module(*args)` with its masters rounded to the wire's dtype, differentiably.

        The one place where parameters are cast, but for the rows of the embedding that are looked
        up and the tiles of the head that `token_logprobs` reads.
        """
        result: Tensor
        if self.dtype != torch.bfloat16:
            result = module(*args)
            return result
        rounded = {
            key: parameter.to(self.dtype)
            for key, parameter in module.named_parameters()
            if f"{name}.{key}" not in self._fp32
        }
        result = functional_call(module, rounded, args)
        return result

    def record_of(self, batch: TrainBatch, micro: MicroBatch) -> Record:
        return record_of(batch, micro, self.config)

    def new_stats(self, device: torch.device) -> ChoiceStats:
        return ChoiceStats.zeros(len(self.config.moe_layers), self.config.num_local_experts, device)

    def state_metrics(self) -> dict[str, float]:
        """The largest absolute value in any layer's router correction bias."""
        biases = [
            float(buffer.abs().max())
            for name, buffer in self.named_buffers()
            if name.endswith("e_score_correction_bias")
        ]
        return {"m3/correction_bias_abs_max": max(biases, default=0.0)}

    def _twin(self) -> Policy:
        return Policy(
            self.config,
            dtype=self.dtype_name,
            replay_routing=self.replay_routing,
            replay_blocks=self.replay_blocks,
            mesh=self.mesh,
        )
