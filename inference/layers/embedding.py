"""The two ends of the model that know the vocabulary: token embedding and head, not tied."""

import torch
from torch import Tensor, nn

from inference.kernels.linear import linear
from inference.layers.linear import empty_parameter


class Embedding(nn.Module):
    """Rows of a table by token id, unscaled."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(vocab_size, hidden_size, dtype=dtype, device=device)

    def forward(self, ids_T: Tensor) -> Tensor:
        return nn.functional.embedding(ids_T, self.weight)


class Head(nn.Module):
    """Logits of hidden states, computed in FP32 from weights of any dtype, under any autocast."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(vocab_size, hidden_size, dtype=dtype, device=device)

    def forward(self, hidden_RC: Tensor) -> Tensor:
        return linear(hidden_RC, self.weight, torch.float32)
