"""The replica worker's end of a sync.

    EMPTY ─ prepare ─▶ PREPARED ─ stream ─▶ STREAMED ─ commit ─▶ READY(version)
                        ▲    ▲               │    ▲                  │
                        │    │               └────┘ stream again: the one full retry
                        │    └──────────────────── prepare ──────────┘
                        └─ prepare ── POISONED ◀── any fault from the first byte on

The load of the engine under a POISONED receiver is given up: weights that it touched serve nothing
until a whole load commits. With a shadow nothing that serves is touched before `commit`: after an
earlier fault, and after a commit that the engine refused, the receiver is what it was, EMPTY or
READY(old). `stream` says what lies there then, and `commit` refuses what is not what the trainer
has. Without verification nothing is known of the bits, NaN included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from m3rl.host import this_host
from m3rl.types import LoadPlan, SharedPlaces, TensorSlot, WeightTarget
from m3rl.weight_sync.delta import Delta
from m3rl.weight_sync.delta_receive import DeltaRounds
from m3rl.weight_sync.errors import NonFiniteError, RefusedError, SyncError, VerificationError
from m3rl.weight_sync.layout import as_slots, check_layout
from m3rl.weight_sync.messages import Arranged, Passes
from m3rl.weight_sync.plan import CopyOp, check_receives
from m3rl.weight_sync.prepare import Agreed, Prepare, agreed_ops
from m3rl.weight_sync.receive_rounds import ReceiveRounds, device_of, places_of
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
    READY = "READY"
    POISONED = "POISONED"


class Received(NamedTuple):
    """How a stream ended."""

    num_bytes: int
    hashes: bytes | None
    """Of the part of each tensor that the worker holds, as it lies there, see `TensorSums`; None
    unless the sync is verified."""


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
        self._described: list[Any] = []
        self._layout: tuple[TensorSlot, ...] = ()
        self._transport: Transport | None = None
        self._agreed: Agreed | None = None
        self._prepare: Prepare | None = None
        self._load_plan: LoadPlan | None = None
        self._rounds: ReceiveRounds | None = None
        self._held: Any = None
        """Hashes of what lies there, in the form in which `commit` is told the trainer's."""
        self._deltas: DeltaRounds | None = None
        self._base: int | None = None
        """Serial of the sync whose weights lie where a load would write; None: not known."""
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
        check_layout(self._read_layout(), self._name)

    def layout(self) -> tuple[TensorSlot, ...]:
        """What the engine holds."""
        return self._layout

    def node(self) -> str:
        """Names the machine: workers on one are near to each other."""
        return this_host()

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

    def prepare(self, prepare: Prepare) -> np.ndarray | None:
        """Check the ops of a sync; no weight is touched.

        Returns:
            Of ops not known before where they can be received, see `messages.arrange`, which is
            what `arrange` is called with before they can be streamed.

        Raises:
            RefusedError: the engine's tensors or the ops are not what the driver planned, or do not
                fit; the weights are not those of the delta's base; or the device still works on a
                sync that was given up.
        """
        if self._transport is None or self._target is None:
            raise RefusedError(f"{self._name} is not connected; connect to it first")
        if self._is_stuck:
            raise RefusedError(
                f"{self._name}: its device still works on a sync that was given up; restart it"
            )
        if prepare.base is not None and isinstance(self._load_plan, SharedPlaces):
            raise RefusedError(
                f"{self._name} loads weights as they come and keeps none that a delta could change"
            )
        if prepare.base is not None and prepare.base != self._base:
            raise RefusedError(
                f"{self._name} holds the weights of sync {self._base}, and the delta is one to "
                f"those of sync {prepare.base}; it needs a full sync"
            )
        agreed = agreed_ops(prepare, self._read_layout(), self._agreed, self._name, check_receives)
        spots = None
        if prepare.ops is not None:
            self._agreed = self._rounds = self._deltas = None
            self._load_plan = self._target.plan_load([(op.name, op.bounds) for op in agreed.ops])
            spots = places_of(self._load_plan.places, self._transport.device)
        self._agreed = agreed
        if self.state is ReceiverState.STREAMED:
            self._target.abort_load()
        self._prepare = prepare
        self.state = ReceiverState.PREPARED
        return spots

    def arrange(self, arranged: Arranged, passes: Passes) -> None:
        """After the first `prepare` of some ops: make room for them as both ends will move them.

        Raises:
            RefusedError: places share memory, and something would come over what is not read.
        """
        self._expect(ReceiverState.PREPARED)
        assert self._transport is not None, "prepare() needs a connection"
        assert self._agreed is not None, "prepare() sets the ops"
        assert self._load_plan is not None, "prepare() plans the load"
        if isinstance(self._load_plan, SharedPlaces):
            try:
                self._load_plan.check_rounds([list(chain(*messages)) for messages in arranged])
            except ValueError as error:
                raise RefusedError(f"{self._name}: {error}") from error
        shapes = {slot.name: slot.shape for slot in self._layout}
        self._rounds = ReceiveRounds(
            self._agreed.ops,
            self._load_plan.places,
            shapes,
            self._transport.device,
            arranged,
            passes,
            self._transport.spec.worker_rank,
        )

    def stream(self, delta: Delta | None = None) -> Received:
        """Receive all ops into their places in the engine.

        Args:
            delta: receive only what changed since `Prepare.base`, over what lies there.

        Raises:
            TransportError: a trainer rank is late or gone.
            NonFiniteError: NaN or infinity arrived (known if the sync is verified).
        """
        prepare = self._expect(ReceiverState.PREPARED, ReceiverState.STREAMED)
        assert self._transport is not None, "prepare() needs a connection"
        assert self._target is not None, "prepare() needs an engine"
        assert self._agreed is not None, "prepare() sets the ops"
        assert self._rounds is not None, "arrange() follows prepare()"
        transport, rounds = self._transport, self._rounds
        with self._given_up_unless_done():
            if delta is not None and (delta.base != self._base or delta.base != prepare.base):
                raise SyncError(f"{self._name} holds sync {self._base}, not {delta.base}")
            self._base = None
            if self.state is ReceiverState.STREAMED:
                self._target.abort_load()
            self._target.begin_load(prepare.version, self._load_plan)
            self._receive(transport, rounds, delta, verify=prepare.verify)
            if prepare.verify:
                self._check_finite(rounds.non_finite())
            self._held = rounds.hashes() if prepare.verify else None
            self.state = ReceiverState.STREAMED
        num_bytes = self._agreed.num_bytes if delta is None else delta.nbytes
        return Received(num_bytes, self._held)

    def clock(self) -> dict[str, float]:
        """Of the last stream: seconds until its first and last round were posted and until all was
        in its place, and how many rounds and messages it had."""
        assert self._rounds is not None, "prepare() lays out the rounds"
        counts = {"rounds": self._rounds.num_rounds, "messages": self._rounds.num_messages}
        return self._rounds.clock.seconds | counts

    def commit(self, expected: Any) -> None:
        """Publish the new version: the engine drops what the old one computed and may serve.

        Args:
            expected: what the trainer's hashes say that `stream` should have found; None only if
                the sync is not verified.

        Raises:
            VerificationError: other bits are held.
        """
        prepare = self._expect(ReceiverState.STREAMED)
        assert self._target is not None, "prepare() needs an engine"
        target, before = self._target, self._target.version if self.has_shadow() else None

        def is_touched() -> bool:
            # Of two versions with one number nobody could tell which serves.
            return before in (None, prepare.version) or target.version != before

        with self._given_up_unless_done():
            if expected != self._held or prepare.verify != (expected is not None):
                raise VerificationError(
                    f"{self._name} does not hold what the trainer has; nothing is published"
                )
        with self._given_up_unless_done(is_touched):
            target.commit()
            self.version = prepare.version
            self._base = prepare.serial if prepare.keeps else None
            self.state = ReceiverState.READY

    def close(self) -> None:
        """Leave the group; a load that was under way is given up."""
        if self.state is ReceiverState.STREAMED:
            self._give_up(is_touched=not self.has_shadow())
        if self._transport is not None:
            self._transport.close()
        self._transport = self._agreed = None
        if not self._is_stuck:  # else the device may still write there
            self._rounds = self._deltas = self._load_plan = None

    def _read_layout(self) -> tuple[TensorSlot, ...]:
        """Anew: an engine that rearranged its tensors must not be written by an old list."""
        assert self._target is not None, "bind() comes first"
        described = list(self._target.weight_layout())
        if described != self._described:
            self._described, self._layout = described, as_slots(described)
        return self._layout

    def _expect(self, *states: ReceiverState) -> Prepare:
        if self.state not in states or self._prepare is None:
            wanted = " or ".join(state.value for state in states)
            raise SyncError(
                f"{self._name} is {self.state.value}, not {wanted}; prepare() begins a sync"
            )
        return self._prepare

    @contextmanager
    def _given_up_unless_done(self, is_touched: Callable[[], bool] | None = None) -> Iterator[None]:
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
                    is_touched=not self.has_shadow() if is_touched is None else is_touched()
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

    def _receive(
        self, transport: Transport, rounds: ReceiveRounds, delta: Delta | None, *, verify: bool
    ) -> None:
        assert self._target is not None, "prepare() needs an engine"
        deadline = Deadline(transport.spec.timeout_s)
        is_done = False
        try:
            if delta is None:
                is_read = isinstance(self._load_plan, SharedPlaces)
                written = self._target.written
                rounds.run(transport, deadline, written, verify=verify, is_read=is_read)
            else:
                self._receive_delta(transport, rounds, delta, deadline)
            transport.note("done")
            is_done = True
        finally:
            if not is_done:
                # What the device was told to do goes on until NCCL is aborted.
                transport.close()
                self._is_stuck = not rounds.drain(DRAIN_S)

    def _receive_delta(
        self, transport: Transport, rounds: ReceiveRounds, delta: Delta, deadline: Deadline
    ) -> None:
        assert self._target is not None, "prepare() needs an engine"
        assert self._agreed is not None, "prepare() sets the ops"
        assert self._load_plan is not None, "prepare() plans the load"
        ops, places = self._agreed.ops, self._load_plan.places
        self._deltas = self._deltas or DeltaRounds(ops, places, rounds.lane)
        self._deltas.run(delta, transport, deadline)
        self._target.written(0, len(ops))
        rounds.find(transport, deadline)

    def _check_finite(self, bad: list[CopyOp]) -> None:
        if bad:
            raise NonFiniteError(
                f"{self._name}: NaN or infinity in {bad[0]} from trainer rank {bad[0].sender} and "
                f"in {len(bad) - 1} other parts; such weights are not served"
            )
