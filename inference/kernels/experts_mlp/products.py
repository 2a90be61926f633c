"""Products of sorted rows with the matrices of their experts."""

import torch
from torch import Tensor

from inference.kernels.experts_mlp.choices import Choices
from inference.kernels.mxfp8 import MXFP8Tensor
from inference.kernels.mxfp8 import kernel as mxfp8


def product(
    rows_XK: Tensor, weight: Tensor | MXFP8Tensor, choices: Choices, *, transposed: bool
) -> Tensor:
    """Each row times its expert's matrix.

    Args:
        rows_XK: [X, K], contiguous.
        weight: [E, N, K] if `transposed`, else [E, K, N]. In MXFP8 the matrices of experts
            with rows are widened to the dtype of `rows_XK` one after the other.

    Returns:
        [X, N], FP32 inside and rounded once.
    """
    width = weight.shape[1] if transposed else weight.shape[2]
    if isinstance(weight, Tensor):
        if not choices.num_rows:
            return rows_XK.new_empty((0, width))
        matrices = weight.mT if transposed else weight
        return torch.nn.functional.grouped_mm(rows_XK, matrices, offs=choices.end_E)
    out_XN = rows_XK.new_empty((choices.num_rows, width))
    for expert, first, end in choices.hit:
        matrix = mxfp8.dequantize(weight.values[expert], weight.scale[expert], rows_XK.dtype)
        torch.mm(rows_XK[first:end], matrix.T if transposed else matrix, out=out_XN[first:end])
    return out_XN


def weight_gradient(grad_XN: Tensor, rows_XK: Tensor, choices: Choices) -> Tensor:
    """Σ over an expert's rows of grad · rowᵀ, [E, N, K]; zeros for an expert without rows.

    Only for a transposed first and a row-major second operand does torch's grouped product take
    groups of any number of rows, none included.
    """
    if not choices.num_rows:
        return grad_XN.new_zeros((len(choices.end_E), grad_XN.shape[1], rows_XK.shape[1]))
    return torch.nn.functional.grouped_mm(grad_XN.T, rows_XK, offs=choices.end_E)
