"""What is told of a sync, while it runs and when it has ended."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["prepare", "pause", "stream", "verify", "commit", "probe", "resume"]
PHASES: tuple[Phase, ...] = ("prepare", "pause", "stream", "verify", "commit", "probe", "resume")


@dataclass(frozen=True, slots=True)
class SyncEvent:
    """A phase of a sync that a replica entered."""

    replica: int
    phase: Phase
    version: int


@dataclass(slots=True)
class SyncRecord:
    """What one sync did to one replica."""

    seconds: dict[Phase, float] = field(default_factory=dict)
    """Of each phase entered, all attempts together."""
    paused_s: float = 0.0
    num_bytes: int = 0
    """Sent, all attempts together."""
    mismatches: list[str] = field(default_factory=list)
    """Tensors that differed, all attempts together."""
    wire_hash: int | None = None
    """Of the model's wire bits; None unless verified."""
    is_delta: bool = False
    """Only what changed was sent."""
    delta_fault: str | None = None
    """Why all was sent where a delta was meant; None: no delta failed."""
    probe_error: float | None = None
    """See `Probe.error`; None unless probed."""


@dataclass(frozen=True, slots=True)
class SyncReport:
    """How a sync ended."""

    version: int
    ready: tuple[int, ...]
    """Replicas that hold `version` now, of those this sync was asked to bring there."""
    failed: dict[int, str]
    """Replica -> why it does not; it must be connected anew (or restarted) before the next sync."""
    seconds: float
    phase_seconds: dict[Phase, float]
    """Of the slowest replica in each phase."""
    paused_s: float
    """Longest pause of a replica that is ready."""
    num_bytes: int
    """Sent to all replicas, retries included."""
    num_tensors: int
    checksum_ok: bool | None
    """No replica was left with other bits than the trainer's; None: not verified."""
    checksum_mismatches: int
    """Tensors that differed in some attempt."""
    num_deltas: int
    """Replicas that were sent only what changed."""
    num_delta_faults: int
    """Replicas that were sent all because what changed could not be found out."""
    wire_hash: int | None
    """Additive hash of the model's wire bits, the same for all shardings that cut no tensor's
    columns more finely (`verify.py`); None: not verified."""
    probe_error: float | None = None
    """Largest of the replicas (`Probe.error`); None: not probed."""

    @staticmethod
    def of(
        version: int,
        records: Mapping[int, SyncRecord],
        failed: dict[int, str],
        seconds: float,
        num_tensors: int,
        *,
        is_verified: bool,
    ) -> SyncReport:
        """From what it did to each replica; those that are ready were sent the same."""
        ready = tuple(number for number in records if number not in failed)
        served = [records[number] for number in ready]
        return SyncReport(
            version=version,
            ready=ready,
            failed=failed,
            seconds=seconds,
            phase_seconds={
                phase: max(r.seconds.get(phase, 0.0) for r in records.values())
                for phase in PHASES
                if any(phase in r.seconds for r in records.values())
            },
            paused_s=max((record.paused_s for record in served), default=0.0),
            num_bytes=sum(record.num_bytes for record in records.values()),
            num_tensors=num_tensors,
            checksum_ok=not any(records[n].mismatches for n in failed) if is_verified else None,
            checksum_mismatches=sum(len(record.mismatches) for record in records.values()),
            num_deltas=sum(record.is_delta for record in served),
            num_delta_faults=sum(r.delta_fault is not None for r in records.values()),
            wire_hash=served[0].wire_hash if served else None,
            probe_error=max(
                (record.probe_error for record in served if record.probe_error is not None),
                default=None,
            ),
        )

    def metrics(self) -> dict[str, float | str]:
        """`refit/*` and `time/refit_transfer` of a training step."""
        stream_s = self.phase_seconds.get("stream", 0.0)
        values: dict[str, float | str] = {
            "refit/version": self.version,
            "refit/bytes": self.num_bytes,
            "refit/tensors": self.num_tensors,
            "refit/checksum_mismatches": self.checksum_mismatches,
            "refit/paused_s": self.paused_s,
            "refit/failed_replicas": len(self.failed),
            "refit/delta_replicas": self.num_deltas,
            "refit/delta_faults": self.num_delta_faults,
            "refit/seconds": self.seconds,
            "time/refit_transfer": stream_s,
        }
        if stream_s > 0:
            values["refit/gbytes_per_s"] = self.num_bytes / stream_s / 1e9
        for phase, seconds in self.phase_seconds.items():
            values[f"refit/{phase}_s"] = seconds
        if self.checksum_ok is not None:
            values["refit/checksum_ok"] = float(self.checksum_ok)
        if self.wire_hash is not None:
            values["refit/hash"] = f"{self.wire_hash:016x}"
        if self.probe_error is not None:
            values["refit/probe_error"] = self.probe_error
        return values


_OWN_FAULT = re.compile(
    r"trainer rank \d+: (?!TransportError|RefusedError|SyncError|TimeoutError)\w+: "
)
"""Of a rank, and not what it says of who does not take what it sends."""


def is_trainers_fault(failed: Mapping[int, str]) -> bool:
    """Whether trainer ranks failed on their own account in the sync of each replica.

    Args:
        failed: replica -> why, see `SyncReport.failed`.
    """
    return all(_OWN_FAULT.search(reason) for reason in failed.values())
