"""Replay: experts and key blocks that the rollout engine used, laid out for packed tokens.

A completion record holds choices for every token that had a forward pass: all but the last sampled
one. Which experts are chosen then comes from the record, how much each counts from the trainer's
own scores, so gradients still reach the router (R3, arXiv:2510.11370).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from inference.kernels.dispatch import send

if TYPE_CHECKING:
    from inference.config import ModelConfig
    from m3rl.grpo.micro import MicroBatch
    from m3rl.types import TrainBatch


@dataclass(frozen=True, slots=True)
class RecordedChoices:
    """One kind of choice for the packed tokens of a micro-batch."""

    ids_LTX: Tensor
    """int32: experts [MoE layers, T, A], or blocks [sparse layers, T, K, topk] with -1 at the end;
    0 where nothing was recorded."""
    is_recorded_T: Tensor
    """[T] bool: False for the last token of a row and for rows without a record."""

    def of(self, tokens: slice) -> RecordedChoices:
        """Those of a range of the packed tokens."""
        return RecordedChoices(self.ids_LTX[:, tokens], self.is_recorded_T[tokens])

    def instead_of(self, layer: int, own_TX: Tensor) -> Tensor:
        """The recorded choice of `layer`, counted within its kind, and `own_TX` where none is."""
        is_recorded = self.is_recorded_T.view(-1, *[1] * (own_TX.ndim - 1))
        return torch.where(is_recorded, self.ids_LTX[layer], own_TX)


@dataclass(frozen=True, slots=True)
class Record:
    """What the engine recorded of a micro-batch; None: that kind was not captured."""

    experts: RecordedChoices | None = None
    blocks: RecordedChoices | None = None

    def of(self, tokens: slice) -> Record:
        """That of a range of the packed tokens."""
        experts, blocks = self.experts, self.blocks
        return Record(experts and experts.of(tokens), blocks and blocks.of(tokens))


def record_of(batch: TrainBatch, micro: MicroBatch, config: ModelConfig) -> Record:
    """What was captured of the rows of a micro-batch; nothing of an empty one, nor of filling."""
    experts = blocks = None
    lengths, device = micro.packing.lengths, micro.ids_T.device
    filling = [None] * (len(lengths) - len(micro.rows))
    if batch.routing is not None and len(micro.rows):
        experts = recorded_experts(
            [batch.routing[row] for row in micro.rows] + filling,
            lengths,
            num_layers=len(config.moe_layers),
            topk=config.num_experts_per_tok,
            num_experts=config.num_local_experts,
            device=device,
        )
    if batch.blocks is not None and len(micro.rows):
        blocks = recorded_blocks(
            [batch.blocks[row] for row in micro.rows] + filling,
            lengths,
            num_layers=len(config.sparse_layers),
            num_heads=config.num_key_value_heads,
            topk_blocks=config.index_topk_blocks,
            block_size=config.index_block_size,
            device=device,
        )
    return Record(experts, blocks)


def recorded_experts(
    records: Sequence[np.ndarray | None],
    lengths: Sequence[int],
    *,
    num_layers: int,
    topk: int,
    num_experts: int,
    device: torch.device,
) -> RecordedChoices:
    """Lay out the experts of packed rows.

    Args:
        records: one a row, [length - 1, MoE layers, A], or None where there is none.

    Raises:
        ValueError: a record whose shape is not that of its row and model, or an unknown expert.
    """
    what = "routing record of row {}", "MoE layers, experts per token"
    laid_out = _lay_out(records, lengths, (num_layers, topk), what, device)
    for b, record in enumerate(records):
        if record is not None and record.size and record.max() >= num_experts:
            raise ValueError(
                f"routing record of row {b} names expert {record.max()} of {num_experts}"
            )
    return laid_out


def recorded_blocks(
    records: Sequence[np.ndarray | None],
    lengths: Sequence[int],
    *,
    num_layers: int,
    num_heads: int,
    topk_blocks: int,
    block_size: int,
    device: torch.device,
) -> RecordedChoices:
    """Lay out the key blocks of packed rows, counted from the first token of each row.

    Args:
        records: one a row, [length - 1, sparse layers, K, topk], or None where there is none.

    Raises:
        ValueError: a record whose shape is not that of its row and model, a block behind its token,
            or a token without a block.
    """
    what = "block record of row {}", "sparse layers, KV heads, blocks per token"
    shape = (num_layers, num_heads, topk_blocks)
    laid_out = _lay_out(records, lengths, shape, what, device)
    for b, record in enumerate(records):
        if record is None:
            continue
        own_block = np.arange(len(record))[:, None, None, None] // block_size
        is_bad = (record > own_block) | (record[..., :1] < 0)
        if is_bad.any():
            token = int(np.argwhere(is_bad)[0, 0])
            raise ValueError(
                f"block record of row {b} gives token {token} the blocks "
                f"{record[token].tolist()}; it sees 0..{token // block_size}, one at least"
            )
    return laid_out


def _lay_out(
    records: Sequence[np.ndarray | None],
    lengths: Sequence[int],
    shape: tuple[int, ...],
    what: tuple[str, str],
    device: torch.device,
) -> RecordedChoices:
    name, axes = what
    num_tokens = sum(lengths)
    dtypes = [record.dtype for record in records if record is not None]
    ids_TLX = np.zeros((num_tokens, *shape), dtypes[0] if dtypes else np.uint8)
    is_recorded_T = np.zeros(num_tokens, bool)
    start = 0
    for b, (record, length) in enumerate(zip(records, lengths, strict=True)):
        if record is not None:
            expected = (length - 1, *shape)
            if record.shape != expected:
                raise ValueError(
                    f"{name.format(b)} has shape {record.shape}; a row of {length} tokens in this "
                    f"model needs {expected} (tokens - 1, {axes})"
                )
            ids_TLX[start : start + length - 1] = record
            is_recorded_T[start : start + length - 1] = True
        start += length
    ids_LTX = np.ascontiguousarray(ids_TLX.swapaxes(0, 1))
    return RecordedChoices(send(ids_LTX, device).int(), send(is_recorded_T, device))


class ChoiceObserver(Protocol):
    """Is told what the layers of forward passes choose; see `ChoiceStats`."""

    def add_experts(
        self, layer: int, own_TA: Tensor, used_TA: Tensor, record: RecordedChoices | None
    ) -> None: ...

    def add_blocks(self, layer: int, own_TKB: Tensor, record: RecordedChoices | None) -> None: ...


@dataclass(slots=True)
class ChoiceStats:
    """Counts over the tokens of any number of forward passes; plain sums, so ranks add up."""

    load_LE: Tensor
    """[MoE layers, E] int64: tokens each expert was used for."""
    totals_23: Tensor
    """[2, 3] int64, of experts and of blocks: [agreeing choices, choices with a record, all
    choices], each token, layer, head and rank of it."""
    _experts_E: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._experts_E = torch.arange(self.load_LE.shape[1], device=self.load_LE.device)

    @classmethod
    def zeros(cls, num_layers: int, num_experts: int, device: torch.device) -> ChoiceStats:
        load_LE = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=device)
        return cls(load_LE, load_LE.new_zeros(2, 3))

    def add_experts(
        self, layer: int, own_TA: Tensor, used_TA: Tensor, record: RecordedChoices | None
    ) -> None:
        """Count one MoE layer of one forward pass; `layer` counts MoE layers only."""
        self.load_LE[layer] += (used_TA[..., None] == self._experts_E).sum((0, 1))
        self._add_agreement(0, layer, own_TA, record)

    def add_blocks(self, layer: int, own_TKB: Tensor, record: RecordedChoices | None) -> None:
        """Count one sparse layer of one forward pass; `layer` counts sparse layers only."""
        self._add_agreement(1, layer, own_TKB, record)

    def _add_agreement(
        self, kind: int, layer: int, own_TX: Tensor, record: RecordedChoices | None
    ) -> None:
        self.totals_23[kind, 2] += (own_TX >= 0).sum()
        if record is None:
            return
        ids_TX = record.ids_LTX[layer]
        counts_T = record.is_recorded_T.view(-1, *[1] * (ids_TX.ndim - 1)) & (ids_TX >= 0)
        agrees = (ids_TX[..., :, None] == own_TX[..., None, :]).any(-1) & counts_T
        self.totals_23[kind, 0] += agrees.sum()
        self.totals_23[kind, 1] += counts_T.sum()

    def metrics(self, *, replays_experts: bool, replays_blocks: bool) -> dict[str, float]:
        """`m3/*`: expert load, and agreement of the trainer's choices with records if there are
        any.

        `expert_load_max_vio` is the largest (load / mean load - 1) of any layer, `expert_load_cv`
        the mean over layers of std / mean, `dead_expert_frac` the share of experts without a token.
        `block_agreement` counts local blocks too, which always agree.
        """
        metrics: dict[str, float] = {}
        totals, load_LE = self.totals_23.tolist(), self.load_LE.double().cpu()
        if totals[0][2]:
            relative_LE = load_LE / load_LE.mean(-1, keepdim=True)
            metrics |= {
                "m3/expert_load_max_vio": float(relative_LE.max() - 1),
                "m3/expert_load_cv": float(relative_LE.std(-1, unbiased=False).mean()),
                "m3/dead_expert_frac": float((load_LE == 0).double().mean()),
            }
        replays = {"router": replays_experts, "block": replays_blocks}
        for (kind, is_replayed), (agreeing, recorded, total) in zip(
            replays.items(), totals, strict=True
        ):
            if recorded:
                metrics[f"m3/{kind}_agreement"] = agreeing / recorded
                metrics[f"m3/{kind}_replay_coverage"] = recorded / total if is_replayed else 0.0
        return metrics
