"""The experts one after the other over the choices that are theirs; gradients by autograd."""

from collections.abc import Sequence

import torch
from torch import Tensor

from inference.kernels.mxfp8 import MXFP8Tensor
from inference.kernels.mxfp8 import reference as mxfp8
from inference.kernels.swiglu_oai.reference import swiglu_oai


def experts_mlp(
    x_TC: Tensor,
    ids_TA: Tensor,
    weights_TA: Tensor,
    gate_up_ENC: Tensor | MXFP8Tensor,
    down_ECI: Tensor | MXFP8Tensor,
    *,
    alpha: float,
    limit: float,
) -> Tensor:
    ids_P = ids_TA.flatten().long()
    num_nobodys, *counts = (ids_P + 1).bincount(minlength=gate_up_ENC.shape[0] + 1).tolist()
    # Choices with expert -1 come first.
    order_X = ids_P.argsort(stable=True)[num_nobodys:]
    tokens_X = order_X // ids_TA.shape[1]
    dtype = torch.promote_types(x_TC.dtype, torch.float32)
    x_XC = x_TC.to(dtype).index_select(0, tokens_X)
    hidden_XI = swiglu_oai(_products(x_XC, gate_up_ENC, counts), alpha, limit, beta=1.0)
    y_XC = _products(hidden_XI, down_ECI, counts)
    y_XC = y_XC * weights_TA.flatten().index_select(0, order_X)[:, None]
    return y_XC.new_zeros(x_TC.shape).index_add(0, tokens_X, y_XC).to(x_TC.dtype)


def _products(rows_XK: Tensor, weight_ENK: Tensor | MXFP8Tensor, counts: list[int]) -> Tensor:
    """Each row times its expert's matrix, in the rows' dtype; `counts` rows an expert."""
    # unbind, whose backward stacks: indexing would fill a gradient of all experts for each.
    of_expert = list(zip(rows_XK.split(counts), _matrices(weight_ENK), strict=True))
    # Without any row one empty product remains: what nobody chose has gradient 0, not none.
    hit = [(rows, matrix) for rows, matrix in of_expert if len(rows)] or of_expert[:1]
    return torch.cat([rows @ _widened(matrix, rows.dtype).T for rows, matrix in hit])


def _matrices(weight_ENK: Tensor | MXFP8Tensor) -> Sequence[Tensor | MXFP8Tensor]:
    if isinstance(weight_ENK, MXFP8Tensor):
        return [MXFP8Tensor(*parts) for parts in zip(*weight_ENK, strict=True)]
    return weight_ENK.unbind(0)


def _widened(matrix: Tensor | MXFP8Tensor, dtype: torch.dtype) -> Tensor:
    if isinstance(matrix, MXFP8Tensor):
        return mxfp8.dequantize(*matrix, torch.float32).to(dtype)
    return matrix.to(dtype)
