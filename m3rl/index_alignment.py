"""Training the index branch: a loss that draws it towards the attention that it chooses blocks for.

The loss of a policy gives the index branch no gradient, since a choice has none. MSA trains it
(arXiv:2606.13392; the scale and the means are those of the training code published with it) by

    L = coef · sum over layers of  1 / (K · N) · sum over tokens t and KV heads h of
        KL(P_th ‖ P_index_th)

over the N tokens of all rows of an optimizer step, prompts included; `index_alignment` says what P
and P_index are. The logits of both carry 1/sqrt(head dim), although blocks are ranked without. The
main branch is the target and gets no gradient; nor does the layer's input, so the trunk does not
feel the loss. The paper gives no coefficient, and nobody has published one for RL.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from inference.kernels.index_alignment import ALIGNMENT_LEVELS, AlignmentLevel


@dataclass(frozen=True, slots=True)
class IndexLossSettings:
    coef: float = 0.0
    """0: the index branch is frozen."""
    level: AlignmentLevel = "token"
    """'token' compares weights of keys, as MSA does; 'block' those of chosen blocks."""

    def __post_init__(self) -> None:
        if self.coef < 0:
            raise ValueError(f"index_loss.coef={self.coef} must not be negative")
        if self.level not in ALIGNMENT_LEVELS:
            raise ValueError(
                f"index_loss.level={self.level!r} is unknown; use one of {ALIGNMENT_LEVELS}"
            )


@dataclass(slots=True)
class IndexLoss:
    """What one forward pass adds to the loss above, and its gradients to a backward pass."""

    settings: IndexLossSettings
    num_tokens: float
    """N: tokens of the whole optimizer step, over all ranks."""
    num_rows: int
    """Tokens of the packed row that count; those behind are filling."""
    _kl: dict[int, Tensor] = field(default_factory=dict)

    def attach(self, x_QC: Tensor, kl_QK: Tensor, layer: int, first: int) -> Tensor:
        """`x_QC` itself; a gradient that comes to it brings that of the layer's loss along.

        So the loss needs no way of its own out of the layer, wherever that is computed again or
        its parameters come and go; what the gradient of `x_QC` is does not matter.

        Args:
            x_QC: made by the layer, on the way to the policy's loss.
            kl_QK: the layer's divergences, [Q, K].
            first: the packed token that is the first query.
        """
        place_Q = torch.arange(first, first + len(kl_QK), device=kl_QK.device)
        share = 1 / (kl_QK.shape[1] * self.num_tokens)
        weight_Q1 = (place_Q < self.num_rows).to(kl_QK.dtype)[:, None] * share
        # By layer, so that one that is computed again counts once.
        self._kl[layer] = (kl_QK.detach() * weight_Q1).sum(dtype=torch.float64)
        gradient_QK = (weight_Q1 * self.settings.coef).expand_as(kl_QK)
        attached: Tensor = _Attach.apply(x_QC, kl_QK, gradient_QK)
        return attached

    def metrics(self) -> dict[str, float]:
        """`m3/index_kl`: what this pass adds to the mean divergence over layers, heads and tokens
        (nats); empty for a model without sparse layers."""
        if not self._kl:
            return {}
        return {"m3/index_kl": float(torch.stack(list(self._kl.values())).mean())}


class _Attach(Function):
    @staticmethod
    def forward(ctx: Any, x_QC: Tensor, kl_QK: Tensor, grad_QK: Tensor) -> Tensor:
        ctx.save_for_backward(grad_QK)
        return x_QC.view_as(x_QC)

    @staticmethod
    def backward(ctx: Any, grad_x_QC: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad_QK,) = ctx.saved_tensors
        return grad_x_QC, grad_QK, None
