"""The weighted sum of each token's routed experts, with gradients: the training form."""

import torch
from torch import Tensor

from inference.kernels.dispatch import expect_dtype, expect_shape, use_kernel
from inference.kernels.experts_mlp import reference
from inference.kernels.mxfp8 import MXFP8Tensor, tensors_of

OP = "experts_mlp"


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
    """Σ over a token's experts of weight · down · swiglu_oai(gate_up · x).

    Differentiable in `x_TC`, `weights_TA` and weights that are no `MXFP8Tensor`, each only if it
    is asked for. BF16 on CUDA runs in kernels: once differentiable, the same bits on every call,
    summed in FP32 in the order of `ids_TA`. Any other dtype and the CPU take the reference, FP32
    or wider inside, summed in ascending expert id, with one cast to the dtype of `x_TC`.

    The kernels scale the activation instead of the down product's result. That is equal up to
    rounding and makes the gradient of a weight a dot product of activations, so that no result of
    the down product is kept. Rounded to BF16 are gate_up's result, the scaled activation, down's
    result, and the output. Kept for the backward pass: `x_TC` and gate_up's result, 4I bytes for
    each choice that is not -1. The host waits for the device once a call, to learn how many
    choices each expert has; memory and work depend on these alone.

    Args:
        x_TC: [T, C].
        ids_TA: [T, A] int32 or int64 experts; -1 adds nothing (an expert held elsewhere). Nobody
            checks their range on CUDA.
        weights_TA: [T, A], `routed_scaling_factor` included; FP32 beside BF16 on CUDA. Where the
            id is -1 its gradient is 0.
        gate_up_ENC: [E, 2I, C], gate rows and then up rows; in MXFP8 if `down_ECI` is, which is
            widened one expert at a time.
        down_ECI: [E, C, I].

    Returns:
        [T, C], the dtype of `x_TC`.

    Raises:
        ValueError: shapes do not fit, or C or I is no multiple of 8 beside BF16 on CUDA (the
            grouped product needs rows of whole 16 bytes); on the CPU an id out of range.
    """
    on_cuda = use_kernel(OP, x_TC, ids_TA, weights_TA, *tensors_of(gate_up_ENC, down_ECI))
    num_tokens, hidden = x_TC.shape
    num_experts, double_width, _ = gate_up_ENC.shape
    if isinstance(gate_up_ENC, MXFP8Tensor) != isinstance(down_ECI, MXFP8Tensor):
        raise TypeError(f"{OP}: one of gate_up and down is MXFP8, the other is not")
    expect_shape(OP, "gate_up_ENC", tensors_of(gate_up_ENC)[0], (num_experts, double_width, hidden))
    expect_shape(OP, "down_ECI", tensors_of(down_ECI)[0], (num_experts, hidden, double_width // 2))
    expect_shape(OP, "ids_TA", ids_TA, (num_tokens, ids_TA.shape[-1]))
    expect_shape(OP, "weights_TA", weights_TA, tuple(ids_TA.shape))
    expect_dtype(OP, "ids_TA", ids_TA, torch.int32, torch.int64)
    for name, weight in (("gate_up_ENC", gate_up_ENC), ("down_ECI", down_ECI)):
        if isinstance(weight, Tensor):
            expect_dtype(OP, name, weight, x_TC.dtype)
    if on_cuda and x_TC.dtype == torch.bfloat16:
        expect_dtype(OP, "weights_TA", weights_TA, torch.float32)
        if hidden % 8 or double_width % 16:
            raise ValueError(f"{OP}: C={hidden} and I={double_width // 2} must be multiples of 8")
        from inference.kernels.experts_mlp.function import ExpertsMLP

        return ExpertsMLP.apply(x_TC, ids_TA, weights_TA, gate_up_ENC, down_ECI, alpha, limit)
    if not on_cuda and ids_TA.numel():
        low, high = int(ids_TA.min()), int(ids_TA.max())
        if low < -1 or high >= num_experts:
            raise ValueError(f"{OP}: ids_TA holds {low}..{high}, needs -1..{num_experts - 1}")
    return reference.experts_mlp(
        x_TC, ids_TA, weights_TA, gate_up_ENC, down_ECI, alpha=alpha, limit=limit
    )
