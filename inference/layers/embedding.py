"""The two ends of the model that know the vocabulary: token embedding and head, not tied."""

import torch
from torch import Tensor, nn

from inference.layers.linear import empty_parameter

HEAD_CHUNK = 16384
"""Rows of the head converted to FP32 at a time: 402 MB for the real M3, not the whole 4.9 GB."""


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
        hidden_RC = hidden_RC.float()
        with torch.autocast(device_type=hidden_RC.device.type, enabled=False):
            parts = torch.split(self.weight, HEAD_CHUNK)
            chunks = [hidden_RC @ rows.float().T for rows in parts]
        return torch.cat(chunks, dim=-1)
