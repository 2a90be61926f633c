"""The two ends of the model that know the vocabulary: token embedding and head, not tied."""

import torch
from torch import Tensor, nn

from inference.kernels.linear import linear
from inference.layers.linear import empty_parameter
from inference.parallel.groups import ParallelGroups


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
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        groups: ParallelGroups | None = None,
    ) -> None:
        """`groups`: its tp ranks have equal parts of the vocabulary each, in their order."""
        super().__init__()
        self.groups = None if groups is None or groups.config.tp == 1 else groups
        num_rows = vocab_size if self.groups is None else vocab_size // self.groups.config.tp
        self.weight = empty_parameter(num_rows, hidden_size, dtype=dtype, device=device)

    def forward(self, hidden_RC: Tensor) -> Tensor:
        """[R, V], the same bits on all tp ranks."""
        logits_RX = linear(hidden_RC, self.weight, torch.float32)
        if self.groups is None:
            return logits_RX
        parts = self.groups.gather_over_tp(logits_RX, "gathering of logits")
        return parts.view(-1, *logits_RX.shape).transpose(0, 1).flatten(1)
