"""Tokens to the ranks that hold their experts, and the experts' sums back (dp > 1).

    flight = exchange.dispatch(x, ids, weights)    # travels
    y = shared_expert(x)                           # meanwhile
    x_RC, ids_RA, weights_RA = flight.received()
    flight.combine(expert_gemm(x_RC, ...), y)      # y += the sums of all ranks

Suffixes: `S` tokens of this rank's share · `W` ranks · `R` rows that arrived · `G` expert groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from inference.kernels.add_rows import add_rows
from inference.kernels.local_ids import local_ids
from inference.parallel.groups import ParallelGroups, Pending

COUNT_BYTES = 256 << 20
"""What takes as long to send as the counted form's host needs for the counts, about 1 ms."""
COUNT_ROWS = 2048
"""The counted form is for more rows of a rank than a decode step has: no graph can capture it."""


@dataclass(frozen=True, slots=True)
class Received:
    """Tokens that this rank's experts compute."""

    x_RC: Tensor
    ids_RA: Tensor
    """int32 experts among those held here, from 0; -1: held elsewhere, or padding."""
    weights_RA: Tensor


class Flight(Protocol):
    """Tokens on their way, and the way back."""

    def received(self) -> Received:
        """Wait for the tokens of all ranks."""

    def combine(self, partial_RC: Tensor, y_SC: Tensor) -> None:
        """y_SC += the sums of all ranks for this rank's tokens.

        FP32, in ascending rank order, y itself last; one rounding. `partial_RC` has the sum of a
        row's experts held here, in the dtype of y.
        """


class ExpertExchange:
    """What one rank needs to reach the experts of all ranks."""

    def __init__(self, groups: ParallelGroups, num_experts: int) -> None:
        self.groups = groups
        self.held = groups.config.experts(num_experts, groups.rank)
        self._indexes: dict[tuple[int, torch.device], Tensor] = {}

    def dispatch(
        self, x_SC: Tensor, ids_SA: Tensor, weights_SA: Tensor, *, num_rows: int | None = None
    ) -> Flight:
        """Send tokens on their way; returns before they have arrived.

        Every rank calls this, also one without tokens.

        Args:
            x_SC: [S, C], contiguous.
            ids_SA: [S, A] int32 experts of the model, -1: none.
            weights_SA: [S, A] FP32.
            num_rows: None: the counted form, which makes the host wait for the counts. Else the
                fixed form, with so many rows from each rank: the same number on all, at least S.

        Raises:
            ParallelError: a rank failed, died, or did not come in time.
        """
        if num_rows is None:
            return self._counted(x_SC, ids_SA, weights_SA)
        padded = [_padded(t, num_rows, f) for t, f in _fills(x_SC, ids_SA, weights_SA)]
        return FixedFlight(self, *self.groups.show_to_all(padded, "dispatch of tokens"))

    def prefers_counted(self, num_rows: int, topk: int, row_bytes: int) -> bool:
        """Whether the counted form is the faster one: where it saves much of what would travel."""
        if num_rows < COUNT_ROWS:
            return False
        config = self.groups.config
        reach = 1 - (1 - 1 / config.expert_groups) ** topk
        saved = 2 * (1 - reach) * num_rows * (config.world - 1) * row_bytes
        return saved > COUNT_BYTES

    def local_ids(self, ids_RA: Tensor) -> Tensor:
        """Experts of the model -> places among those held here, -1 for the others."""
        if self.groups.config.expert_groups == 1:
            return ids_RA
        return local_ids(ids_RA, self.held.start, len(self.held))

    def fixed_index(self, num_rows: int, device: torch.device) -> Tensor:
        """[S, W] int32: where each rank's sum for each token arrives."""
        if (num_rows, device) not in self._indexes:
            rows = torch.arange(num_rows * self.groups.config.world, dtype=torch.int32)
            index_SW = rows.view(-1, num_rows).T.contiguous().to(device)
            self._indexes[num_rows, device] = index_SW
        return self._indexes[num_rows, device]

    def _counted(self, x_SC: Tensor, ids_SA: Tensor, weights_SA: Tensor) -> CountedFlight:
        goes_SW = self._destinations(ids_SA)
        count_W = goes_SW.sum(0)
        their_count_W = torch.empty_like(count_W)
        self.groups.all_to_all(their_count_W, count_W, "counts before dispatch").wait()
        both = torch.stack([count_W, their_count_W])
        sent, received = self.groups.to_host(both, "counts before dispatch")
        return CountedFlight(self, x_SC, ids_SA, weights_SA, goes_SW, sent, received)

    def _destinations(self, ids_SA: Tensor) -> Tensor:
        """[S, W] bool: whether a token has an expert (of which there is a part) on a rank."""
        config, per_group = self.groups.config, len(self.held)
        group_SA = torch.where(ids_SA < 0, -1, ids_SA // per_group)
        groups_G = torch.arange(config.expert_groups, dtype=torch.int32, device=ids_SA.device)
        goes_SG = (group_SA[:, :, None] == groups_G).any(1)
        return goes_SG.repeat_interleave(config.width_ranks, dim=1)


class FixedFlight:
    """Every rank has the same number of rows, and all go to all: no counts, no host."""

    def __init__(self, exchange: ExpertExchange, everyone: list[Tensor], pending: Pending) -> None:
        """`everyone`: x, ids and weights of all ranks, once `pending` is over."""
        self._exchange, self._everyone, self._pending = exchange, everyone, pending

    def received(self) -> Received:
        self._pending.wait()
        x_RC, ids_RA, weights_RA = self._everyone
        return Received(x_RC, self._exchange.local_ids(ids_RA), weights_RA)

    def combine(self, partial_RC: Tensor, y_SC: Tensor) -> None:
        groups, what = self._exchange.groups, "combine of expert sums"
        if groups.add_parts(partial_RC, y_SC, what):
            return
        sums_RC = torch.empty_like(partial_RC)
        groups.all_to_all(sums_RC, partial_RC, what).wait()
        num_rows = len(sums_RC) // groups.config.world
        index_SW = self._exchange.fixed_index(num_rows, y_SC.device)
        add_rows(y_SC, sums_RC, sums_RC[:0], index_SW[: len(y_SC)])


class CountedFlight:
    """A token travels once to each rank that holds any of its experts; to this one it need not.

    Rows are ordered by the other ranks, ascending, and then come this rank's own.
    """

    def __init__(
        self,
        exchange: ExpertExchange,
        x_SC: Tensor,
        ids_SA: Tensor,
        weights_SA: Tensor,
        goes_SW: Tensor,
        sent: list[int],
        received: list[int],
    ) -> None:
        """`sent[r]` rows go to rank r, `received[r]` come from it."""
        self._exchange, rank = exchange, exchange.groups.rank
        own, sent[rank], received[rank] = sent[rank], 0, 0
        self._sent, self._received = sent, received
        # [W, S], this rank last
        order = [r for r in range(len(sent)) if r != rank] + [rank]
        goes_WS = goes_SW.T[order]
        place_WS = goes_WS.flatten().cumsum(0, dtype=torch.int32).view(goes_WS.shape) - 1
        back = sorted(range(len(order)), key=order.__getitem__)
        self._index_SW = place_WS.where(goes_WS, -1)[back].T.contiguous()
        token_X = goes_WS.nonzero()[:, 1]
        away, here = token_X[: sum(sent)], token_X[sum(sent) :]
        # One message: experts and weights of a token, side by side.
        choice_SX = torch.cat([ids_SA, weights_SA.view(torch.int32)], dim=1)
        self._pending, self._arrived = [], []
        for tensor, what in ((choice_SX, "dispatch of experts"), (x_SC, "dispatch of tokens")):
            out = tensor.new_empty((sum(received) + own, tensor.shape[1]))
            self._pending.append(
                exchange.groups.all_to_all(out[: sum(received)], tensor[away], what, received, sent)
            )
            torch.index_select(tensor, 0, here, out=out[sum(received) :])
            self._arrived.append(out)

    def received(self) -> Received:
        for pending in self._pending:
            pending.wait()
        choice_RX, x_RC = self._arrived
        topk = choice_RX.shape[1] // 2
        ids_RA, weights_RA = choice_RX[:, :topk], choice_RX[:, topk:].view(torch.float32)
        return Received(x_RC, self._exchange.local_ids(ids_RA), weights_RA)

    def combine(self, partial_RC: Tensor, y_SC: Tensor) -> None:
        num_away = sum(self._received)
        sums_XC = partial_RC.new_empty((sum(self._sent), partial_RC.shape[1]))
        self._exchange.groups.all_to_all(
            sums_XC, partial_RC[:num_away], "combine of expert sums", self._sent, self._received
        ).wait()
        add_rows(y_SC, sums_XC, partial_RC[num_away:], self._index_SW)


def _fills(x_SC: Tensor, ids_SA: Tensor, weights_SA: Tensor) -> tuple[tuple[Tensor, int], ...]:
    """What padding holds: tokens that go to no expert."""
    return (x_SC, 0), (ids_SA, -1), (weights_SA, 0)


def _padded(tensor: Tensor, num_rows: int, fill: int) -> Tensor:
    missing = num_rows - len(tensor)
    if missing < 0:
        raise ValueError(f"{len(tensor)} tokens do not fit into num_rows={num_rows}")
    if not missing:
        return tensor.contiguous()
    return torch.cat([tensor, tensor.new_full((missing, tensor.shape[1]), fill)])
