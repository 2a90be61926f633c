"""Routing replay: the experts the rollout engine used, laid out for a forward pass of the trainer.

A completion record holds experts for every token that had a forward pass: all but the last sampled
one. Which experts are chosen then comes from the record, how much each counts from the trainer's
own scores, so gradients still reach the router (R3, arXiv:2510.11370).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RecordedRouting:
    """Experts of a right-padded micro-batch, tokens flattened row by row (T = B · S)."""

    ids_LTA: Tensor
    """[MoE layers, T, A] int64; distinct valid experts also where nothing was recorded."""
    is_recorded_T: Tensor
    """[T] bool: False for padding, for the last token of a row and for rows without a record."""


def recorded_routing(
    routing: Sequence[np.ndarray | None],
    length_B: np.ndarray,
    num_positions: int,
    *,
    num_layers: int,
    topk: int,
    num_experts: int,
) -> RecordedRouting:
    """Lay out the records of a micro-batch's rows.

    Args:
        routing: one record a row, [length - 1, MoE layers, A], or None where there is none.
        num_positions: S, the padded width of the micro-batch.

    Raises:
        ValueError: a record whose shape is not that of its row and model, or an unknown expert.
    """
    shape = (len(length_B), num_positions, num_layers, topk)
    ids_BSLA = np.broadcast_to(np.arange(topk), shape).copy()
    is_recorded_BS = np.zeros(shape[:2], bool)
    for b, record in enumerate(routing):
        if record is None:
            continue
        expected = (int(length_B[b]) - 1, num_layers, topk)
        if record.shape != expected:
            raise ValueError(
                f"routing record of row {b} has shape {record.shape}; a row of {length_B[b]} "
                f"tokens in this model needs {expected} (tokens - 1, MoE layers, experts per token)"
            )
        if record.size and record.max() >= num_experts:
            raise ValueError(
                f"routing record of row {b} names expert {record.max()} of {num_experts}"
            )
        ids_BSLA[b, : len(record)] = record
        is_recorded_BS[b, : len(record)] = True
    ids_TLA = torch.from_numpy(ids_BSLA).reshape(-1, num_layers, topk)
    return RecordedRouting(
        ids_TLA.transpose(0, 1).contiguous(), torch.from_numpy(is_recorded_BS).reshape(-1)
    )


@dataclass(slots=True)
class RoutingStats:
    """Counts over the real tokens of any number of forward passes; plain sums, so ranks add up."""

    load_LE: Tensor
    """[MoE layers, E] int64: tokens each expert was used for."""
    totals: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.int64))
    """[agreeing choices, choices with a record, all choices], each token, layer and rank of it."""

    @classmethod
    def zeros(cls, num_layers: int, num_experts: int) -> RoutingStats:
        return cls(torch.zeros(num_layers, num_experts, dtype=torch.int64))

    def add(
        self,
        layer: int,
        *,
        own_ids_TA: Tensor,
        used_ids_TA: Tensor,
        is_real_T: Tensor,
        record: RecordedRouting | None,
    ) -> None:
        """Count one MoE layer of one forward pass; `layer` counts MoE layers only."""
        used = used_ids_TA[is_real_T].reshape(-1).long()
        self.load_LE[layer] += torch.bincount(used, minlength=self.load_LE.shape[1]).cpu()
        self.totals[2] += len(used)
        if record is not None:
            seen_T = record.is_recorded_T & is_real_T
            own, recorded = own_ids_TA[seen_T], record.ids_LTA[layer][seen_T]
            agrees = (own[:, :, None] == recorded[:, None, :]).any(-1)
            self.totals[0] += int(agrees.sum())
            self.totals[1] += agrees.numel()

    def metrics(self, *, is_replayed: bool) -> dict[str, float]:
        """`m3/*`: expert load, and agreement of the trainer's choice with records if there are any.

        `expert_load_max_vio` is the largest (load / mean load - 1) of any layer, `expert_load_cv`
        the mean over layers of std / mean, `dead_expert_frac` the share of experts without a token.
        """
        metrics: dict[str, float] = {}
        if self.totals[2]:
            load_LE = self.load_LE.double()
            relative_LE = load_LE / load_LE.mean(-1, keepdim=True)
            metrics |= {
                "m3/expert_load_max_vio": float(relative_LE.max() - 1),
                "m3/expert_load_cv": float(relative_LE.std(-1, unbiased=False).mean()),
                "m3/dead_expert_frac": float((self.load_LE == 0).double().mean()),
            }
        agreeing, recorded, total = (int(n) for n in self.totals)
        if recorded:
            metrics["m3/router_agreement"] = agreeing / recorded
            metrics["m3/router_replay_coverage"] = recorded / total if is_replayed else 0.0
        return metrics
