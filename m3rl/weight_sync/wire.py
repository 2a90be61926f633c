"""Tensors as they travel: in their dtype, or quantised to MXFP8 by the sender.

    one message of a rectangle     values in wire dtype
    the same, quantised            values [..., K], then scales [..., K / 32]

The bytes are those that the receiver would make of BF16, so nothing changes for hashes: the sender
hashes what it holds and what it makes of it, the receiver what lies in its places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from inference.kernels.mxfp8 import (
    MAX_SCALE,
    MXFP8Tensor,
    QuantizeTable,
    has_bad_scale,
    quantize_into,
)
from m3rl.weight_sync.errors import NonFiniteError
from m3rl.weight_sync.plan import CopyOp
from m3rl.weight_sync.rounds import Range, Slots

if TYPE_CHECKING:
    from m3rl.weight_sync.send_rounds import Weights


class Quantizer:
    """Quantises into slots what a trainer rank's share sends in MXFP8, round by round."""

    def __init__(
        self,
        ops: Sequence[CopyOp],
        rounds: Sequence[Sequence[int]],
        slots: Slots,
        weights: Weights,
    ) -> None:
        """
        Args:
            rounds: the ops of each.
            slots: have a place for each op that is sent in MXFP8.
        """
        self._weights = weights
        made_in = slots
        if slots.device != weights.device:
            quantized = {i for i, op in enumerate(ops) if op.wire == "mxfp8"}
            made_in = Slots(ops, rounds, quantized, weights.device)
        self._work: list[tuple[CopyOp, MXFP8Tensor]] = []
        self._moves: list[tuple[Tensor, Tensor]] = []
        """Of each op, from the weights' device to that of the slots."""
        self._of_round: list[Range] = []
        for chosen in rounds:
            before = len(self._work)
            for i in chosen:
                if ops[i].wire == "mxfp8":
                    place = made_in.rectangle(i)
                    assert isinstance(place, MXFP8Tensor), "so it travels"
                    self._work.append((ops[i], place))
                    if made_in is not slots:
                        self._moves.append((made_in.wire(i), slots.wire(i)))
            self._of_round.append((before, len(self._work)))
        pairs = [(weights.of(op), place) for op, place in self._work] if weights.stays else []
        self._table = QuantizeTable(pairs) if pairs else None
        self._bad = torch.zeros(len(self._work), dtype=torch.bool, device=weights.device)
        """Of weights that are read anew each time: not finite."""

    def reset(self) -> None:
        """A new sync begins."""
        self._bad.zero_()
        if self._table is not None:
            self._table.reset()

    def fill(self, number: int) -> None:
        """Quantise the present weights of a round; on CUDA enqueued."""
        first, last = self._of_round[number]
        if self._table is not None:
            self._table.launch(first, last)
        else:
            for i in range(first, last):
                op, place = self._work[i]
                quantize_into(self._weights.of(op), place)
                self._bad[i] = has_bad_scale(place)
        for made, slot in self._moves[first:last]:
            slot.copy_(made)

    def check(self) -> None:
        """After all rounds; waits for the device.

        Raises:
            NonFiniteError: NaN, infinity or what the products do not take among the weights.
        """
        bad = self._bad if self._table is None else self._table.flags
        if where := bad.nonzero().flatten().tolist():
            largest, op = 448 * 2 ** (MAX_SCALE - 127), self._work[where[0]][0]
            raise NonFiniteError(
                f"{self._weights.owner}: NaN or infinity, or magnitudes above {largest}, in {op} "
                f"and in {len(where) - 1} other parts; such weights are not served"
            )
