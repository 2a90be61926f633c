"""A layer's experts over all ranks of a replica: who computes what, and the sums."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from inference.parallel.exchange import ExpertExchange
from inference.parallel.groups import ParallelGroups


class ExpertSum(Protocol):
    """Weighted sum of the experts held here, as `expert_gemm` computes it."""

    def __call__(
        self, x_RC: Tensor, ids_RA: Tensor, weights_RA: Tensor, *, with_shared: bool
    ) -> Tensor:
        """[R, C] for ids among those held here (-1: none), this rank's part of the shared expert
        added if asked for."""


class SharedSum(Protocol):
    """This rank's part of the shared expert alone."""

    def __call__(self, x_TC: Tensor) -> Tensor:
        """[T, C], contiguous."""


class ParallelExperts:
    """Routed and shared experts of one layer, of which this rank holds a part."""

    def __init__(self, groups: ParallelGroups, num_experts: int) -> None:
        self._groups = groups
        self._exchange = ExpertExchange(groups, num_experts)

    def __call__(
        self,
        x_TC: Tensor,
        ids_TA: Tensor,
        weights_TA: Tensor,
        expert_sum: ExpertSum,
        shared_sum: SharedSum,
        *,
        max_tokens: int,
    ) -> Tensor:
        """The whole sum for this dp group's tokens, [T, C]; equal on its tp ranks.

        Args:
            x_TC, ids_TA, weights_TA: as `expert_gemm` takes them, experts by their ids in the
                model; equal on the tp ranks.
            max_tokens: of all dp groups, the same number on all ranks. Means nothing with one dp
                group.

        Raises:
            ParallelError: a rank failed, died, or did not come in time.
        """
        if self._groups.config.dp == 1:
            ids_TA = self._exchange.local_ids(ids_TA)
            y_TC = expert_sum(x_TC, ids_TA, weights_TA, with_shared=True)
        else:
            y_TC = self._exchanged(x_TC, ids_TA, weights_TA, expert_sum, shared_sum, max_tokens)
        if self._groups.config.tp > 1:
            self._groups.all_reduce(y_TC, "all-reduce of experts").wait()
        return y_TC

    def _exchanged(
        self,
        x_TC: Tensor,
        ids_TA: Tensor,
        weights_TA: Tensor,
        expert_sum: ExpertSum,
        shared_sum: SharedSum,
        max_tokens: int,
    ) -> Tensor:
        """Partial sums: the shared expert's for all tokens, the routed ones' for this rank's."""
        tp = self._groups.config.tp
        num_rows = -(-max_tokens // tp)
        row_bytes = x_TC.shape[1] * x_TC.itemsize
        counts = self._exchange.prefers_counted(num_rows, ids_TA.shape[1], row_bytes)
        mine = _share(len(x_TC), tp, self._groups.config.tp_rank(self._groups.rank))
        flight = self._exchange.dispatch(
            x_TC[mine], ids_TA[mine], weights_TA[mine], num_rows=None if counts else num_rows
        )
        y_TC = shared_sum(x_TC)
        arrived = flight.received()
        partial_RC = expert_sum(arrived.x_RC, arrived.ids_RA, arrived.weights_RA, with_shared=False)
        flight.combine(partial_RC, y_TC[mine])
        return y_TC


def _share(num_tokens: int, parts: int, part: int) -> slice:
    """The tokens of one of `parts` ranks: equal runs, the last ones shorter or empty."""
    size = -(-num_tokens // parts)
    return slice(min(part * size, num_tokens), min((part + 1) * size, num_tokens))
