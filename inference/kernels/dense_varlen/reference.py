"""Causal GQA as one dense attention with a mask; gradients by autograd."""

from torch import Tensor

from inference.kernels.packed_queries import attend_padded, padded_samples
from inference.kernels.packing import Packing


def dense_varlen(
    q_QHD: Tensor, k_TKD: Tensor, v_TKD: Tensor, packing: Packing, scale: float
) -> Tensor:
    samples = padded_samples(packing)
    return attend_padded(q_QHD, k_TKD, v_TKD, samples, samples.is_past_RXS[:, None], scale)
