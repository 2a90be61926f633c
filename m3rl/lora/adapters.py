"""A and B of every adapted weight: their values, gradients and merging.

`r` rank · `scale` alpha / r · stacked weights have a dimension `E` of experts before all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as m3

from inference.kernels.tensor_hash import combine, tensor_hash, unit_of
from m3rl.lora.frozen import STACKS
from m3rl.lora.settings import LoraSettings

MERGED_ELEMENTS = 1 << 23
"""Merged at a time, in FP64."""
Own = tuple[Tensor, tuple[tuple[int, int], ...]]
"""Memory of what this rank owns of a parameter, and which rectangle of it that is."""


class Adapter(nn.Module):
    """Of one weight [out, in], or [E, out, in]."""

    def __init__(self, shape: tuple[int, ...], scale: float, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        *stack, rows, columns = shape
        self.scale = scale
        self.A = nn.Parameter(torch.empty(*stack, rank, columns, dtype=dtype))
        self.B = nn.Parameter(torch.empty(*stack, rows, rank, dtype=dtype))

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        """A uniform in ±1 / √in, B zero: the merged weight is the base."""
        bound = 1 / math.sqrt(self.A.shape[-1])
        draws = torch.rand(self.A.shape, generator=generator, dtype=torch.float32)
        self.A.copy_((2 * draws - 1) * bound)
        self.B.zero_()

    @torch.no_grad()
    def merge(self, base: Tensor, out: Tensor, bounds: tuple[tuple[int, int], ...]) -> None:
        """Write base + scale · B · A into `out`, rounded once: summed in FP64, so that the bits do
        not depend on how a weight is cut.

        Args:
            base: the rectangle `bounds` of the base; `out` likewise.
        """
        *_, (first_row, last_row), (first, last) = bounds
        if base.ndim == 3:
            for place, expert in enumerate(range(*bounds[0])):
                a, b = self.A[expert, :, first:last], self.B[expert, first_row:last_row]
                merge_into(base[place], a, b, self.scale, out[place])
        else:
            a, b = self.A[:, first:last], self.B[first_row:last_row]
            merge_into(base, a, b, self.scale, out)


def merge_into(base: Tensor, a: Tensor, b: Tensor, scale: float, out: Tensor) -> None:
    """Write base + scale · B · A into `out`, summed in FP64 and rounded once: matrices."""
    step = max(1, MERGED_ELEMENTS // base.shape[1])
    for first in range(0, len(base), step):
        rows = slice(first, first + step)
        out[rows] = torch.addmm(base[rows].double(), b[rows].double(), a.double(), alpha=scale)


class Adapters(nn.Module):
    """All that is trained of an adapted model.

    Every rank has all of it and the same; gradients are to be summed over ranks. What a rank has of
    the base is a second copy of what it owns of the targets.

    Args:
        model: transformers' `MiniMaxM3VLForCausalLM`, frozen; its targets get the forwards below.
            Stacks of experts are `AdaptedExperts`.
        shape: transformers' name of a parameter -> that of all of it.
        own: the same -> what this rank owns of it, if anything.
        first_expert: of those that this rank computes with.
        dtype: of A and B.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: LoraSettings,
        shape: Callable[[str], tuple[int, ...]],
        own: Callable[[str], Own | None],
        *,
        first_expert: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.settings = settings
        self._own = own
        self._base: dict[str, Tensor] = {}
        self._by_name: dict[str, Adapter] = {}
        for name, module in _targets(model, settings):
            adapter = Adapter(shape(name), settings.scale, settings.rank, dtype)
            self.add_module(name.replace(".", "/"), adapter)
            self._by_name[name] = adapter
            if isinstance(module, AdaptedExperts):
                module.adapters[name.rpartition(".")[2]] = adapter, first_expert
            else:
                module.adapter = (adapter,)  # no submodule of the model
                module.forward = MethodType(adapted_linear, module)
        if not self._by_name:
            raise ValueError(f"the model has no module of policy.lora.targets={settings.targets}")

    @property
    def names(self) -> tuple[str, ...]:
        """Transformers' names of the adapted parameters, in the order of their adapters."""
        return tuple(self._by_name)

    def __getitem__(self, name: str) -> Adapter:
        return self._by_name[name]

    @torch.no_grad()
    def begin(self) -> None:
        """The model's weights are the base from here on; adapters begin anew."""
        generator = torch.Generator().manual_seed(self.settings.seed)
        for adapter in self._by_name.values():
            adapter.reset(generator)
        for name, memory, _ in self._owned():
            self._base[name] = memory.clone()

    @torch.no_grad()
    def merge(self) -> None:
        """Bring the model's weights up to the adapters."""
        for name, memory, bounds in self._owned():
            self[name].merge(self._base[name], memory, bounds)

    @contextmanager
    @torch.no_grad()
    def off(self) -> Iterator[None]:
        """Inside, the model is the base. Graphs that were built before stay good: they are used
        after it, when the weights have their bits again."""
        for name, memory, _ in self._owned():
            memory.copy_(self._base[name])
        try:
            yield
        finally:
            self.merge()

    def sum_gradients(self) -> None:
        """Over all ranks; a rank without one adds zeros."""
        for parameter in self.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)

    def base(self, name: str) -> Tensor:
        """What this rank owns of the base of a target."""
        return self._base[name]

    def hash(self) -> int:
        """64 bits over the bits of A and B."""
        return combine(
            tensor_hash(p.detach(), name=name, unit=unit_of(p.dtype, p.shape[-1:]))
            for name, p in self.named_parameters()
        )

    def _owned(self) -> Iterator[tuple[str, Tensor, tuple[tuple[int, int], ...]]]:
        for name in self._by_name:
            if (found := self._own(name)) is not None:
                memory, bounds = found
                yield name, memory.data, bounds  # autograd does not count what is written there


def _targets(model: nn.Module, settings: LoraSettings) -> Iterator[tuple[str, Any]]:
    """(name of the parameter, its module)"""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.endswith(settings.modules):
            yield f"{name}.weight", module
    for name, module in model.named_modules():
        if isinstance(module, AdaptedExperts):
            yield from ((f"{name}.{stack}", module) for stack in STACKS)


def hold_adapted_experts(model: nn.Module) -> None:
    """Make AdaptedExperts of all routed experts."""
    for module in model.modules():
        if isinstance(module, m3.MiniMaxM3VLExperts):
            experts: Any = module
            experts.__class__ = AdaptedExperts
            experts.adapters = {}


def adapted_linear(self: Any, x_TC: Tensor) -> Tensor:
    (adapter,) = self.adapter
    apply: Any = _Linear.apply
    out: Tensor = apply(x_TC, self.weight, adapter.A, adapter.B, adapter.scale)
    return out


class AdaptedExperts(m3.MiniMaxM3VLExperts):
    """Experts whose gradients go to their adapters."""

    adapters: dict[str, tuple[Adapter, int]]
    """Of `STACKS`, and the first expert that is here."""

    @property
    def gate_up_proj(self) -> Tensor:  # type: ignore[override]
        """[E, 2I, C]."""
        return self._adapted("gate_up_proj")

    @property
    def down_proj(self) -> Tensor:  # type: ignore[override]
        """[E, C, I]."""
        return self._adapted("down_proj")

    def _adapted(self, name: str) -> Tensor:
        weight = self._parameters[name]
        assert weight is not None, "stacks are parameters"
        if not torch.is_grad_enabled():
            return weight
        adapter, first = self.adapters[name]
        own = slice(first, first + len(weight))
        apply: Any = _Stack.apply
        out: Tensor = apply(weight, adapter.A[own], adapter.B[own], adapter.scale)
        return out


class _Linear(Function):
    """x · Wᵀ with W merged already: dA = scale · Bᵀ dW, dB = scale · dW Aᵀ, and dW is not made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        ctx.scale = scale
        return F.linear(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        grad_a = _product((grad @ b.to(grad.dtype)).T, x, a.dtype).mul_(ctx.scale)
        grad_b = _product(grad.T, x @ a.to(x.dtype).T, b.dtype).mul_(ctx.scale)
        return grad_x, None, grad_a, grad_b, None


class _Stack(Function):
    """The merged weights as they are; their gradients to A and B, one expert after the other."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.scale = scale
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor, None]:
        a, b = ctx.saved_tensors
        grad_a, grad_b = torch.empty_like(a), torch.empty_like(b)
        for expert, each in enumerate(grad):
            wide = each.to(a.dtype)
            torch.mm(b[expert].T, wide, out=grad_a[expert])
            torch.mm(wide, a[expert].T, out=grad_b[expert])
        return None, grad_a.mul_(ctx.scale), grad_b.mul_(ctx.scale), None


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left · right, summed and given in `dtype`."""
    if left.is_cuda and left.dtype == torch.bfloat16:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.to(dtype) @ right.to(dtype)
