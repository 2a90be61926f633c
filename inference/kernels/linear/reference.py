"""The product with a weight, in the dtype of both or in FP32 from operands of any dtype."""

import torch
from torch import Tensor

from inference.kernels.mxfp8 import MXFP8Tensor
from inference.kernels.mxfp8 import reference as mxfp8
from inference.kernels.swiglu_oai import reference as swiglu_oai

MAX_ROWS = 16384
"""Weight rows widened at a time: 402 MB for M3's head, not the whole 4.9 GB."""


def linear(
    x_TX: Tensor,
    weight_YX: Tensor | MXFP8Tensor,
    out_dtype: torch.dtype | None,
    swiglu: tuple[float, float, float] | None,
) -> Tensor:
    if isinstance(weight_YX, MXFP8Tensor):
        y_TY = torch.cat(
            [
                linear(x_TX, mxfp8.dequantize(values, scale, x_TX.dtype), out_dtype, None)
                for values, scale in zip(
                    *(torch.split(w, MAX_ROWS) for w in weight_YX), strict=True
                )
            ],
            dim=-1,
        )
    elif out_dtype == torch.float32:
        y_TY = _linear_fp32(x_TX, weight_YX)
    else:
        y_TY = torch.nn.functional.linear(x_TX, weight_YX)
    return y_TY if swiglu is None else swiglu_oai.swiglu_oai(y_TY, *swiglu)


def _linear_fp32(x_TX: Tensor, weight_YX: Tensor) -> Tensor:
    x_TX = x_TX.float()
    with torch.autocast(device_type=x_TX.device.type, enabled=False):
        chunks = [x_TX @ rows.float().T for rows in torch.split(weight_YX, MAX_ROWS)]
    return torch.cat(chunks, dim=-1)
