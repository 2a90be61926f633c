"""What a model is, apart from what a policy does with it: its tensors, where they lie, how it is
made."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor, dtype, nn

from m3rl.errors import M3rlError
from m3rl.weight_sync.trainer_layout import Place


class ArchitectureError(M3rlError):
    """A model that cannot be trained as it should be."""


class Spec(Protocol):
    """A published tensor, whole."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def bucket(self) -> str: ...
    @property
    def is_fp32(self) -> bool:
        """Whether it is FP32 on the wire and in the forward pass, whatever the policy's dtype."""


class Unit(NamedTuple):
    """A module whose parameters FSDP gathers together, but for those of units inside it."""

    module: Any
    stacks_experts: bool = False
    """All its parameters stack experts, which expert-parallel ranks split."""
    is_fp32: bool = False
    in_backward: bool = True
    """Whether its backward pass reads them."""


class InitialScales(NamedTuple):
    """Standard deviations of fresh weights."""

    matrices: float
    embedding: float
    correction_bias: float
    """Of a router."""


class Architecture(Protocol):
    """One model as transformers has it, with a forward pass over packed samples."""

    @property
    def specs(self) -> Mapping[str, Spec]:
        """Published tensors by name, in the order of the forward pass."""

    @property
    def placement(self) -> Mapping[str, Place]:
        """Where each lies among parameters and buffers of `build`, by transformers' names."""

    def build(self, master: dtype, computing: dtype) -> Any:
        """A new model whose parameters are of dtype `master`; it computes with them in `computing`,
        and those that are trained need gradients."""

    def head(self, model: Any) -> Any:
        """The module whose weight makes logits of hidden states; its forward is that of
        `read_head`."""

    def units(self, model: Any) -> Iterator[Unit]:
        """Units of FSDP, inner ones first; the rest of the model belongs to its root."""

    def read(self, path: str | Path, only: Collection[str] | None) -> Iterator[tuple[str, Tensor]]:
        """Published tensors of a checkpoint.

        Raises:
            inference.models.weights.CheckpointError: they are not those of this model.
        """

    def initial(self, scales: InitialScales) -> Mapping[str, float | Tensor]:
        """Of each fresh parameter or buffer: the standard deviation, or its values."""


def install_head(head: Any) -> None:
    """Give a linear module the forward `read_head`."""
    head.forward = read_head.__get__(head)


def read_head(self: nn.Linear, read: Any, hidden_MC: Tensor, ids_M: Tensor) -> Any:
    """`read(hidden_MC, the head, ids_M)`, which computes with the head's wire values."""
    return read(hidden_MC, self.weight, ids_M)
