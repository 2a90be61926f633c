"""The part of `train_attention` that trains the index branch: its alignment loss at M3's sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.harness import Bench, relative_error
from benchmarks.train_layer import BENCH
from benchmarks.train_measure import Random, as_trained, case_name, cost_of, free_memory
from benchmarks.train_shapes import Shapes
from inference.kernels.index_alignment import ALIGNMENT_LEVELS, index_alignment, reference
from inference.kernels.index_select_varlen import index_select_varlen
from inference.kernels.packing import Packing

TOLERANCE = {"divergence": 1e-3, "gradients": 1e-2}


class Alignment:
    """One sample's divergence of index scores from attention weights, summed over all queries."""

    def __init__(self, shapes: Shapes, num_tokens: int, level: str) -> None:
        config, random = shapes.config, Random(shapes.device, shapes.dtype)
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.packing = Packing.of([num_tokens], shapes.device)
        self.index_q = random.normal(num_tokens, kv_heads, config.index_head_dim)
        self.index_k = random.normal(num_tokens, config.index_head_dim)
        self.q = random.normal(num_tokens, heads, config.head_dim)
        self.k = random.normal(num_tokens, kv_heads, config.head_dim)
        self.blocks_TKB = index_select_varlen(
            self.index_q,
            self.index_k,
            self.packing,
            block_size=config.index_block_size,
            topk_blocks=config.index_topk_blocks,
            local_blocks=config.index_local_blocks,
        )
        self.rule: dict[str, Any] = {
            "scale": config.head_dim**-0.5,
            "index_scale": config.index_head_dim**-0.5,
            "block_size": config.index_block_size,
            "level": level,
        }

    def train(self) -> list[Tensor]:
        """(divergence, d index queries, d index keys)."""
        return self._train(index_alignment, self.index_q, self.index_k, self.q, self.k)

    def exact(self) -> list[Tensor]:
        wide = (x.float() for x in (self.index_q, self.index_k, self.q, self.k))
        return self._train(reference.index_alignment, *wide)

    def _train(self, op: Any, index_q: Tensor, index_k: Tensor, *others: Tensor) -> list[Tensor]:
        inputs = [x.detach().requires_grad_() for x in (index_q, index_k)]
        kl = op(*inputs, *others, self.blocks_TKB, self.packing, **self.rule)
        return [kl.detach(), *torch.autograd.grad(kl.mean(), inputs)]


def run(bench: Bench, shapes: Shapes) -> None:
    for level in ALIGNMENT_LEVELS:
        name = f"{case_name('index loss', shapes.expert_tokens)}, by {level}"
        bench.case(name, lambda level=level, name=name: _case(bench, shapes, name, level))


def _case(bench: Bench, shapes: Shapes, name: str, level: str) -> None:
    small = Alignment(shapes, shapes.checked_tokens, level)
    divergence, *grads = map(relative_error, small.train(), small.exact())
    del small
    free_memory()
    case = Alignment(shapes, shapes.expert_tokens, level)
    cost = cost_of(as_trained(case.train), shapes.device)
    bench.record(
        BENCH,
        name,
        cost.timing,
        correct={"divergence": divergence, "gradients": max(grads)},
        tolerance=TOLERANCE,
        value={"peak_gb": cost.peak_gb},
    )
