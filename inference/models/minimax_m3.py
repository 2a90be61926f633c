"""MiniMax-M3, the text model: the whole forward, top to bottom.

Suffixes: `T` tokens packed over requests · `R` rows whose logits are wanted · `C` hidden ·
`V` vocabulary · `S` positions · `X` rotated dims · `A` experts per token · `K` KV heads ·
`B` selected blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from inference.config import MOE, SPARSE, ModelConfig
from inference.kernels.paging import LayerPages, PagedBatch
from inference.layers.attention import FullAttention, SparseAttention
from inference.layers.embedding import Embedding, Head
from inference.layers.linear import MLP
from inference.layers.moe import MoE
from inference.layers.norm import RMSNorm
from inference.layers.rope import rope_table
from inference.parallel.config import local_config
from inference.parallel.groups import ParallelGroups


class MiniMaxM3(nn.Module):
    """Weights and forward pass of one replica, or of one of its ranks.

    `parallel.shards.runtime_shards` says what lives where, for one rank
    `weights.runtime_placement` does.

    Parameters are allocated, not initialised: a load must fill every one before `forward`. `dtype`
    is that of weights, residual stream and pages; router and head run in FP32 whatever it is, and
    what `quantization` names (see `EngineConfig`) is held in MXFP8.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        max_positions: int | None = None,
        quantization: str = "none",
        groups: ParallelGroups | None = None,
    ) -> None:
        """
        Args:
            max_positions: length of the rotary table; None takes `max_position_embeddings`.
            groups: the ranks that hold the rest of the model, all of which run it together.
        """
        super().__init__()
        self.config, self.groups = config, groups
        local = config if groups is None else local_config(config, groups.config)
        device = torch.device(device)
        C, V, eps = config.hidden_size, config.vocab_size, config.rms_norm_eps
        self.embed_tokens = Embedding(V, C, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            DecoderLayer(
                local, i, dtype=dtype, quantization=quantization, device=device, groups=groups
            )
            for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(C, eps, dtype=dtype, device=device)
        self.lm_head = Head(V, C, dtype=dtype, device=device, groups=groups)
        if max_positions is None:
            max_positions = config.max_position_embeddings
        rope_SX = rope_table(config.rotary_dim, config.rope_theta, max_positions, device)
        self.rope_SX = nn.Buffer(rope_SX, persistent=False)

    def forward(
        self,
        input_ids_T: Tensor,
        batch: PagedBatch,
        pages: Sequence[LayerPages],
        capture: Capture | None = None,
        max_tokens: int | None = None,
    ) -> Tensor:
        """Run the tokens of one engine step; their keys go into `pages`, one entry a layer.

        Args:
            max_tokens: with several dp groups, the most tokens that any of them runs.

        Returns:
            hidden_TC after the final norm, in the model's dtype; `logits` wants rows of it.
        """
        stream_TC, update_TC = self.embed_tokens(input_ids_T), None
        for i, (layer, layer_pages) in enumerate(zip(self.layers, pages, strict=True)):
            assert isinstance(layer, DecoderLayer)
            x_TC, stream_TC = layer.input_layernorm(stream_TC, update_TC)
            update_TC, blocks_TKB = layer.self_attn(x_TC, self.rope_SX, batch, layer_pages)
            self._sum_over_tp(update_TC, "all-reduce of attention")
            x_TC, stream_TC = layer.post_attention_layernorm(stream_TC, update_TC)
            update_TC, experts_TA = layer.feed_forward(x_TC, max_tokens)
            if not layer.is_moe:  # experts have summed theirs
                self._sum_over_tp(update_TC, "all-reduce of an MLP")
            if capture is not None:
                capture.record(i, batch.slots_T, blocks_TKB, experts_TA)
        hidden_TC: Tensor = self.norm(stream_TC, update_TC)[0]
        return hidden_TC

    def _sum_over_tp(self, partial_TC: Tensor, what: str) -> None:
        """Complete, in place, what each tp rank has computed from its part of the weights."""
        if self.groups is not None and self.groups.config.tp > 1:
            self.groups.all_reduce(partial_TC, what).wait()

    def logits(self, hidden_RC: Tensor) -> Tensor:
        """[R, V] FP32 logits of rows of the hidden states."""
        logits_RV: Tensor = self.lm_head(hidden_RC)
        return logits_RV


class DecoderLayer(nn.Module):
    """The parts of one layer; the order in which they run stands in `MiniMaxM3.forward`."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        dtype: torch.dtype,
        quantization: str,
        device: torch.device,
        groups: ParallelGroups | None,
    ) -> None:
        super().__init__()
        C, eps = config.hidden_size, config.rms_norm_eps
        expert_dtype = dtype if quantization == "none" else torch.float8_e4m3fn
        weight_dtype = torch.float8_e4m3fn if quantization == "mxfp8_released" else dtype
        attention = SparseAttention if config.layer_types[layer] == SPARSE else FullAttention
        self.input_layernorm = RMSNorm(C, eps, dtype=dtype, device=device)
        self.self_attn = attention(config, dtype=dtype, weight_dtype=weight_dtype, device=device)
        self.post_attention_layernorm = RMSNorm(C, eps, dtype=dtype, device=device)
        self.is_moe = config.mlp_layer_types[layer] == MOE
        self.mlp: MoE | MLP
        if self.is_moe:
            self.mlp = MoE(
                config,
                dtype=weight_dtype,
                expert_dtype=expert_dtype,
                device=device,
                groups=groups,
            )
        else:
            self.mlp = MLP(
                C,
                config.dense_intermediate_size,
                alpha=config.swiglu_alpha,
                limit=config.swiglu_limit,
                beta=config.swiglu_beta,
                dtype=weight_dtype,
                device=device,
            )

    def feed_forward(
        self, x_TC: Tensor, max_tokens: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """(y_TC, chosen experts ids_TA, or None in a dense layer).

        With several tp ranks y_TC is the whole sum of experts, and this rank's part of an MLP.
        """
        if not self.is_moe:
            return self.mlp(x_TC), None
        y_TC, experts_TA = self.mlp(x_TC, max_tokens)
        return y_TC, experts_TA


@dataclass(slots=True)
class Capture:
    """The discrete choices of every token, kept at the token's slot, like its keys.

    So requests that share pages share these rows too. A place that no forward pass wrote holds
    expert 0 and block -1.
    """

    routing: Tensor | None
    """[num_slots + 1, MoE layers, A] uint8: experts; None when not captured. The last place is
    nobody's."""
    blocks: Tensor | None
    """[num_slots + 1, sparse layers, K, topk] int16 or int32: blocks, -1 padded; None likewise."""
    moe_layers: tuple[int, ...]
    sparse_layers: tuple[int, ...]

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        num_slots: int,
        device: torch.device | str,
        *,
        routing: bool,
        blocks: bool,
    ) -> Capture:
        """Room for `num_slots` tokens (pages times page size) of what is asked for."""
        if routing and config.num_local_experts > 256:
            raise ValueError(
                f"num_local_experts={config.num_local_experts}: captured experts are uint8, so at "
                "most 256; switch capture_routing off"
            )
        # One place more than there are slots takes what padding would write.
        routing_shape = (num_slots + 1, len(config.moe_layers), config.num_experts_per_tok)
        blocks_shape = (
            num_slots + 1,
            len(config.sparse_layers),
            config.num_key_value_heads,
            config.index_topk_blocks,
        )
        max_block = config.max_position_embeddings // config.index_block_size
        block_dtype = torch.int16 if max_block <= torch.iinfo(torch.int16).max else torch.int32
        return cls(
            torch.zeros(routing_shape, dtype=torch.uint8, device=device) if routing else None,
            torch.full(blocks_shape, -1, dtype=block_dtype, device=device) if blocks else None,
            config.moe_layers,
            config.sparse_layers,
        )

    def record(
        self, layer: int, slots_T: Tensor, blocks_TKB: Tensor | None, experts_TA: Tensor | None
    ) -> None:
        """Keep what `layer` chose for the tokens at `slots_T`; slot -1 (padding) goes to the last
        place, as -1 does in Python."""
        if self.routing is not None and experts_TA is not None:
            row = self.moe_layers.index(layer)
            self.routing[:, row].index_copy_(
                0, slots_T % len(self.routing), experts_TA.to(self.routing.dtype)
            )
        if self.blocks is not None and blocks_TKB is not None:
            row = self.sparse_layers.index(layer)
            self.blocks[:, row].index_copy_(
                0, slots_T % len(self.blocks), blocks_TKB.to(self.blocks.dtype)
            )
