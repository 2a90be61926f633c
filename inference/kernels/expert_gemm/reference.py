"""The experts: sort token-expert pairs by expert, one pair of GEMMs for each expert."""

from itertools import pairwise
from types import EllipsisType

import torch
from torch import Tensor

from inference.kernels.mxfp8 import MXFP8Tensor
from inference.kernels.mxfp8 import reference as mxfp8
from inference.kernels.swiglu_oai.reference import swiglu_oai


def expert_gemm(
    x_TC: Tensor,
    w13_E2IC: Tensor | MXFP8Tensor,
    w2_ECI: Tensor | MXFP8Tensor,
    ids_TA: Tensor,
    weights_TA: Tensor,
    alpha: float,
    limit: float,
    beta: float,
    shared: tuple[Tensor | MXFP8Tensor, Tensor | MXFP8Tensor] | None = None,
) -> Tensor:
    num_experts = w13_E2IC.shape[0]
    experts_X, order_X = ids_TA.flatten().sort(stable=True)
    # Pairs with expert -1 come first and are passed over.
    bounds = torch.searchsorted(
        experts_X, torch.arange(num_experts + 1, device=ids_TA.device, dtype=ids_TA.dtype)
    ).tolist()
    tokens_X = order_X // ids_TA.shape[1]
    weights_X = weights_TA.flatten()[order_X]
    out_TC = torch.zeros(x_TC.shape, dtype=torch.float32, device=x_TC.device)
    for expert, (start, stop) in enumerate(pairwise(bounds)):
        if start == stop:
            continue
        tokens = tokens_X[start:stop]
        gate_up = x_TC[tokens].float() @ _widened(w13_E2IC, expert).T
        y = swiglu_oai(gate_up, alpha, limit, beta) @ _widened(w2_ECI, expert).T
        out_TC.index_add_(0, tokens, y * weights_X[start:stop, None])
    if shared is not None:
        gate_up = x_TC.float() @ _widened(shared[0], ...).T
        out_TC += swiglu_oai(gate_up, alpha, limit, beta) @ _widened(shared[1], ...).T
    return out_TC.to(x_TC.dtype)


def _widened(weight: Tensor | MXFP8Tensor, expert: int | EllipsisType) -> Tensor:
    """One expert's matrix in FP32; `...`: of a weight that is one matrix."""
    if isinstance(weight, MXFP8Tensor):
        return mxfp8.dequantize(weight.values[expert], weight.scale[expert], torch.float32)
    return weight[expert].float()
