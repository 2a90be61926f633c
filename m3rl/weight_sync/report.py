"""What is told of a sync, while it runs and when it has ended."""

from __future__ import annotations

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
    wire_hash: int | None
    """Additive hash of the model's wire bits, the same for all shardings that cut no tensor's
    columns more finely (`verify.py`); None: not verified."""
    probe_error: float | None = None
    """Largest of the replicas (`Probe.error`); None: not probed."""

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
