"""RMSNorm between the parts of a layer, fused with the residual addition before it."""

import torch
from torch import Tensor, nn

from inference.kernels.rms_norm import rms_norm
from inference.layers.linear import empty_parameter


class RMSNorm(nn.Module):
    """Gemma RMSNorm of the residual stream: the gain is 1 + weight."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(size, dtype=dtype, device=device)

    def forward(self, stream_TC: Tensor, update_TC: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm of the new stream, new stream); the new stream is `stream_TC + update_TC`."""
        if update_TC is None:
            return rms_norm(stream_TC, self.weight, self.eps), stream_TC
        return rms_norm(update_TC, self.weight, self.eps, stream_TC)
