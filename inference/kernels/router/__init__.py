"""Which experts a token goes to and how much each one counts."""

import torch
from torch import Tensor

from inference.kernels.dispatch import expect_dtype, expect_shape, use_kernel
from inference.kernels.router import reference

OP = "router"


def router(
    x_TC: Tensor,
    weight_EC: Tensor,
    bias_E: Tensor,
    *,
    topk: int,
    scale: float,
    replay_ids_TA: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose `topk` experts by sigmoid score plus bias; weigh them by their scores alone.

    FP32 throughout, under any autocast (FP64 on the CPU if all inputs are). Ties go to the lower
    id. Gradients reach `x_TC` and `weight_EC` through the weights, never through the choice; where
    they are needed on CUDA the kernel chooses and the reference weighs.

    Args:
        x_TC: [T, C], any float dtype.
        weight_EC: [E, C] FP32.
        bias_E: [E] FP32, the correction bias.
        scale: `routed_scaling_factor`; every row of weights sums to it.
        replay_ids_TA: [T, A] of any integer dtype: take these experts instead of choosing; the
            weights still come from this call's scores. Every id must be a real expert: fill rows
            that were never recorded before the call. On CUDA nobody checks that (it would wait
            for the device), and an id that is no expert gets a weight that means nothing.

    Returns:
        (weights_TA FP32, ids_TA int32), best first, or in the order of `replay_ids_TA`.
    """
    on_gpu = use_kernel(OP, x_TC, weight_EC, bias_E, replay_ids_TA)
    num_tokens, hidden = x_TC.shape
    num_experts = weight_EC.shape[0]
    expect_shape(OP, "weight_EC", weight_EC, (num_experts, hidden))
    expect_shape(OP, "bias_E", bias_E, (num_experts,))
    dtype = torch.float64 if x_TC.dtype == torch.float64 and not on_gpu else torch.float32
    expect_dtype(OP, "weight_EC", weight_EC, dtype)
    expect_dtype(OP, "bias_E", bias_E, dtype)
    if not 1 <= topk <= num_experts:
        raise ValueError(f"{OP}: topk={topk} of {num_experts} experts")
    if replay_ids_TA is not None:
        expect_shape(OP, "replay_ids_TA", replay_ids_TA, (num_tokens, topk))
    if on_gpu:
        from inference.kernels.router import kernel

        needs_grad = torch.is_grad_enabled() and (x_TC.requires_grad or weight_EC.requires_grad)
        if not needs_grad:
            return kernel.router(x_TC, weight_EC, bias_E, topk, scale, replay_ids_TA)
        if replay_ids_TA is None:
            with torch.no_grad():
                replay_ids_TA = kernel.router(x_TC, weight_EC, bias_E, topk, scale, None)[1]
        return reference.router(x_TC, weight_EC, bias_E, topk, scale, replay_ids_TA)
    if replay_ids_TA is not None:
        is_bad_T = ((replay_ids_TA < 0) | (replay_ids_TA >= num_experts)).any(-1)
        if is_bad_T.any():
            token = int(is_bad_T.nonzero()[0])
            raise ValueError(
                f"{OP}: replay_ids_TA[{token}] = {replay_ids_TA[token].tolist()} names no "
                f"expert of 0..{num_experts - 1}; fill rows never recorded before replaying"
            )
    return reference.router(x_TC, weight_EC, bias_E, topk, scale, replay_ids_TA)
