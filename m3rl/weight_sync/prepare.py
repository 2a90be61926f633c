"""What the driver tells both ends before a sync, and what both check before a byte moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


def agreed_ops(
    prepare: Prepare,
    layout: Layout,
    known: tuple[CopyOp, ...] | None,
    owner: str,
    prove: Callable[[Layout, Sequence[CopyOp], str], None],
) -> tuple[CopyOp, ...]:
    """The ops of a sync, once the rank has proven that they are the driver's and fit its tensors.

    Args:
        known: the ops of the last sync, None when there was none.
        prove: `check_sends` or `check_receives`.

    Raises:
        RefusedError: another layout, other ops, or ops that miss, repeat or distort a tensor.
    """
    mine = layout_digest(layout)
    if mine != prepare.layout_digest:
        raise RefusedError(
            f"{owner} refuses version {prepare.version}: its tensors (layout {mine[:12]}) are not "
            f"those the driver planned for ({prepare.layout_digest[:12]}); connect again"
        )
    ops = known if prepare.ops is None else prepare.ops
    if ops is None:
        raise RefusedError(f"{owner} refuses version {prepare.version}: it was never told its ops")
    if ops_digest(ops) != prepare.ops_digest:
        raise RefusedError(
            f"{owner} refuses version {prepare.version}: its {len(ops)} ops are not those of the "
            f"driver's plan (digest {prepare.ops_digest[:12]}); connect again"
        )
    if prepare.ops is not None:
        try:
            prove(layout, ops, owner)
        except PlanError as error:
            raise RefusedError(f"{owner} refuses version {prepare.version}: {error}") from error
    return ops
