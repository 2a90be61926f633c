"""Attention over the chosen blocks as one dense attention with a mask; gradients by autograd."""

import torch
from torch import Tensor

from inference.kernels.packed_queries import PaddedSamples, attend_padded, padded_samples
from inference.kernels.packing import Packing


def msa_varlen(
    q_QHD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    blocks_QKB: Tensor,
    packing: Packing,
    scale: float,
    block_size: int,
) -> Tensor:
    samples = padded_samples(packing)
    is_visible_RKXS = visible_keys(blocks_QKB, samples, block_size)
    return attend_padded(q_QHD, k_TKD, v_TKD, samples, is_visible_RKXS, scale)


def visible_keys(blocks_QKB: Tensor, samples: PaddedSamples, block_size: int) -> Tensor:
    """[R, K, X, S] bool: the key lies in a chosen block and not in the query's future.

    Raises:
        ValueError: a block id beyond the keys of all samples.
    """
    num_keys = samples.key_RS.shape[1]
    num_blocks = -(-num_keys // block_size)
    blocks_RKXB = samples.queries(blocks_QKB).transpose(1, 2).long()
    if bool((blocks_RKXB >= num_blocks).any()):
        raise ValueError(
            f"msa_varlen: block id {int(blocks_QKB.max())}; the longest sample has {num_blocks}"
        )
    # Places without a choice go to a column of their own.
    column_RKXB = torch.where(blocks_RKXB < 0, num_blocks, blocks_RKXB)
    is_chosen_RKXN = torch.zeros(
        (*column_RKXB.shape[:3], num_blocks + 1), dtype=torch.bool, device=blocks_QKB.device
    ).scatter_(-1, column_RKXB, True)
    is_chosen_RKXS = is_chosen_RKXN[..., :-1].repeat_interleave(block_size, -1)[..., :num_keys]
    return is_chosen_RKXS & samples.is_past_RXS[:, None]
