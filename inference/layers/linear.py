"""Matrix products with a weight: the plain one, and the MLP made of two of them.

The dtype of a weight is what it is held in: float8_e4m3fn means MXFP8, values and, beside them in a
parameter whose name ends in `_scale`, one byte for 32 of them.
"""

import torch
from torch import Tensor, nn

from inference.kernels.linear import SwiGLU, linear
from inference.kernels.mxfp8 import BLOCK_SIZE, MXFP8Tensor


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Storage for a weight that a load fills; its content until then is undefined."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def empty_scale(weight: Tensor) -> nn.Parameter | None:
    """Storage for the scales of an MXFP8 weight, one byte for 32 elements; None for another."""
    if weight.dtype != torch.float8_e4m3fn:
        return None
    shape = (*weight.shape[:-1], weight.shape[-1] // BLOCK_SIZE)
    return empty_parameter(*shape, dtype=torch.uint8, device=weight.device)


def with_scale(weight: Tensor, scale: Tensor | None) -> Tensor | MXFP8Tensor:
    """A weight as the kernels take it."""
    return weight if scale is None else MXFP8Tensor(weight, scale)


class Linear(nn.Module):
    """y = x Wᵀ; published projections that read the same input are stacked along the rows of W."""

    def __init__(
        self, in_size: int, out_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(out_size, in_size, dtype=dtype, device=device)
        self.weight_scale = empty_scale(self.weight)

    @property
    def matrix(self) -> Tensor | MXFP8Tensor:
        """W, [out_size, in_size]."""
        return with_scale(self.weight, self.weight_scale)

    def forward(self, x_TC: Tensor) -> Tensor:
        return linear(x_TC, self.matrix)


class MLP(nn.Module):
    """The feed-forward of the dense layers and the shared expert: down(swiglu_oai(gate | up))."""

    def __init__(
        self,
        hidden_size: int,
        width: int,
        *,
        alpha: float,
        limit: float,
        beta: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.swiglu = SwiGLU(alpha, limit, beta)
        self.gate_up_proj = Linear(hidden_size, 2 * width, dtype=dtype, device=device)
        self.down_proj = Linear(width, hidden_size, dtype=dtype, device=device)

    def forward(self, x_TC: Tensor) -> Tensor:
        act_TX = linear(x_TC, self.gate_up_proj.matrix, swiglu=self.swiglu)
        y_TC: Tensor = self.down_proj(act_TX)
        return y_TC
