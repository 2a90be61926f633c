"""MiniMax-M3 for training: transformers' modules over FP32 masters, run with the wire's values.

Every weight is kept in FP32 and enters the forward pass rounded to `policy.dtype`, exactly as the
rollout workers receive it; router weight, correction bias and the head's arithmetic stay FP32. A
forward pass takes samples packed one after the other (`policy_layers`) through the runtime's own
selection, attention and router, so trainer and runtime break ties alike, and it can replay recorded
experts and blocks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from inference.config import ModelConfig
from inference.kernels.packing import Packing
from m3rl.grpo.logprob import greedy_hits, token_logprobs
from m3rl.grpo.micro import token_ranges
from m3rl.grpo.replay import ChoiceObserver, Record
from m3rl.index_alignment import IndexLoss
from m3rl.parallel.exchange import gather_rows
from m3rl.parallel.mesh import RankMesh
from m3rl.policy_layers import ForwardPass, cos_sin
from m3rl.policy_weights import PolicyWeights

NO_RECORD = Record()
Forward = Callable[..., tuple[Tensor, Tensor]]
"""`Policy.forward`, or that of weights that are not trained."""


class Policy(PolicyWeights):
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
        super().__init__(
            config, dtype, mesh, runs_model=("greedy_hits",), trains_index=trains_index
        )
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
        if ids_T.shape != (packing.num_tokens,):
            raise ValueError(f"ids of shape {tuple(ids_T.shape)} for {packing.num_tokens} tokens")
        if max(packing.lengths) > self.config.max_position_embeddings:
            raise ValueError(
                f"a sample of {max(packing.lengths)} tokens exceeds max_position_embeddings="
                f"{self.config.max_position_embeddings}"
            )
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

    def forward(
        self,
        ids_T: Tensor,
        packing: Packing,
        targets_M: Tensor,
        *,
        temperature: float,
        record: Record = NO_RECORD,
        stats: ChoiceObserver | None = None,
        index_loss: IndexLoss | None = None,
        entropy_grad: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Log-probability of tokens given those before them in their sample, and the entropy there.

        Args:
            targets_M: [M] int64, ascending places of the tokens among all T; none begins a sample.
            index_loss: its gradients join those of a backward pass from what is returned.
            entropy_grad: the entropy has a gradient too.

        Returns:
            (logprobs_M, entropy_M), see `token_logprobs`. Ranks that share the packed row all have
            all of it: the loss is what they compute from it, summed.
        """
        own_M, counts = self._own_targets(packing, targets_M)
        hidden_QC = self.hidden_states(
            ids_T, packing, record=record, stats=stats, index_loss=index_loss
        )
        logprobs_M, entropy_M = self.model.lm_head(
            partial(token_logprobs, temperature=temperature, entropy_grad=entropy_grad),
            hidden_QC.index_select(0, own_M - 1 - packing.first),
            ids_T.index_select(0, own_M),
        )
        return self._of_sharers(logprobs_M, counts), self._of_sharers(entropy_M, counts)

    def _own_targets(self, packing: Packing, targets_M: Tensor) -> tuple[Tensor, list[int]]:
        """Those that follow a query of this rank, and how many each rank that shares the packed row
        has."""
        if self.mesh is None or self.mesh.sharers is None:
            return targets_M, [len(targets_M)]
        ends = [first + count for first, count in token_ranges(packing.num_tokens, self.mesh.cp)]
        edges = targets_M.new_tensor([0, *ends])
        places = torch.searchsorted(targets_M, edges, right=True).tolist()
        counts = [stop - start for start, stop in pairwise(places)]
        return targets_M[places[self.mesh.place] : places[self.mesh.place + 1]], counts

    def _of_sharers(self, own: Tensor, counts: list[int]) -> Tensor:
        """Values of this rank's targets to those of all."""
        if self.mesh is None or self.mesh.sharers is None:
            return own
        return gather_rows(own, counts, self.mesh.sharers)

    @torch.no_grad()
    def greedy_hits(self, ids_T: Tensor, packing: Packing, targets_M: Tensor) -> Tensor:
        """[M] bool: whether greedy decoding would choose each of the tokens at `targets_M`."""
        own_M, counts = self._own_targets(packing, targets_M)
        hidden_QC = self.hidden_states(ids_T, packing)
        hits_M: Tensor = self.model.lm_head(
            greedy_hits, hidden_QC[own_M - 1 - packing.first], ids_T[own_M]
        )
        return self._of_sharers(hits_M.byte(), counts).bool()

    @torch.no_grad()
    def frozen_copy(self) -> Forward:
        """The forward pass with the present weights, which are never trained there."""
        if self.mesh is None:
            return copy.deepcopy(self).requires_grad_(False)
        twin = Policy(
            self.config,
            dtype=self.dtype_name,
            replay_routing=self.replay_routing,
            replay_blocks=self.replay_blocks,
            mesh=self.mesh,
        )
        mine = dict(self.named_buffers()) | self._masters()
        for name, tensor in (dict(twin.named_buffers()) | twin._masters()).items():
            tensor.copy_(mine[name])
        return twin.requires_grad_(False)
