"""A policy over packed samples, whatever its architecture: log-probabilities of their tokens."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from inference.kernels.packing import Packing
from m3rl.grpo.logprob import greedy_hits, token_logprobs
from m3rl.grpo.micro import token_ranges
from m3rl.grpo.replay import ChoiceObserver, ChoiceStats, Record
from m3rl.index_alignment import IndexLoss
from m3rl.parallel.exchange import gather_rows
from m3rl.policy_weights import PolicyWeights

if TYPE_CHECKING:
    from m3rl.grpo.micro import MicroBatch
    from m3rl.types import TrainBatch

NO_RECORD = Record()
Forward = Callable[..., tuple[Tensor, Tensor]]
"""`PackedPolicy.forward`, or that of weights that are not trained."""
RUNS_MODEL = ("greedy_hits",)
"""Methods of a `PackedPolicy` that run its model, besides the forward."""


class PackedPolicy(PolicyWeights):
    """A language model, trained in place, exported and hashed by published name.

    A forward pass takes samples packed one after the other; each computes as if it stood alone.
    """

    @classmethod
    @abstractmethod
    def for_model(cls, path: str | Path, **options: Any) -> Self:
        """A policy of the shape that the files in `path` give."""

    @abstractmethod
    def has_shape_of(self, path: str | Path) -> bool:
        """Whether the model in `path` has the same configuration."""

    @abstractmethod
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

        `Q` is all tokens, or the queries of `packing` where ranks share the row.

        Args:
            ids_T: [T] int64.
            record: choices recorded of these tokens; a kind that is not replayed is only compared.
            stats: is told the choices.
            index_loss: of this forward pass; see `forward`.

        Raises:
            ValueError: ids of another number than `packing` has tokens; a sample longer than the
                model's positions.
        """

    @abstractmethod
    def record_of(self, batch: TrainBatch, micro: MicroBatch) -> Record:
        """What was recorded of the rows of a micro-batch."""

    @abstractmethod
    def new_stats(self, device: torch.device) -> ChoiceStats:
        """An observer of forward passes that has seen none."""

    def state_metrics(self) -> dict[str, float]:
        """What the weights themselves show."""
        return {}

    @abstractmethod
    def _twin(self) -> Self:
        """A policy like this one on the same ranks, its weights NaN."""

    def _require_fitting(self, ids_T: Tensor, packing: Packing, max_positions: int) -> None:
        if ids_T.shape != (packing.num_tokens,):
            raise ValueError(f"ids of shape {tuple(ids_T.shape)} for {packing.num_tokens} tokens")
        if max(packing.lengths) > max_positions:
            raise ValueError(
                f"a sample of {max(packing.lengths)} tokens exceeds max_position_embeddings="
                f"{max_positions}"
            )

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
        logprobs_M, entropy_M = self.architecture.head(self.model)(
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
        hits_M: Tensor = self.architecture.head(self.model)(
            greedy_hits, hidden_QC[own_M - 1 - packing.first], ids_T[own_M]
        )
        return self._of_sharers(hits_M.byte(), counts).bool()

    @torch.no_grad()
    def frozen_copy(self) -> Forward:
        """The forward pass with the present weights, which are never trained there."""
        if self.mesh is None:
            return copy.deepcopy(self).requires_grad_(False)
        twin = self._twin()
        mine = dict(self.named_buffers()) | self._masters()
        for name, tensor in (dict(twin.named_buffers()) | twin._masters()).items():
            tensor.copy_(mine[name])
        return twin.requires_grad_(False)
