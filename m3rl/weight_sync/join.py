"""The driver's way of bringing a late replica to a version that another one serves.

    connect ─▶ take from a READY(version) peer that holds the same ─▶ pause, commit, probe, resume
                 └─ there is none, or it fails: connect again, and a sync from the trainer

Worker i of the peer gives to worker i of the newcomer (`hand_over.py`); the peer serves on.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from m3rl.weight_sync.errors import VerificationError
from m3rl.weight_sync.hand_over import HandOver, PairSpec
from m3rl.weight_sync.replica import Replica, ReplicaState
from m3rl.weight_sync.report import SyncRecord
from m3rl.weight_sync.transport import GroupSpec


class JoiningReplica(Replica):
    """A replica that can also take its weights from another."""

    layouts: tuple[str, ...] = ()
    """Digest of what each worker holds; known once it is attached."""

    def peer_of(self, others: Iterable[JoiningReplica], version: int) -> JoiningReplica | None:
        """One of the others that serves the version and holds the same; None: there is none."""
        return next(
            (
                other
                for other in others
                if other is not self
                and (other.state, other.version) == (ReplicaState.READY, version)
                and other.layouts == self.layouts
            ),
            None,
        )

    def take_from(
        self, peer: JoiningReplica, version: int, group: GroupSpec, chunk_bytes: int
    ) -> None:
        """Bring this replica, which is connected, to READY(version).

        Args:
            group: where pairs of workers meet, under keys of their own.
            chunk_bytes: most that a worker receives at a time.

        Raises:
            SyncError: POISONED; `disconnect` comes next.
        """
        self.record = SyncRecord()
        self.state, self.version = ReplicaState.SYNCING, None
        is_done = False
        try:
            pairs = self._pairs(peer, version, group, chunk_bytes)
            with self._phase("prepare", version):
                self._gather("prepare", peer._call_each("offer", pairs))
            with self._phase("stream", version):
                hashes = self._hand_over(peer, pairs)
            paused_at = time.monotonic()
            with self._phase("pause", version):
                self._bounded("pause", self._driver.pause)
            with self._phase("commit", version):
                self._commit(hashes)
            self._begin_to_serve(version)
            self.record.paused_s = time.monotonic() - paused_at
            is_done = True
        finally:
            if not is_done:
                self.state = ReplicaState.POISONED

    def _pairs(
        self, peer: JoiningReplica, version: int, group: GroupSpec, chunk_bytes: int
    ) -> list[HandOver]:
        return [
            HandOver(
                PairSpec(
                    replica=self.number,
                    num_senders=1,
                    num_workers=1,
                    host=group.host,
                    port=group.port,
                    key=f"{group.key}/{worker}",
                    timeout_s=group.timeout_s,
                    backend=group.backend,
                    peer=peer.number,
                    worker=worker,
                ),
                version,
                digest,
                chunk_bytes,
            )
            for worker, digest in enumerate(self.layouts)
        ]

    def _call_each(self, method: str, pairs: Sequence[HandOver]) -> dict[str, Future[Any]]:
        workers = self._workers().items()
        return {
            name: worker.call(method, pair)
            for pair, (name, worker) in zip(pairs, workers, strict=True)
        }

    def _hand_over(
        self, peer: JoiningReplica, pairs: Sequence[HandOver]
    ) -> Sequence[dict[str, int]]:
        """Hashes of what each worker of the peer serves, which its counterpart now holds too."""
        moving = peer._call_each("give", pairs) | self._call_each("take", pairs)
        found = self._gather("stream", moving)
        given, taken = found[: len(pairs)], found[len(pairs) :]
        for pair, (name, mine), theirs in zip(
            pairs, zip(self._workers(), taken, strict=True), given, strict=True
        ):
            differing = sorted(piece for piece in theirs if mine.get(piece) != theirs[piece])
            if differing:
                raise VerificationError(
                    f"{name} holds other bits than {pair.spec.member(0)} in {len(differing)} "
                    f"tensors: {', '.join(differing[:3])}"
                )
        return given
