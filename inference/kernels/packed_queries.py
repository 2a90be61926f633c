"""How the references see a packed row: a row for each sample, padded behind to the longest.

Suffixes: as in `packing`, and `X` queries of a sample · `S` keys of a sample · `G` query heads of a
KV head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from inference.kernels.packing import Packing


@dataclass(slots=True)
class PaddedSamples:
    """Samples with a query, their queries and the keys up to the last of these."""

    query_RX: Tensor
    """int64: place among the packed queries; 0 for padding."""
    is_query_RX: Tensor
    """bool: not padding."""
    position_RX: Tensor
    """int64: place in the sample; 0 for padding, which so sees its sample's first key alone."""
    key_RS: Tensor
    """int64: packed token; for padding some token, which no query sees there."""

    @property
    def is_past_RXS(self) -> Tensor:
        """bool: key s is not in the query's future."""
        place_S = torch.arange(self.key_RS.shape[1], device=self.key_RS.device)
        return place_S <= self.position_RX[..., None]

    def queries(self, x_Q: Tensor) -> Tensor:
        """[R, X, ...] of [Q, ...]."""
        return _rows(x_Q, self.query_RX)

    def keys(self, x_T: Tensor) -> Tensor:
        """[R, S, ...] of [T, ...]."""
        return _rows(x_T, self.key_RS)

    def packed(self, x_RX: Tensor) -> Tensor:
        """[Q, ...] of [R, X, ...]."""
        return x_RX.flatten(0, 1).index_select(0, self.is_query_RX.flatten().nonzero()[:, 0])


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """`x[index]`, whose gradient `index_select` adds much faster."""
    return x.index_select(0, index.flatten()).unflatten(0, index.shape)


def padded_samples(packing: Packing) -> PaddedSamples:
    seen, device = packing.seen, packing.positions_T.device
    query_len_R1, key_len_R1 = (
        torch.tensor(lens, device=device)[:, None] for lens in (seen.query_lens, seen.key_lens)
    )
    place_X = torch.arange(max(seen.query_lens), device=device)
    place_S = torch.arange(max(seen.key_lens), device=device)
    is_query_RX = place_X < query_len_R1
    query_RX = query_len_R1.cumsum(0) - query_len_R1 + place_X
    first_key_R1 = seen.first_key + key_len_R1.cumsum(0) - key_len_R1
    return PaddedSamples(
        query_RX=torch.where(is_query_RX, query_RX, 0),
        is_query_RX=is_query_RX,
        position_RX=torch.where(is_query_RX, key_len_R1 - query_len_R1 + place_X, 0),
        key_RS=(first_key_R1 + place_S).clamp(max=packing.num_tokens - 1),
    )


def attend_padded(
    q_QHD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    samples: PaddedSamples,
    is_visible_RKXS: Tensor,
    scale: float,
) -> Tensor:
    """[Q, H, D]: GQA of each query over the visible keys, zeros where none is visible.

    FP32 inside (FP64 for FP64 inputs). `is_visible_RKXS` may have a single KV head for all.
    """
    num_kv_heads = k_TKD.shape[1]
    is_low = q_QHD.dtype.itemsize < 4
    q_QHD, k_TKD, v_TKD = (x.float() if is_low else x for x in (q_QHD, k_TKD, v_TKD))
    # A softmax over nothing is NaN, and so are its gradients: such a query sees all, in vain.
    sees_RKX1 = is_visible_RKXS.any(-1, keepdim=True)
    is_visible_RKXS = (is_visible_RKXS | ~sees_RKX1).expand(-1, num_kv_heads, -1, -1)
    q_RKGXD = samples.queries(q_QHD).unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4)
    k_RKSD, v_RKSD = (samples.keys(x).transpose(1, 2) for x in (k_TKD, v_TKD))
    group = q_RKGXD.shape[2]
    # `Y`, pairs of sample and KV head, are the batch: the heads of a group share a mask.
    k_YGSD, v_YGSD = (x.flatten(0, 1)[:, None].expand(-1, group, -1, -1) for x in (k_RKSD, v_RKSD))
    out_YGXD = scaled_dot_product_attention(
        q_RKGXD.flatten(0, 1),
        k_YGSD,
        v_YGSD,
        attn_mask=is_visible_RKXS.flatten(0, 1)[:, None],
        scale=scale,
    )
    out_RKGXD = out_YGXD.unflatten(0, (-1, num_kv_heads))
    out_RKGXD = torch.where(sees_RKX1[:, :, None], out_RKGXD, 0.0)
    return samples.packed(out_RKGXD.permute(0, 3, 1, 2, 4).flatten(2, 3))
