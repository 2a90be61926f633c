"""How far the choice of blocks has moved since a run began, although nothing trains the index
branch: hidden states drift, and the choice with them.

Suffixes: `R` samples · `S` their tokens · `P` tokens that are compared · `L` sparse layers ·
`Q` query tokens of a packed row · `K` KV heads · `B` blocks per token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from m3rl.checkpoint import CheckpointError
from m3rl.grpo.micro import MicroBatch
from m3rl.grpo.replay import RecordedChoices
from m3rl.parallel.save import raise_together
from m3rl.policy import Policy
from m3rl.rank_group import RankGroup
from m3rl.types import TrainBatch

logger = logging.getLogger(__name__)

FILE = "block_drift.npz"
NUM_SAMPLES = 4
"""The longest of a run's first batch."""
NUM_TOKENS = 64
"""Of each sample, evenly spread over those that see more blocks than they may choose."""

MicroBatches = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], Iterator[MicroBatch]]
"""(rows, ids_BS, length_B, mask_BS) -> this rank's micro-batches of them."""


@dataclass(frozen=True, slots=True)
class _Start:
    """What was chosen before the first step."""

    ids_RS: np.ndarray
    length_R: np.ndarray
    row_P: np.ndarray
    place_P: np.ndarray
    """Place of each token in its sample."""
    blocks_PLKB: np.ndarray
    """int32; each of these tokens chooses as many as it may."""


class BlockDrift:
    """Measures it on a few samples of the first batch, which it keeps; all ranks do it together.

    Experts and blocks are the policy's own choice then, whatever it replays in training.

    Args:
        every: optimizer steps between measurements.
    """

    def __init__(
        self, every: int, policy: Policy, group: RankGroup, micro_batches: MicroBatches
    ) -> None:
        self._every = every
        self._policy = policy
        self._group = group
        self._micro_batches = micro_batches
        self._start: _Start | None = None

    def begin(self, batch: TrainBatch) -> None:
        """Note what the weights choose in samples of `batch`, unless that is noted already."""
        if self._start is not None:
            return
        config = self._policy.config
        rows = np.argsort(-batch.length_B, kind="stable")[:NUM_SAMPLES]
        length_R = batch.length_B[rows]
        first = config.index_topk_blocks * config.index_block_size
        places = [
            np.unique(np.linspace(first, length - 1, NUM_TOKENS).astype(np.int64))
            if length > first
            else np.empty(0, np.int64)
            for length in length_R
        ]
        row_P = np.repeat(np.arange(len(rows)), [len(of_row) for of_row in places])
        if not len(row_P):
            logger.warning(
                "m3/block_drift is not measured: no sample of the first batch is longer than the "
                "%d tokens that a token may choose to see",
                first,
            )
        samples = batch.ids_BS[rows, : length_R.max()], length_R, row_P, np.concatenate(places)
        self._start = _Start(*samples, self._chosen(*samples))

    def metrics(self, before: int, now: int) -> dict[str, float]:
        """`m3/block_drift`, the share of the blocks chosen at first that are not chosen any more,
        if a multiple of `every` steps was reached.

        Local blocks count, and never drift. Empty too where no sample has a choice.

        Args:
            before, now: optimizer steps taken, before this update and after it.
        """
        start = self._start
        if start is None or before // self._every == now // self._every or not len(start.row_P):
            return {}
        now_PLKB = self._chosen(start.ids_RS, start.length_R, start.row_P, start.place_P)
        stays_PLKB = (start.blocks_PLKB[..., :, None] == now_PLKB[..., None, :]).any(-1)
        return {"m3/block_drift": float(1 - stays_PLKB.mean())}

    def save(self, path: Path) -> None:
        """Write what is noted into a checkpoint; rank 0 does, and all ranks call it.

        Raises:
            CheckpointError: on all ranks, if it cannot be written.
        """
        fault = None
        if self._start is not None and self._group.rank == 0:
            start = self._start
            arrays = {name: getattr(start, name) for name in _Start.__slots__}
            try:
                np.savez(path / FILE, **arrays)
            except OSError as error:
                fault = f"cannot write {path / FILE}: {error}"
        raise_together(self._group.mesh, fault)

    def load(self, path: Path, step: int) -> None:
        """Go on with what `save` wrote, if a batch had been seen by then.

        Raises:
            CheckpointError: steps were taken, and nothing was noted before them.
        """
        self._start = None
        if (path / FILE).exists():
            with np.load(path / FILE, allow_pickle=False) as arrays:
                self._start = _Start(**{name: arrays[name] for name in _Start.__slots__})
        elif step > 0:
            raise CheckpointError(
                f"{path} does not hold the blocks chosen before its {step} steps; resume it with "
                "policy.index_drift_every=0"
            )

    @torch.no_grad()
    def _chosen(
        self, ids_RS: np.ndarray, length_R: np.ndarray, row_P: np.ndarray, place_P: np.ndarray
    ) -> np.ndarray:
        """[P, L, K, B] int32: the blocks that the policy chooses now."""
        config = self._policy.config
        shape = (len(config.sparse_layers), config.num_key_value_heads, config.index_topk_blocks)
        chosen_PLKB = np.zeros((len(row_P), *shape), np.int32)
        if not len(row_P):
            return chosen_PLKB
        last_RS = np.arange(ids_RS.shape[1]) == length_R[:, None] - 1
        rows = np.arange(len(ids_RS))
        for micro in self._micro_batches(rows, ids_RS, length_R, last_RS):
            starts = np.zeros(len(rows), np.int64)
            starts[micro.rows] = np.cumsum(length_R[micro.rows]) - length_R[micro.rows]
            query_P = starts[row_P] + place_P - micro.packing.first
            is_mine_P = np.isin(row_P, micro.rows)
            is_mine_P &= (query_P >= 0) & (query_P < micro.packing.num_queries)
            log = _BlockLog(torch.from_numpy(query_P[is_mine_P]).to(micro.ids_T.device))
            self._policy(micro.ids_T, micro.packing, micro.targets_M, temperature=1.0, stats=log)
            chosen_PLKB[is_mine_P] = torch.stack(log.blocks, 1).cpu().numpy()
        return self._group.sum_array(chosen_PLKB)


@dataclass(slots=True)
class _BlockLog:
    """Keeps the blocks that some queries choose in a forward pass."""

    query_P: Tensor
    blocks: list[Tensor] = field(default_factory=list)
    """Of each sparse layer, [P, K, B]."""

    def add_experts(
        self, layer: int, own_TA: Tensor, used_TA: Tensor, record: RecordedChoices | None
    ) -> None:
        pass

    def add_blocks(self, layer: int, own_TKB: Tensor, record: RecordedChoices | None) -> None:
        assert layer == len(self.blocks), "layers come in order, each once"
        self.blocks.append(own_TKB[self.query_P])
