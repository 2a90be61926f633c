"""The replica worker's end of a sync.

    EMPTY ─ prepare ─▶ PREPARED ─ stream ─▶ STREAMED ─ verify ─▶ VERIFIED ─ commit ─▶ READY(version)
                        ▲    ▲               │    ▲                                       │
                        │    │               └────┘ stream again: the one full retry      │
                        │    └──────────────────── prepare ───────────────────────────────┘
                        └─ prepare ── POISONED ◀── any fault from the first byte on

The load of the engine under a POISONED receiver is given up: weights that it touched serve nothing
until a whole load commits. With a shadow nothing that serves is touched before `commit`: after an
earlier fault the receiver is what it was, EMPTY or READY(old). Without verification `commit`
follows STREAMED, and nothing is known of the bits, NaN included.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from m3rl.types import LoadPlan, TensorSlot, WeightTarget
from m3rl.weight_sync.errors import NonFiniteError, RefusedError, SyncError
from m3rl.weight_sync.layout import as_slots, check_layout
from m3rl.weight_sync.plan import CopyOp, check_receives
from m3rl.weight_sync.prepare import Prepare, agreed_ops
from m3rl.weight_sync.receive_rounds import ReceiveRounds, device_of
from m3rl.weight_sync.transport import Deadline, GroupSpec, Transport, worker_name

TARGET_METHODS = (
    "has_shadow",
    "weight_layout",
    "plan_load",
    "begin_load",
    "written",
    "commit",
    "abort_load",
)
DRAIN_S = 10.0
"""How long a device may go on with a sync that was given up."""


class ReceiverState(Enum):
    EMPTY = "EMPTY"
    PREPARED = "PREPARED"
    STREAMED = "STREAMED"
    VERIFIED = "VERIFIED"
    READY = "READY"
    POISONED = "POISONED"


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
        self._target: WeightTarget | None = None
        self._layout: tuple[TensorSlot, ...] = ()
        self._transport: Transport | None = None
        self._ops: tuple[CopyOp, ...] | None = None
        self._prepare: Prepare | None = None
        self._load_plan: LoadPlan | None = None
        self._rounds: ReceiveRounds | None = None
        self._is_stuck = False
        """The device goes on with a sync that was given up; what it writes nobody knows."""

    def bind(self, target: WeightTarget) -> None:
        """Take charge of an engine's weights.

        Raises:
            TypeError: it lacks something that a sync uses.
        """
        missing = [name for name in TARGET_METHODS if not hasattr(target, name)]
        if missing:
            raise TypeError(f"{type(target).__name__} cannot be synced: it has no {missing}")
        self._target = target
        self._layout = as_slots(target.weight_layout())
        check_layout(self._layout, self._name)

    def layout(self) -> tuple[TensorSlot, ...]:
        """What the engine holds."""
        return self._layout

    def has_shadow(self) -> bool:
        """Whether the engine serves on until `commit`."""
        assert self._target is not None, "bind() comes first"
        return self._target.has_shadow

    def connect(self, spec: GroupSpec) -> None:
        """Join the group, leaving the one joined before.

        Raises:
            TransportError: a member did not come in time.
        """
        self.close()
        assert self._target is not None, "bind() comes first"
        everything = [(slot.name, slot.bounds) for slot in self._layout]
        device = device_of(self._target.plan_load(everything).places[0])
        self._transport = Transport.join(spec, spec.worker_rank(self._worker), device)

    def prepare(self, prepare: Prepare) -> None:
        """Check the ops of a sync and lay out how they arrive; no weight is touched.

        Raises:
            RefusedError: the engine's tensors or the ops are not what the driver planned, or do not
                fit; or the device still works on a sync that was given up.
        """
        if self._transport is None or self._target is None:
            raise RefusedError(f"{self._name} is not connected; connect to it first")
        if self._is_stuck:
            raise RefusedError(
                f"{self._name}: its device still works on a sync that was given up; restart it"
            )
        # Read anew: an engine that rearranged its tensors must not be written by an old list.
        layout = as_slots(self._target.weight_layout())
        self._ops = agreed_ops(prepare, layout, self._ops, self._name, check_receives)
        if prepare.ops is not None or self._rounds is None:
            self._load_plan = self._target.plan_load([(op.name, op.bounds) for op in self._ops])
            shapes = {slot.name: slot.shape for slot in layout}
            self._rounds = ReceiveRounds(
                self._ops, self._load_plan.places, shapes, self._transport.device
            )
        if self.state in (ReceiverState.STREAMED, ReceiverState.VERIFIED):
            self._target.abort_load()
        self._prepare = prepare
        self.state = ReceiverState.PREPARED

    def stream(self) -> int:
        """Receive all ops into their places in the engine; returns the bytes received.

        Raises:
            TransportError: a trainer rank is late or gone.
            NonFiniteError: NaN or infinity arrived (known if the sync is verified).
        """
        prepare = self._expect(ReceiverState.PREPARED, ReceiverState.STREAMED)
        assert self._transport is not None, "prepare() needs a connection"
        assert self._target is not None, "prepare() needs an engine"
        assert self._ops is not None, "prepare() sets the ops"
        assert self._rounds is not None, "prepare() lays out the rounds"
        transport, rounds = self._transport, self._rounds
        with self._given_up_unless_done():
            if self.state is ReceiverState.STREAMED:
                self._target.abort_load()
            self._target.begin_load(prepare.version, self._load_plan)
            self._receive(transport, rounds, verify=prepare.verify)
            if prepare.verify:
                self._check_finite(rounds.non_finite())
            self.state = ReceiverState.STREAMED
        return sum(op.nbytes for op in self._ops)

    def verify(self, expected: dict[str, int]) -> list[str]:
        """Names of the tensors whose bits differ from the trainer's, or that one side lacks.

        Args:
            expected: hash of the part of each tensor that this worker holds (see `verify.py`).
        """
        self._expect(ReceiverState.STREAMED)
        assert self._rounds is not None, "prepare() lays out the rounds"
        with self._given_up_unless_done():
            held = self._rounds.hashes()
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
        with self._given_up_unless_done(is_touched=True):
            self._target.commit()
            self.version = prepare.version
            self.state = ReceiverState.READY

    def close(self) -> None:
        """Leave the group; a load that was under way is given up."""
        if self.state in (ReceiverState.STREAMED, ReceiverState.VERIFIED):
            self._give_up(is_touched=not self.has_shadow())
        if self._transport is not None:
            self._transport.close()
        self._transport = None
        self._ops = None
        self._rounds = self._load_plan = None

    def _expect(self, *states: ReceiverState) -> Prepare:
        if self.state not in states or self._prepare is None:
            wanted = " or ".join(state.value for state in states)
            raise SyncError(
                f"{self._name} is {self.state.value}, not {wanted}; prepare() begins a sync"
            )
        return self._prepare

    @contextmanager
    def _given_up_unless_done(self, *, is_touched: bool | None = None) -> Iterator[None]:
        """
        Args:
            is_touched: whether what serves may have changed; None: not if there is a shadow.
        """
        is_done = False
        try:
            yield
            is_done = True
        finally:
            if not is_done:
                self._give_up(
                    is_touched=not self.has_shadow() if is_touched is None else is_touched
                )

    def _give_up(self, *, is_touched: bool) -> None:
        assert self._target is not None, "prepare() needs an engine"
        if is_touched:
            self.version = None
            self.state = ReceiverState.POISONED
        else:
            self.state = ReceiverState.EMPTY if self.version is None else ReceiverState.READY
        if self._transport is not None:
            self._transport.close()  # whoever still sends learns at once
        self._target.abort_load()

    def _receive(self, transport: Transport, rounds: ReceiveRounds, *, verify: bool) -> None:
        assert self._target is not None, "prepare() needs an engine"
        deadline = Deadline(transport.spec.timeout_s)
        is_done = False
        try:
            transport.note("begins")
            rounds.run(transport, deadline, self._target.written, verify=verify)
            transport.note("done")
            is_done = True
        finally:
            if not is_done:
                # What the device was told to do goes on until NCCL is aborted.
                transport.close()
                self._is_stuck = not rounds.drain(DRAIN_S)

    def _check_finite(self, bad: list[CopyOp]) -> None:
        if bad:
            raise NonFiniteError(
                f"{self._name}: NaN or infinity in {bad[0]} from trainer rank {bad[0].sender} and "
                f"in {len(bad) - 1} other parts; such weights are not served"
            )
