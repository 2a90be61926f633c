"""What the loss of the index branch takes on a GPU in each sparse layer, beside its weights.

`index_alignment` keeps a weight of every key of every choice, listed by block, and lists are padded
to tiles; its backward pass sums index keys' gradients in units of a list. Standard library only.

`T` tokens of a packed row that this rank computes · `K` KV heads · `D` index head dim
"""

from __future__ import annotations

from dataclasses import dataclass

from inference.config import ModelConfig

FP32 = INT32 = 4
TILE, UNIT = 64, 512
"""Rows that lists are padded to, and that one unit sums (`index_alignment.launch`)."""


@dataclass(frozen=True, slots=True)
class IndexLossMemory:
    """Bytes of one layer.

    Args:
        width: of a value of the wire's dtype.
        tokens: T.
        num_keys: tokens of the whole packed row, as if it were one sample.
    """

    model: ModelConfig
    width: int
    tokens: int
    num_keys: int

    @property
    def kept(self) -> int:
        """From the layer's forward pass to its backward pass."""
        model = self.model
        queries = self.tokens * model.num_key_value_heads * model.index_head_dim
        # Queries and keys before their norm, queries after it, and the divergence's slope in them.
        heads = self.width * (2 * queries + self.tokens * model.index_head_dim) + FP32 * queries
        rows = self._choices + self._lists * (TILE - 1) + TILE
        return heads + rows * (self.width * model.index_block_size + INT32)

    @property
    def added(self) -> int:
        """In the loss's own backward pass, which ends before that of attention begins."""
        model = self.model
        queries = self.tokens * model.num_key_value_heads * model.index_head_dim
        units = self._choices // UNIT + self._lists
        sums = FP32 * units * model.index_block_size * model.index_head_dim
        # Gradients of queries and keys, and queries times the divergence's gradient.
        return sums + self.width * (2 * queries + self.num_keys * model.index_head_dim)

    @property
    def _choices(self) -> int:
        return self.tokens * self.model.num_key_value_heads * self.model.index_topk_blocks

    @property
    def _lists(self) -> int:
        pages = -(-self.num_keys // self.model.index_block_size)
        return min(self.model.num_key_value_heads * pages, self._choices)
