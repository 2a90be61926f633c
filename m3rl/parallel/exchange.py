"""Tokens between ranks, with gradients; the same inputs give the same bits.

`Q` this rank's tokens of a row that is shared, `T` all of them or else just this rank's ·
`A` experts per token · `P` = T · A choices · `R` rows that it sends · `X` rows that it receives ·
`G` expert groups · `C` hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from inference.kernels.add_rows import add_rows

# Renamed between torch 2.11, which GPU hosts have, and 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Mlp = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x_XC, ids_X1 of this rank's experts, weights_X1) -> [X, C] weighted results."""


def gather_rows(own: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Rows (dimension 0) of all ranks of `group`, in its order; gradients are summed in FP32.

    Args:
        sizes: how many rows each rank has.
    """
    rows: Tensor = _GatherRows.apply(own, tuple(sizes), group)
    return rows


class _GatherRows(Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, sizes: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        most = max(sizes)
        padded = _padded(own, most)
        everyones = own.new_empty(len(sizes) * most, *own.shape[1:])
        _all_gather(everyones, padded, group=group)
        if min(sizes) == most:
            return everyones
        pieces = everyones.split(most)
        return torch.cat([piece[:size] for piece, size in zip(pieces, sizes, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        sizes, most = ctx.sizes, max(ctx.sizes)
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        padded = torch.cat([_padded(piece, most) for piece in wide.split(sizes)])
        own = wide.new_empty(most, *grad.shape[1:])
        _reduce_scatter(own, padded, group=ctx.group)
        return own[: sizes[dist.get_rank(ctx.group)]].to(grad.dtype), None, None


def _padded(rows: Tensor, size: int) -> Tensor:
    if len(rows) == size:
        return rows.contiguous()
    return torch.cat([rows, rows.new_zeros(size - len(rows), *rows.shape[1:])])


@dataclass(frozen=True, slots=True)
class Route:
    """Which rows a MoE layer sends where: a row for each choice of an expert.

    A choice's result comes back by itself and a token's are added up at home, in the order of its
    choices: as one rank that held all experts would.
    """

    group: dist.ProcessGroup
    choice_R: Tensor
    """[R] int64: places among the flattened [T, A] choices; sorted by (receiver, place)."""
    row_TA: Tensor
    """[T, A] int32: the row of each choice."""
    sent: list[int]
    """Rows for each rank of the group."""
    received: list[int]
    ids_X1: Tensor
    """[X, 1] int32: experts of the received rows, counted within this rank's."""

    @classmethod
    def of(cls, ids_TA: Tensor, num_experts: int, group: dist.ProcessGroup) -> Route:
        """Agree with the other ranks of `group`, which call it too; the host waits for the device.

        Args:
            ids_TA: [T, A] experts.
            num_experts: of each rank, which hold them in consecutive runs.
        """
        receivers_G = torch.arange(dist.get_world_size(group), device=ids_TA.device)
        receiver_P = ids_TA.flatten().long() // num_experts
        choice_R = receiver_P.argsort(stable=True)
        sent_G = (receiver_P == receivers_G[:, None]).sum(1)
        received_G = torch.empty_like(sent_G)
        dist.all_to_all_single(received_G, sent_G, group=group)
        sent, received = torch.stack([sent_G, received_G]).tolist()
        ids_R1 = ids_TA.flatten()[choice_R, None].int() % num_experts
        return cls(
            group=group,
            choice_R=choice_R,
            row_TA=choice_R.argsort().view_as(ids_TA).int(),
            sent=sent,
            received=received,
            ids_X1=_all_to_all(ids_R1, sent, received, group),
        )


def experts_across(x_TC: Tensor, weights_TA: Tensor, route: Route, mlp: Mlp) -> Tensor:
    """[T, C]: each token's weighted sum over its experts, wherever they are.

    Args:
        mlp: this rank's experts.
    """
    there = (route.sent, route.received, route.group)
    back = (route.received, route.sent, route.group)
    weights_R1 = weights_TA.flatten().index_select(0, route.choice_R)[:, None]
    x_XC = _Exchange.apply(_Spread.apply(x_TC, route), *there)
    weights_X1 = _Exchange.apply(weights_R1, *there)
    y_RC = _Exchange.apply(mlp(x_XC, route.ids_X1, weights_X1), *back)
    total_TC: Tensor = _Collect.apply(y_RC, route)
    return total_TC


class _Spread(Function):
    """[T, C] -> [R, C]: each token's row for each of its choices."""

    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, route: Route) -> Tensor:
        ctx.route = route
        return _spread(x_TC, route)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RC: Tensor) -> tuple[Tensor, None]:
        return _collected(grad_RC.contiguous(), ctx.route), None


class _Collect(Function):
    """[R, C] -> [T, C]: the sum over each token's choices."""

    @staticmethod
    def forward(ctx: Any, rows_RC: Tensor, route: Route) -> Tensor:
        ctx.route = route
        return _collected(rows_RC, route)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TC: Tensor) -> tuple[Tensor, None]:
        return _spread(grad_TC, ctx.route), None


def _spread(x_TC: Tensor, route: Route) -> Tensor:
    return x_TC.index_select(0, route.choice_R // route.row_TA.shape[1])


def _collected(rows_RC: Tensor, route: Route) -> Tensor:
    """In the order of the choices, FP32 inside (FP64 of FP64)."""
    if rows_RC.is_cuda:
        total_TC = rows_RC.new_zeros(len(route.row_TA), rows_RC.shape[1])
        add_rows(total_TC, rows_RC, rows_RC[:0], route.row_TA)
        return total_TC
    wide_RC = rows_RC.to(torch.promote_types(rows_RC.dtype, torch.float32))
    total_TC = wide_RC.new_zeros(len(route.row_TA), rows_RC.shape[1])
    for row_T in route.row_TA.T:
        total_TC += wide_RC.index_select(0, row_T)
    return total_TC.to(rows_RC.dtype)


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any, x_RC: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.back = (received, sent, group)
        return _all_to_all(x_RC, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_XC: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grad_XC, *ctx.back), None, None, None


def _all_to_all(
    x_RC: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    out_XC = x_RC.new_empty(sum(received), x_RC.shape[1])
    dist.all_to_all_single(out_XC, x_RC.contiguous(), received, sent, group=group)
    return out_XC
