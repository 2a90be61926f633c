"""Matrix products with a weight: the plain one, and the MLP made of two of them."""

import torch
from torch import Tensor, nn

from inference.kernels.linear import SwiGLU, linear


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Storage for a weight that a load fills; its content until then is undefined."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class Linear(nn.Module):
    """y = x Wᵀ; published projections that read the same input are stacked along the rows of W."""

    def __init__(
        self, in_size: int, out_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(out_size, in_size, dtype=dtype, device=device)

    def forward(self, x_TC: Tensor) -> Tensor:
        return linear(x_TC, self.weight)


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
        act_TX = linear(x_TC, self.gate_up_proj.weight, swiglu=self.swiglu)
        y_TC: Tensor = self.down_proj(act_TX)
        return y_TC
