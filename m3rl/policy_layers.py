"""M3's decoder layer over packed tokens, top to bottom: what the modules of a policy compute.

transformers' modules hold the parameters; `install` gives those of one model, never the classes,
the forwards below. Choices of experts and blocks are made once a forward pass and kept, so that a
layer that is computed again for its gradient cannot choose otherwise.

Suffixes: `T` packed tokens · `C` hidden · `H` query heads · `K` KV heads · `D` head dim ·
`A` experts per token · `B` blocks per token · `X` rotated dims.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as m3

from inference.config import ModelConfig
from inference.kernels.dense_varlen import dense_varlen
from inference.kernels.experts_mlp import experts_mlp
from inference.kernels.index_alignment import index_alignment
from inference.kernels.index_select_varlen import index_select_varlen
from inference.kernels.msa_varlen import msa_varlen
from inference.kernels.packing import Packing
from inference.kernels.qk_norm_rope import qk_norm_rope
from inference.kernels.rms_norm import rms_norm
from inference.kernels.router import router
from inference.kernels.swiglu_oai import swiglu_oai
from m3rl.grpo.micro import token_ranges
from m3rl.grpo.replay import ChoiceObserver, Record
from m3rl.index_alignment import IndexLoss
from m3rl.parallel.exchange import Route, experts_across, gather_rows
from m3rl.parallel.mesh import RankMesh

ATTENTION = "m3rl_varlen"
"""Name of `varlen_attention` among transformers' attention implementations."""


@dataclass(slots=True)
class ForwardPass:
    """What the layers of one forward pass share, their recomputation in the backward included."""

    config: ModelConfig
    packing: Packing
    cos_sin_TX: Tensor
    """[T, X] FP32: cosines of X/2 angles, then their sines."""
    record: Record
    replays_experts: bool
    replays_blocks: bool
    stats: ChoiceObserver | None
    mesh: RankMesh | None = None
    """Of the ranks that share the model, and of those the packed row; None: this one alone."""
    index_loss: IndexLoss | None = None
    """Trains the index branch; None: it is frozen."""
    experts: dict[int, Tensor] = field(default_factory=dict)
    """Layer -> [T, A] int32, as used."""
    blocks: dict[int, Tensor] = field(default_factory=dict)
    """Layer -> [T, K, B] int32, as used."""
    routes: dict[int, Route] = field(default_factory=dict)
    """Layer -> where its tokens go, if experts are split over ranks."""

    @property
    def is_shared(self) -> bool:
        """Whether this rank computes a part of the packed tokens only."""
        return self.mesh is not None and self.mesh.sharers is not None

    def everyones(self, own_QX: Tensor) -> Tensor:
        """Values of this rank's tokens, [Q, ...], to those of all packed tokens, [T, ...]."""
        if self.mesh is None or self.mesh.sharers is None:
            return own_QX
        sizes = [count for _, count in token_ranges(self.packing.num_tokens, self.mesh.cp)]
        return gather_rows(own_QX, sizes, self.mesh.sharers)

    def route(self, layer: int, ids_TA: Tensor) -> Route | None:
        """Where the tokens of a layer go; None: nowhere, all experts are here."""
        if self.mesh is None or self.mesh.expert_groups is None:
            return None
        if layer not in self.routes:
            num_own = self.config.num_local_experts // self.mesh.split.ep
            self.routes[layer] = Route.of(ids_TA, num_own, self.mesh.expert_groups)
        return self.routes[layer]

    def keep_experts(self, layer: int, own_TA: Tensor) -> None:
        """Settle the experts of a layer: the router's own choice, or the record's."""
        ordinal, record = self.config.moe_layers.index(layer), self.record.experts
        used_TA = own_TA
        if record is not None and self.replays_experts:
            used_TA = record.instead_of(ordinal, own_TA)
        if self.stats is not None:
            self.stats.add_experts(ordinal, own_TA, used_TA, record)
        self.experts[layer] = used_TA

    def keep_blocks(self, layer: int, own_TKB: Tensor) -> None:
        """Settle the blocks of a layer: the indexer's own choice, or the record's."""
        ordinal, record = self.config.sparse_layers.index(layer), self.record.blocks
        used_TKB = own_TKB
        if record is not None and self.replays_blocks:
            used_TKB = record.instead_of(ordinal, own_TKB)
        if self.stats is not None:
            self.stats.add_blocks(ordinal, own_TKB, record)
        self.blocks[layer] = used_TKB


def install(module: nn.Module) -> None:
    """Give every module in it that has one below its forward over packed tokens."""
    for part in module.modules():
        forward = _FORWARDS.get(type(part))
        if forward is not None:
            part.forward = MethodType(forward, part)


def cos_sin(rotary: Any, positions_T: Tensor) -> Tensor:
    """[T, X] FP32: cosines and sines of the angles of `rotary`, transformers' module."""
    angles_TX = positions_T[:, None] * rotary.inv_freq.to(torch.float32)
    return torch.cat([angles_TX.cos(), angles_TX.sin()], -1) * rotary.attention_scaling


def decoder_layer(self: Any, x_TC: Tensor, layer: int, run: ForwardPass) -> Tensor:
    attended_TC = self.self_attn(self.input_layernorm(x_TC), layer, run)
    normed_TC, x_TC = self.post_attention_layernorm(attended_TC, x_TC)
    if layer in run.config.moe_layers:
        return x_TC + self.mlp(normed_TC, layer, run)
    return x_TC + self.mlp(normed_TC)


def attention(self: Any, x_TC: Tensor, layer: int, run: ForwardPass) -> Tensor:
    heads = (-1, self.head_dim)
    q_THD, k_TKD, v_TKD = (
        project(x_TC).unflatten(-1, heads) for project in (self.q_proj, self.k_proj, self.v_proj)
    )
    q_THD = norm_rope(q_THD, self.q_norm, run)
    k_TKD = norm_rope(k_TKD, self.k_norm, run)
    if run.is_shared:  # keys and values side by side: one exchange for both
        kv_TJD = run.everyones(torch.cat([k_TKD, v_TKD], 1))
        k_TKD, v_TKD = (x.contiguous() for x in kv_TJD.chunk(2, 1))
    blocks = None
    if self.indexer is not None:
        blocks = self.indexer(x_TC, layer, run).transpose(0, 1)[None]
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_TKD, v_TKD))
    out, _ = varlen_attention(
        self, q, k, v, None, scaling=self.scaling, packing=run.packing, block_indices=blocks
    )
    out_TC = self.o_proj(out[0].flatten(1))
    if blocks is None or run.index_loss is None:
        return out_TC
    main = q_THD, k_TKD
    return with_index_loss(self, out_TC, x_TC.detach(), main, layer, run, run.index_loss)


def with_index_loss(
    self: Any,
    out_TC: Tensor,
    x_TC: Tensor,
    main: tuple[Tensor, Tensor],
    layer: int,
    run: ForwardPass,
    loss: IndexLoss,
) -> Tensor:
    """`out_TC`, what attention over blocks made of the queries and keys `main`; its gradient brings
    that of the index branch along."""
    q_THD, k_TKD = main
    index_q_TKD, index_k_TD = index_heads(self.indexer, x_TC, run)
    kl_TK = index_alignment(
        index_q_TKD,
        index_k_TD,
        q_THD,
        k_TKD,
        run.blocks[layer],
        run.packing,
        scale=self.scaling,
        index_scale=self.indexer.head_dim**-0.5,
        block_size=self.indexer.block_size,
        level=loss.settings.level,
    )
    return loss.attach(out_TC, kl_TK, layer, run.packing.first)


def varlen_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    packing: Packing,
    block_indices: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """An attention implementation of transformers' M3 over one packed row (`ATTENTION`).

    Args:
        query: [1, H, T, D]; `key` and `value` [1, K, T, D].
        attention_mask: None: what a token sees follows from `packing` and `block_indices`.
        block_indices: [1, K, T, B], -1 at the end; None on a full-attention layer.

    Returns:
        ([1, T, H, D], None)
    """
    if attention_mask is not None or query.shape[0] != 1:
        raise ValueError(
            f"{ATTENTION} takes one packed row and no mask, got {query.shape[0]} rows"
            f"{'' if attention_mask is None else ' and a mask'}"
        )
    q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1) for x in (query, key, value))
    if block_indices is None:
        out_THD = dense_varlen(q_THD, k_TKD, v_TKD, packing, scale=scaling)
    else:
        blocks_TKB = block_indices[0].transpose(0, 1).int()
        size = module.indexer.block_size
        out_THD = msa_varlen(
            q_THD, k_TKD, v_TKD, blocks_TKB, packing, scale=scaling, block_size=size
        )
    return out_THD[None], None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, varlen_attention)


def choose_blocks(self: Any, x_TC: Tensor, layer: int, run: ForwardPass) -> Tensor:
    """[T, K, B] int32: key blocks that each token reads. A choice has no gradient."""
    if layer not in run.blocks:
        with torch.no_grad():
            own_TKB = index_select_varlen(
                *index_heads(self, x_TC, run),
                run.packing,
                block_size=self.block_size,
                topk_blocks=self.topk_blocks,
                local_blocks=self.local_blocks,
            )
        run.keep_blocks(layer, own_TKB)
    return run.blocks[layer]


def index_heads(self: Any, x_TC: Tensor, run: ForwardPass) -> tuple[Tensor, Tensor]:
    """(index queries [Q, K, D] of this rank's tokens, index keys [T, D] of all)."""
    heads = (-1, self.head_dim)
    q_QKD = norm_rope(self.q_proj(x_TC).unflatten(-1, heads), self.q_norm, run)
    k_Q1D = norm_rope(self.k_proj(x_TC).unflatten(-1, heads), self.k_norm, run)
    return q_QKD, run.everyones(k_Q1D[:, 0])


def mixture(self: Any, x_TC: Tensor, layer: int, run: ForwardPass) -> Tensor:
    weights_TA, ids_TA = self.gate(x_TC, layer, run)
    route = run.route(layer, ids_TA)
    return self.experts(x_TC, ids_TA, weights_TA, route) + self.shared_experts(x_TC)


def route(self: Any, x_TC: Tensor, layer: int, run: ForwardPass) -> tuple[Tensor, Tensor]:
    """(weights_TA, ids_TA): the choice is made or replayed once, weights come from the scores."""
    args = (x_TC, self.weight, self.e_score_correction_bias)
    topk, scale = self.top_k, run.config.routed_scaling_factor
    if layer not in run.experts:
        with torch.no_grad():
            _, own_TA = router(*args, topk=topk, scale=scale)
        run.keep_experts(layer, own_TA)
    return router(*args, topk=topk, scale=scale, replay_ids_TA=run.experts[layer])


def experts(
    self: Any, x_TC: Tensor, ids_TA: Tensor, weights_TA: Tensor, route: Route | None = None
) -> Tensor:
    """Without a route all experts are here."""

    def own(x_XC: Tensor, ids_XA: Tensor, weights_XA: Tensor) -> Tensor:
        return experts_mlp(
            x_XC,
            ids_XA,
            weights_XA,
            self.gate_up_proj,
            self.down_proj,
            alpha=self.swiglu_alpha,
            limit=self.swiglu_limit,
        )

    if route is None:
        return own(x_TC, ids_TA, weights_TA)
    return experts_across(x_TC, weights_TA, route, own)


def dense_mlp(self: Any, x_TC: Tensor) -> Tensor:
    """Of dense layers, and the shared expert."""
    gate_up_TX = self.gate_up_proj(x_TC)
    return self.down_proj(swiglu_oai(gate_up_TX, alpha=self.swiglu_alpha, limit=self.swiglu_limit))


def norm(self: Any, x_TC: Tensor, *residual_TC: Tensor) -> Any:
    """The norm; with a residual (norm of the sum, the sum)."""
    return rms_norm(x_TC, self.weight, self.eps, *residual_TC)


def norm_rope(x_THD: Tensor, norm: Any, run: ForwardPass) -> Tensor:
    return qk_norm_rope(x_THD, norm.weight, run.cos_sin_TX, eps=norm.eps)


_FORWARDS: dict[type, Any] = {
    m3.MiniMaxM3VLDecoderLayer: decoder_layer,
    m3.MiniMaxM3VLAttention: attention,
    m3.MiniMaxM3VLIndexer: choose_blocks,
    m3.MiniMaxM3VLSparseMoeBlock: mixture,
    m3.MiniMaxM3VLTopKRouter: route,
    m3.MiniMaxM3VLExperts: experts,
    m3.MiniMaxM3VLDenseMLP: dense_mlp,
    m3.MiniMaxM3VLRMSNorm: norm,
}
