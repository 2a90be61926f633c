"""What the driver tells both ends before a sync, and what both check before a byte moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from m3rl.weight_sync.errors import PlanError, RefusedError
from m3rl.weight_sync.layout import Layout, layout_digest
from m3rl.weight_sync.plan import CopyOp, ops_digest


@dataclass(frozen=True, slots=True)
class Prepare:
    """The driver's announcement of a sync to one rank."""

    version: int
    """Policy version that the weights will be."""
    serial: int
    """Counts the driver's syncs: what was computed for another serial is stale."""
    layout_digest: str
    """Of the layout for which the driver planned this rank's share."""
    ops_digest: str
    """Of this rank's share of the plan."""
    ops: tuple[CopyOp, ...] | None
    """This rank's share, in order; None: the same as last time."""
    verify: bool
    """Whether hashes will be compared before the commit."""
    keeps: bool = False
    """Whether trainer ranks remember what they send: the next sync may be a delta."""
    base: int | None = None
    """Serial of the sync whose weights a worker must still hold; None: any, the sync is full."""


@dataclass(frozen=True, slots=True)
class Share:
    """The part of the plan that one member does, as the driver has it."""

    ops: tuple[CopyOp, ...]
    ops_digest: str
    layout_digest: str

    @staticmethod
    def of(ops: tuple[CopyOp, ...], layout: Layout) -> Share:
        return Share(ops, ops_digest(ops), layout_digest(layout))

    def announce(self, version: int, serial: int, *, is_known: bool, **options: Any) -> Prepare:
        """`is_known`: the member has been told its ops before; `options`: as Prepare has them."""
        ops = None if is_known else self.ops
        return Prepare(version, serial, self.layout_digest, self.ops_digest, ops, **options)


class Served(NamedTuple):
    """Of the version that a replica serves, by worker."""

    shares: tuple[Share, ...]
    """As which it came from the trainer."""
    sums: tuple[bytes, ...] | None
    """What the trainer's hashes of it are (`verify.TensorSums` over the share); None: the sync was
    not verified."""


class Agreed(NamedTuple):
    """What a rank and the driver have agreed on; it holds until one of them changes."""

    layout: Layout
    layout_digest: str
    ops: tuple[CopyOp, ...]
    ops_digest: str
    num_bytes: int


def agreed_ops(
    prepare: Prepare,
    layout: Layout,
    known: Agreed | None,
    owner: str,
    prove: Callable[[Layout, Sequence[CopyOp], str], None],
) -> Agreed:
    """The ops of a sync, once the rank has proven that they are the driver's and fit its tensors.

    Args:
        known: what was agreed for the last sync, None when there was none.
        prove: `check_sends` or `check_receives`.

    Raises:
        RefusedError: another layout, other ops, or ops that miss, repeat or distort a tensor.
    """
    is_known = known is not None and known.layout == layout
    mine = known.layout_digest if known is not None and is_known else layout_digest(layout)
    if mine != prepare.layout_digest:
        raise RefusedError(
            f"{owner} refuses version {prepare.version}: its tensors (layout {mine[:12]}) are not "
            f"those the driver planned for ({prepare.layout_digest[:12]}); connect again"
        )
    if prepare.ops is None and known is None:
        raise RefusedError(f"{owner} refuses version {prepare.version}: it was never told its ops")
    if prepare.ops is None:
        assert known is not None, "checked above"
        agreed = known
    else:
        num_bytes = sum(op.nbytes for op in prepare.ops)
        agreed = Agreed(layout, mine, prepare.ops, ops_digest(prepare.ops), num_bytes)
    if agreed.ops_digest != prepare.ops_digest:
        raise RefusedError(
            f"{owner} refuses version {prepare.version}: its {len(agreed.ops)} ops are not those "
            f"of the driver's plan (digest {prepare.ops_digest[:12]}); connect again"
        )
    if prepare.ops is not None:
        try:
            prove(layout, prepare.ops, owner)
        except PlanError as error:
            raise RefusedError(f"{owner} refuses version {prepare.version}: {error}") from error
    return agreed
