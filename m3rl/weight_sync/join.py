"""The driver's way of bringing a late replica to a version that another one serves.

    connect ─▶ take from a READY(version) peer that holds the same ─▶ pause, commit, probe, resume
                 └─ there is none, or it fails: connect again, and a sync from the trainer

Worker i of the peer gives to worker i of the newcomer (`hand_over.py`); the peer serves on. What
has come must have the hashes that the trainer had of that version when the peer was brought there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from m3rl.weight_sync.driver import ReplicaState
from m3rl.weight_sync.errors import VerificationError
from m3rl.weight_sync.hand_over import HandOver, PairSpec
from m3rl.weight_sync.prepare import Served, Share
from m3rl.weight_sync.replica import Replica
from m3rl.weight_sync.report import SyncRecord
from m3rl.weight_sync.transport import GroupSpec
from m3rl.weight_sync.verify import differing_tensors

logger = logging.getLogger(__name__)


class PeerError(VerificationError):
    """The giver itself does not hold any more what was verified when it was brought there."""


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
                and other.gives
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
            PeerError: POISONED, and the peer is no better.
            SyncError: POISONED; `disconnect` comes next.
        """
        self.record = SyncRecord()
        self.state, self.version = ReplicaState.SYNCING, None
        is_done = False
        try:
            assert peer.served is not None, "it is READY"
            pairs = self._pairs(peer.served.shares, peer, version, group, chunk_bytes)
            with self._phase("prepare", version):
                self._gather("prepare", peer._call_each("offer", pairs))
            with self._phase("stream", version):
                served = self._hand_over(peer, peer.served, pairs)
            paused_at = time.monotonic()
            with self._phase("pause", version):
                self._bounded("pause", self._driver.pause)
            with self._phase("commit", version):
                self._commit(served.sums)
            self._begin_to_serve(version, peer.served)
            self.record.paused_s = time.monotonic() - paused_at
            is_done = True
        finally:
            if not is_done:
                self.lose()

    def _pairs(
        self,
        shares: Sequence[Share],
        peer: JoiningReplica,
        version: int,
        group: GroupSpec,
        chunk_bytes: int,
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
                share.ops,
                chunk_bytes,
            )
            for worker, (digest, share) in enumerate(zip(self.layouts, shares, strict=True))
        ]

    def _call_each(self, method: str, pairs: Sequence[HandOver]) -> dict[str, Future[Any]]:
        workers = self._workers().items()
        return {
            name: worker.call(method, pair)
            for pair, (name, worker) in zip(pairs, workers, strict=True)
        }

    def _hand_over(self, peer: JoiningReplica, served: Served, pairs: Sequence[HandOver]) -> Served:
        """Have each worker of the peer give to its counterpart; with the sums of what both hold.

        Those of the trainer, or where there are none those of the peer.
        """
        moving = peer._call_each("give", pairs) | self._call_each("take", pairs)
        found = self._gather("stream", moving)
        given, taken = tuple(found[: len(pairs)]), found[len(pairs) :]
        if served.sums is None:
            logger.warning(
                "version %d was synced without verification: what replica %d takes is compared "
                "with replica %d alone",
                pairs[0].version,
                self.number,
                peer.number,
            )
            served = served._replace(sums=given)
        assert served.sums is not None, "set where there was none"
        _compare(peer._workers(), given, served.sums, pairs, PeerError)
        _compare(self._workers(), taken, served.sums, pairs, VerificationError)
        return served


def _compare(
    names: Iterable[str],
    held: Sequence[bytes],
    expected: Sequence[bytes],
    pairs: Sequence[HandOver],
    kind: type[VerificationError],
) -> None:
    for name, here, there, pair in zip(names, held, expected, pairs, strict=True):
        tensors = sorted({op.name for op in pair.ops})
        if differing := differing_tensors(tensors, here, there):
            raise kind(
                f"{name} holds other bits than version {pair.version} has in {len(differing)} "
                f"tensors: {', '.join(differing[:3])}"
            )
