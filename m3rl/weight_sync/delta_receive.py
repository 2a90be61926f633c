"""A worker's side of deltas: messages of changed values, written over the weights of their base."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inference.kernels.changed_values import OverwriteTable
from inference.kernels.mxfp8 import MXFP8Tensor, tensors_of
from m3rl.weight_sync.delta import Delta, DeltaMessage, planes
from m3rl.weight_sync.lane import Lane
from m3rl.weight_sync.plan import CopyOp
from m3rl.weight_sync.transport import Deadline, Posted, Transfer, Transport


class DeltaRounds:
    """Writes the differences of one plan into its places, one sync after the other."""

    def __init__(
        self, ops: Sequence[CopyOp], places: Sequence[Tensor | MXFP8Tensor], lane: Lane
    ) -> None:
        """
        Args:
            ops: the worker's share, in order.
            places: the memory of each op's rectangle.
            lane: in which full syncs fill them, too.
        """
        self._ops = ops
        self._lane = lane
        outs: dict[int, list[Tensor]] = {}
        self._first: dict[tuple[int, int], int] = {}
        """(op, bytes of an element) -> its first plane in the table."""
        # By sender, so that a message is a range of planes.
        for i in sorted(range(len(ops)), key=lambda i: ops[i].sender):
            for (item, _), out in zip(planes(ops[i]), tensors_of(places[i]), strict=True):
                each = outs.setdefault(item, [])
                self._first.setdefault((i, item), len(each))
                each.append(out)
        self._tables = {item: OverwriteTable(each) for item, each in outs.items()}
        self._under_way: list[list[Tensor]] = []
        """Kept where a run fails: NCCL may still write there."""

    def run(self, delta: Delta, transport: Transport, deadline: Deadline) -> int:
        """Receive and write all groups; on the device too this is done when it returns.

        Returns:
            Bytes received.

        Raises:
            TransportError: a member is late or gone.
        """
        groups = delta.groups
        with torch.no_grad(), self._lane.entered():
            arriving = self._post(*groups[0], transport)
            transport.note("begins")
            for i, (_, group) in enumerate(groups):
                posted, wires = arriving
                if i + 1 < len(groups):
                    arriving = self._post(*groups[i + 1], transport)
                transport.wait(posted, deadline)
                for message, wire in zip(group, wires, strict=True):
                    self._write(message, wire)
            transport.wait_for_device(self._lane.mark(), deadline)
        self._under_way.clear()
        return delta.nbytes

    def _post(
        self, number: int, group: Sequence[DeltaMessage], transport: Transport
    ) -> tuple[Posted, list[Tensor]]:
        wires = [
            torch.empty(message.nbytes, dtype=torch.uint8, device=transport.device)
            for message in group
        ]
        self._under_way = [*self._under_way[-1:], wires]
        transfers = [
            Transfer(wire, message.peer, number, self._ops[message.ops[0]])
            for message, wire in zip(group, wires, strict=True)
        ]
        return transport.post(receives=transfers), wires

    def _write(self, message: DeltaMessage, wire: Tensor) -> None:
        wire = wire.to(self._lane.device)
        for item, (counts, places, values) in message.sections(wire).items():
            own = [i for i in message.ops if (i, item) in self._first]
            if own:
                first, last = self._first[own[0], item], self._first[own[-1], item]
                last += sum(size == item for size, _ in planes(self._ops[own[-1]]))
                self._tables[item].launch(first, last, counts, places, values)
