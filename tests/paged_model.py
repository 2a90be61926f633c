"""The runtime's forward over paged memory, for tests: named requests, shuffled poisoned pages."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from inference.config import SPARSE
from inference.kernels.paging import LayerPages, PagedBatch
from inference.models.minimax_m3 import Capture, MiniMaxM3
from inference.models.weights import runtime_placement
from tests.tiny_models import model_config


def runtime_model(
    config_dict: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype = torch.float32,
) -> MiniMaxM3:
    """`MiniMaxM3` holding these published tensors."""
    config = model_config(config_dict)
    model = MiniMaxM3(config, dtype, "cpu")
    parameters = dict(model.named_parameters())
    placement = runtime_placement(config)
    for name, tensor in tensors.items():
        placement[name].view(parameters).copy_(tensor)
    return model


@dataclass(slots=True)
class Stored:
    """What the memory holds of one request."""

    pages: list[int] = field(default_factory=list)
    length: int = 0


class PagedModel:
    """A model, its pages (NaN where nothing was written), and the requests that live in them."""

    def __init__(self, model: MiniMaxM3, num_pages: int = 64, capture: bool = False) -> None:
        config = model.config
        self.model, self.page_size = model, config.index_block_size
        dtype = model.embed_tokens.weight.dtype
        kv = (num_pages, config.num_key_value_heads, self.page_size, config.head_dim)
        index = (num_pages, self.page_size, config.index_head_dim)
        self.pages = [
            LayerPages(
                torch.full(kv, torch.nan, dtype=dtype),
                torch.full(kv, torch.nan, dtype=dtype),
                torch.full(index, torch.nan, dtype=dtype) if kind == SPARSE else None,
            )
            for kind in config.layer_types
        ]
        num_slots = num_pages * self.page_size
        self.capture = None
        if capture:
            self.capture = Capture.allocate(config, num_slots, "cpu", routing=True, blocks=True)
        self.free = random.Random(0).sample(range(num_pages), num_pages)
        self.sequences: dict[str, Stored] = {}

    def share(self, source: str, target: str, num_tokens: int) -> None:
        """Start request `target` on the pages that hold the first `num_tokens` of `source`."""
        assert num_tokens % self.page_size == 0
        pages = self.sequences[source].pages[: num_tokens // self.page_size]
        self.sequences[target] = Stored(list(pages), num_tokens)

    def slots(self, request: str) -> Tensor:
        """[length] slot of every token of the request."""
        sequence = self.sequences[request]
        position = torch.arange(sequence.length)
        page = torch.tensor(sequence.pages)[position // self.page_size]
        return page * self.page_size + position % self.page_size

    def step(self, work: Mapping[str, Sequence[int]], num_padding: int = 0) -> dict[str, Tensor]:
        """Run the next tokens of several requests in one forward pass; their logits, [tokens, V].

        `num_padding` rows of one token and length 0 follow the real requests.
        """
        order = sorted(work, key=lambda request: len(work[request]) > 1)
        for request in order:
            sequence = self.sequences.setdefault(request, Stored())
            sequence.length += len(work[request])
            while len(sequence.pages) * self.page_size < sequence.length:
                sequence.pages.append(self.free.pop())
        batch = self._batch(order, [len(work[request]) for request in order], num_padding)
        ids = [token for request in order for token in work[request]] + [0] * num_padding
        input_ids = torch.tensor(ids, dtype=torch.int64)
        hidden = self.model(input_ids, batch, self.pages, self.capture)
        num_real = len(ids) - num_padding
        parts = self.model.logits(hidden[:num_real]).split([len(work[r]) for r in order])
        return dict(zip(order, parts, strict=True))

    def _batch(self, order: list[str], counts: list[int], num_padding: int) -> PagedBatch:
        lengths = [self.sequences[request].length for request in order]
        positions = [
            torch.arange(length - count, length)
            for length, count in zip(lengths, counts, strict=True)
        ]
        slots = [self.slots(request)[-count:] for request, count in zip(order, counts, strict=True)]
        padding = torch.zeros(num_padding, dtype=torch.int64)
        width = max((len(self.sequences[request].pages) for request in order), default=1)
        table = torch.full((len(order) + num_padding, width), -1, dtype=torch.int32)
        for row, request in enumerate(order):
            pages = torch.tensor(self.sequences[request].pages, dtype=torch.int32)
            table[row, : len(pages)] = pages
        all_counts = torch.tensor([0, *counts, *[1] * num_padding], dtype=torch.int32)
        return PagedBatch(
            positions_T=torch.cat([*positions, padding]),
            slots_T=torch.cat([*slots, padding - 1]),
            query_start_R1=all_counts.cumsum(0).int(),
            seq_len_R=torch.tensor([*lengths, *[0] * num_padding], dtype=torch.int32),
            page_table_RN=table,
            page_size=self.page_size,
            num_decodes=sum(count == 1 for count in counts),
            max_query_len=max([*counts, min(1, num_padding)], default=0),
            max_seq_len=max(lengths, default=0),
        )
