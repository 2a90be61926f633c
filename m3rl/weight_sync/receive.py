"""The replica worker's end of a sync.

    EMPTY ─ prepare ─▶ PREPARED ─ stream ─▶ STREAMED ─ verify ─▶ VERIFIED ─ commit ─▶ READY(version)
                        ▲    ▲               │    ▲                                       │
                        │    │               └────┘ stream again: the one full retry      │
                        │    └──────────────────── prepare ───────────────────────────────┘
                        └─ prepare ── POISONED ◀── any fault from the first byte on

The load of the engine under a POISONED receiver is given up: weights that it touched serve nothing
until a whole load commits. Without verification `commit` follows STREAMED.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from m3rl.types import TensorSlot, WeightTarget
from m3rl.weight_sync.errors import NonFiniteError, RefusedError, SyncError
from m3rl.weight_sync.layout import WIRE_DTYPES, as_slots, check_layout, extents
from m3rl.weight_sync.plan import CopyOp, check_receives, windows
from m3rl.weight_sync.prepare import Prepare, agreed_ops
from m3rl.weight_sync.transport import Deadline, GroupSpec, Posted, Transfer, Transport, worker_name

ALIGNMENT = 16
"""Tensors begin at multiples of this in staging, so that the bytes can be viewed in any dtype."""


@runtime_checkable
class LayoutTarget(WeightTarget, Protocol):
    """The engine's side of a sync: what it holds, and the calls that change it."""

    def weight_layout(self) -> Iterable[Any]:
        """Objects with the fields of TensorSlot."""

    def abort_load(self) -> None:
        """Give up the open load, if there is one; weights touched by it serve nothing."""


class ReceiverState(Enum):
    EMPTY = "EMPTY"
    PREPARED = "PREPARED"
    STREAMED = "STREAMED"
    VERIFIED = "VERIFIED"
    READY = "READY"
    POISONED = "POISONED"


@dataclass(slots=True)
class _Window:
    """Ops under way into one half of the staging memory."""

    ops: Sequence[CopyOp]
    tensors: list[Tensor]
    posted: Posted


class EngineReceiver:
    """Fills an engine with the trainer's weights; made by the driver, bound in the worker.

    Only `stream` waits for others (at most the group's timeout); each call but `close` and `layout`
    belongs to one place in the diagram above and raises SyncError elsewhere.
    """

    def __init__(self, replica: int, worker: int = 0) -> None:
        self.state = ReceiverState.EMPTY
        self.version: int | None = None
        self._name = worker_name(replica, worker)
        self._worker = worker
        self._target: LayoutTarget | None = None
        self._layout: tuple[TensorSlot, ...] = ()
        self._transport: Transport | None = None
        self._ops: tuple[CopyOp, ...] | None = None
        self._prepare: Prepare | None = None
        self._staging: list[Tensor] = []

    def bind(self, target: WeightTarget) -> None:
        """Take charge of an engine's weights.

        Raises:
            TypeError: it lacks a method of LayoutTarget.
        """
        if not isinstance(target, LayoutTarget):
            names = ("weight_layout", "begin_load", "write", "commit", "abort_load", "weights_hash")
            missing = [name for name in names if not hasattr(target, name)]
            raise TypeError(f"{type(target).__name__} cannot be synced: it has no {missing}")
        self._target = target
        self._layout = as_slots(target.weight_layout())
        check_layout(self._layout, self._name)

    def layout(self) -> tuple[TensorSlot, ...]:
        """What the engine holds."""
        return self._layout

    def connect(self, spec: GroupSpec) -> None:
        """Join the group, leaving the one joined before.

        Raises:
            TransportError: a member did not come in time.
        """
        self.close()
        self._transport = Transport.join(spec, spec.worker_rank(self._worker))

    def prepare(self, prepare: Prepare) -> None:
        """Check the ops of a sync and allocate staging for them; no weight is touched.

        Raises:
            RefusedError: the engine's tensors or the ops are not what the driver planned, or do not
                fit.
        """
        if self._transport is None or self._target is None:
            raise RefusedError(f"{self._name} is not connected; connect to it first")
        # Read anew: an engine that rearranged its tensors must not be written by an old list.
        layout = as_slots(self._target.weight_layout())
        self._ops = agreed_ops(prepare, layout, self._ops, self._name, check_receives)
        if prepare.ops is not None or not self._staging:
            self._staging = self._allocate(self._transport.spec.chunk_bytes)
        if self.state in (ReceiverState.STREAMED, ReceiverState.VERIFIED):
            self._target.abort_load()
        self._prepare = prepare
        self.state = ReceiverState.PREPARED

    def stream(self) -> int:
        """Receive all ops and write them into the engine; returns the bytes received.

        Raises:
            TransportError: a trainer rank is late or gone.
            NonFiniteError: NaN or infinity arrived; that window was not written.
        """
        prepare = self._expect(ReceiverState.PREPARED, ReceiverState.STREAMED)
        assert self._transport is not None, "prepare() needs a connection"
        assert self._target is not None, "prepare() needs an engine"
        assert self._ops is not None, "prepare() sets the ops"
        with self._poisoned_unless_done():
            if self.state is ReceiverState.STREAMED:
                self._target.abort_load()
            self._target.begin_load(prepare.version)
            deadline = Deadline(self._transport.spec.timeout_s)
            for window in self._arriving(self._transport, self._ops, deadline):
                self._check_finite(window)
                for op, tensor in zip(window.ops, window.tensors, strict=True):
                    self._target.write(op.name, op.bounds, tensor)
            self.state = ReceiverState.STREAMED
        return sum(op.nbytes for op in self._ops)

    def verify(self, expected: dict[str, int]) -> list[str]:
        """Names of the tensors whose bits differ from the trainer's, or that one side lacks.

        Args:
            expected: hash of the part of each tensor that this worker holds (`tensor_hash`; that of
                `mxfp8.hash_tensor` where it is held in MXFP8).
        """
        self._expect(ReceiverState.STREAMED)
        assert self._target is not None, "prepare() needs an engine"
        with self._poisoned_unless_done():
            held = self._target.weights_hash()
        differing = sorted(
            name
            for name in held.keys() | expected.keys()
            if held.get(name) is None or held.get(name) != expected.get(name)
        )
        if not differing:
            self.state = ReceiverState.VERIFIED
        return differing

    def commit(self) -> None:
        """Publish the new version: the engine drops what the old one computed and may serve.

        Raises:
            SyncError: not verified.
        """
        prepare = self._prepare
        must_verify = prepare is None or prepare.verify
        self._expect(ReceiverState.VERIFIED if must_verify else ReceiverState.STREAMED)
        assert self._target is not None, "prepare() needs an engine"
        assert prepare is not None, "checked by _expect"
        with self._poisoned_unless_done():
            self._target.commit()
            self.version = prepare.version
            self.state = ReceiverState.READY

    def close(self) -> None:
        """Leave the group; a load that was under way is given up, its engine serves nothing."""
        if self.state in (ReceiverState.STREAMED, ReceiverState.VERIFIED):
            self._poison()
        if self._transport is not None:
            self._transport.close()
        self._transport = None
        self._ops = None
        self._staging = []

    def _expect(self, *states: ReceiverState) -> Prepare:
        if self.state not in states or self._prepare is None:
            wanted = " or ".join(state.value for state in states)
            raise SyncError(
                f"{self._name} is {self.state.value}, not {wanted}; prepare() begins a sync"
            )
        return self._prepare

    @contextmanager
    def _poisoned_unless_done(self) -> Iterator[None]:
        is_done = False
        try:
            yield
            is_done = True
        finally:
            if not is_done:
                self._poison()

    def _poison(self) -> None:
        assert self._target is not None, "prepare() needs an engine"
        self.state, self.version = ReceiverState.POISONED, None
        if self._transport is not None:
            self._transport.close()  # whoever still sends learns at once
        self._target.abort_load()

    def _allocate(self, chunk_bytes: int) -> list[Tensor]:
        """Two buffers, each as large as the largest window."""
        assert self._ops is not None, "prepare() sets the ops"
        size = max(sum(map(_staged_bytes, window)) for window in windows(self._ops, chunk_bytes))
        return [torch.empty(size, dtype=torch.uint8) for _ in range(2)]

    def _arriving(
        self, transport: Transport, ops: Sequence[CopyOp], deadline: Deadline
    ) -> Iterator[_Window]:
        """Windows in order, each complete, while the next is under way into the other buffer."""
        num_received: dict[int, int] = defaultdict(int)
        under_way: _Window | None = None
        for i, batch in enumerate(windows(ops, transport.spec.chunk_bytes)):
            arriving = self._post(transport, batch, self._staging[i % 2], num_received)
            if under_way is not None:
                transport.wait(under_way.posted, deadline)
                yield under_way
            under_way = arriving
        if under_way is not None:
            transport.wait(under_way.posted, deadline)
            yield under_way

    def _post(
        self,
        transport: Transport,
        ops: Sequence[CopyOp],
        staging: Tensor,
        num_received: dict[int, int],
    ) -> _Window:
        transfers, tensors, offset = [], [], 0
        for op in ops:
            wire = staging[offset : offset + op.nbytes]
            transfers.append(Transfer(wire, op.sender, num_received[op.sender], op))
            tensors.append(wire.view(WIRE_DTYPES[op.dtype]).view(extents(op.bounds)))
            num_received[op.sender] += 1
            offset += _staged_bytes(op)
        return _Window(ops, tensors, transport.receive(transfers))

    def _check_finite(self, window: _Window) -> None:
        is_finite = torch.stack([torch.isfinite(tensor).all() for tensor in window.tensors])
        if not bool(is_finite.all()):
            bad = [op for op, good in zip(window.ops, is_finite.tolist(), strict=True) if not good]
            raise NonFiniteError(
                f"{self._name}: NaN or infinity in {bad[0]} from trainer rank {bad[0].sender} and "
                f"in {len(bad) - 1} other parts of this window; such weights are not served"
            )


def _staged_bytes(op: CopyOp) -> int:
    return -(-op.nbytes // ALIGNMENT) * ALIGNMENT
