"""Self-attention over paged memory: full causal GQA, and MSA, which reads only selected blocks."""

import torch
from torch import Tensor, nn

from inference.config import ModelConfig
from inference.kernels.index_select import index_select
from inference.kernels.msa_attention import msa_attention
from inference.kernels.paged_attention import paged_attention
from inference.kernels.paging import LayerPages, PagedBatch
from inference.kernels.qk_norm_rope_write import QKNorms, qk_norm_rope_write
from inference.layers.linear import Linear, empty_parameter


class HeadNorm(nn.Module):
    """Gain of a norm over the head dim, applied inside `qk_norm_rope_write`."""

    def __init__(self, size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = empty_parameter(size, dtype=dtype, device=device)


class FullAttention(nn.Module):
    """Every token reads all keys of its request up to itself."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        weight_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`weight_dtype`: of the projections; `dtype`: of the norms."""
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        self.scale = self.head_dim**-0.5
        width = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim + self.index_width(config)
        self.qkv_proj = Linear(config.hidden_size, width, dtype=weight_dtype, device=device)
        self.o_proj = Linear(
            self.num_heads * self.head_dim, config.hidden_size, dtype=weight_dtype, device=device
        )
        self.q_norm = HeadNorm(self.head_dim, dtype=dtype, device=device)
        self.k_norm = HeadNorm(self.head_dim, dtype=dtype, device=device)

    @staticmethod
    def index_width(config: ModelConfig) -> int:
        """Rows of `qkv_proj` behind q, k and v."""
        return 0

    def norms(self) -> QKNorms:
        return QKNorms(q=self.q_norm.weight, k=self.k_norm.weight)

    def project_and_write(
        self, x_TC: Tensor, rope_SX: Tensor, batch: PagedBatch, pages: LayerPages
    ) -> tuple[Tensor, Tensor | None]:
        """(q_THD, index_q_TKD or None); keys, values and index keys go into their pages."""
        return qk_norm_rope_write(
            self.qkv_proj(x_TC),
            self.norms(),
            rope_SX,
            batch,
            pages,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            eps=self.eps,
        )

    def forward(
        self, x_TC: Tensor, rope_SX: Tensor, batch: PagedBatch, pages: LayerPages
    ) -> tuple[Tensor, Tensor | None]:
        """(y_TC, None): nothing is selected here."""
        q_THD, _ = self.project_and_write(x_TC, rope_SX, batch, pages)
        out_THD = paged_attention(q_THD, pages, batch, scale=self.scale)
        return self.o_proj(out_THD.flatten(1)), None


class SparseAttention(FullAttention):
    """MSA: each (token, KV head) reads `topk_blocks` key blocks chosen by the index branch."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        weight_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(config, dtype=dtype, weight_dtype=weight_dtype, device=device)
        self.topk_blocks, self.local_blocks = config.index_topk_blocks, config.index_local_blocks
        self.index_q_norm = HeadNorm(config.index_head_dim, dtype=dtype, device=device)
        self.index_k_norm = HeadNorm(config.index_head_dim, dtype=dtype, device=device)

    @staticmethod
    def index_width(config: ModelConfig) -> int:
        return (config.index_n_heads + 1) * config.index_head_dim

    def norms(self) -> QKNorms:
        return QKNorms(
            q=self.q_norm.weight,
            k=self.k_norm.weight,
            index_q=self.index_q_norm.weight,
            index_k=self.index_k_norm.weight,
        )

    def forward(
        self, x_TC: Tensor, rope_SX: Tensor, batch: PagedBatch, pages: LayerPages
    ) -> tuple[Tensor, Tensor | None]:
        """(y_TC, selected blocks_TKB int32)."""
        q_THD, index_q_TKD = self.project_and_write(x_TC, rope_SX, batch, pages)
        assert index_q_TKD is not None, "an MSA layer has index norms and index pages"
        assert pages.index_pages is not None
        blocks_TKB = index_select(
            index_q_TKD,
            pages.index_pages,
            batch,
            topk_blocks=self.topk_blocks,
            local_blocks=self.local_blocks,
        )
        out_THD = msa_attention(q_THD, pages, blocks_TKB, batch, scale=self.scale)
        return self.o_proj(out_THD.flatten(1)), blocks_TKB
