"""A frozen base: no masters, no gradients; the wire's dtype, and experts in MXFP8 where wanted."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as m3

from inference.kernels.mxfp8 import BLOCK_SIZE, MXFP8Tensor, quantize_into, widen
from m3rl.weight_sync.trainer_layout import Place

STACKS = ("gate_up_proj", "down_proj")
"""Parameters of an experts' module: [E, 2I, C] and [E, C, I]."""


def freeze(model: nn.Module, dtype: torch.dtype, keeps: Collection[str]) -> None:
    """Train nothing of `model` and hold it in `dtype`, but for parameters named in `keeps`."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        if name not in keeps:
            parameter.data = parameter.data.to(dtype)


class MXFP8Experts(m3.MiniMaxM3VLExperts):
    """Routed experts that are no parameters, but values and scales.

    They lie where `allocate` puts them, out of the reach of `state_dict`, `to` and FSDP.
    """

    shapes: dict[str, torch.Size]
    """Of `STACKS`."""
    held: dict[str, MXFP8Tensor]

    @property
    def gate_up_proj(self) -> MXFP8Tensor:  # type: ignore[override]
        return self.held["gate_up_proj"]

    @property
    def down_proj(self) -> MXFP8Tensor:  # type: ignore[override]
        return self.held["down_proj"]

    def allocate(self, device: torch.device) -> None:
        """Memory for all of them, if there is none."""
        for name, shape in self.shapes.items():
            if name not in self.held:
                blocks = (*shape[:-1], shape[-1] // BLOCK_SIZE)
                self.held[name] = MXFP8Tensor(
                    torch.empty(shape, dtype=torch.float8_e4m3fn, device=device),
                    torch.empty(blocks, dtype=torch.uint8, device=device),
                )


def hold_experts_in_mxfp8(model: nn.Module) -> None:
    """Make MXFP8Experts of all routed experts; their weights are gone.

    Raises:
        ValueError: rows are no multiple of MXFP8's block.
    """
    for experts in _modules(model, m3.MiniMaxM3VLExperts):
        shapes = {name: experts._parameters.pop(name).shape for name in STACKS}
        for name, shape in shapes.items():
            if shape[-1] % BLOCK_SIZE:
                raise ValueError(
                    f"policy.lora.frozen_experts: mxfp8 quantises blocks of {BLOCK_SIZE} channels, "
                    f"and {name} of an expert has {shape[-1]}; use auto"
                )
        experts.__class__ = MXFP8Experts
        experts.shapes, experts.held = shapes, {}


def allocate_experts(model: nn.Module, device: torch.device) -> None:
    """`MXFP8Experts.allocate` of all that there are."""
    for experts in _modules(model, MXFP8Experts):
        experts.allocate(device)


def mxfp8_of(model: nn.Module, place: Place, first_expert: int) -> MXFP8Tensor | None:
    """A published tensor that MXFP8Experts hold; None: something else holds it.

    Args:
        place: of it in transformers' model with all experts.
        first_expert: here.
    """
    module_name, _, name = place.param.rpartition(".")
    module = model.get_submodule(module_name)
    if not isinstance(module, MXFP8Experts):
        return None
    expert, *rest = place.index
    assert isinstance(expert, int), "stacks are cut by their experts first"
    values, scale = (t[(expert - first_expert, *rest)] for t in module.held[name])
    return MXFP8Tensor(values, scale)


def fill(target: MXFP8Tensor, source: Tensor | MXFP8Tensor) -> None:
    """Take a checkpoint's tensor: the bytes of MXFP8; any other rounded to BF16 and quantised, as a
    replica quantises what it is sent."""
    if isinstance(source, MXFP8Tensor):
        target.values.copy_(source.values)
        target.scale.copy_(source.scale)
    else:
        quantize_into(source.to(target.values.device, torch.bfloat16), target)


def widened(source: Tensor | MXFP8Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor as it is, or the values of MXFP8, which BF16 holds exactly.

    Scales were looked at when they were read: a sync reads every expert, and would wait for the
    device as often.
    """
    return widen(*source, dtype) if isinstance(source, MXFP8Tensor) else source


def _modules(model: nn.Module, kind: type[nn.Module]) -> Iterator[Any]:
    return (module for module in model.modules() if isinstance(module, kind))
