"""M3's activation between the two halves of an MLP."""

import torch
from torch import Tensor

from inference.kernels.dispatch import use_kernel
from inference.kernels.swiglu_oai import reference


def swiglu_oai(gate_up_TX: Tensor, *, alpha: float, limit: float, beta: float = 1.0) -> Tensor:
    """g · sigmoid(alpha · g) · (u + beta) with g = min(gate, limit), u = clamp(up, ±limit).

    FP32 inside (the CPU keeps FP64 FP64), one cast to the dtype of `gate_up_TX`. Differentiable,
    once on CUDA; kept for the backward pass: `gate_up_TX`. A clamp passes the gradient of a value
    at its limit, as torch's does.

    Args:
        gate_up_TX: [..., 2I], all gates and then all ups, never interleaved.

    Returns:
        [..., I].
    """
    on_gpu = use_kernel("swiglu_oai", gate_up_TX)
    if gate_up_TX.shape[-1] % 2:
        raise ValueError(f"swiglu_oai: width {gate_up_TX.shape[-1]} is not gates and as many ups")
    if on_gpu:
        if torch.is_grad_enabled():
            from inference.kernels.swiglu_oai.function import SwiGLU

            return SwiGLU.apply(gate_up_TX, alpha, limit, beta)
        from inference.kernels.swiglu_oai import kernel

        return kernel.swiglu_oai(gate_up_TX, alpha, limit, beta)
    return reference.swiglu_oai(gate_up_TX, alpha, limit, beta)
