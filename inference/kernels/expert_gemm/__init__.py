"""The weighted sum of each token's routed experts."""

from collections.abc import Callable

import torch
from torch import Tensor

from inference.kernels.dispatch import expect_dtype, expect_shape, use_kernel
from inference.kernels.expert_gemm import reference
from inference.kernels.mxfp8 import MXFP8Tensor, tensors_of

OP = "expert_gemm"


def expert_gemm(
    x_TC: Tensor,
    w13_E2IC: Tensor | MXFP8Tensor,
    w2_ECI: Tensor | MXFP8Tensor,
    ids_TA: Tensor,
    weights_TA: Tensor,
    *,
    alpha: float,
    limit: float,
    beta: float = 1.0,
    shared: tuple[Tensor | MXFP8Tensor, Tensor | MXFP8Tensor] | None = None,
    num_routed: int | None = None,
) -> Tensor:
    """Σ over a token's experts of weight · w2 · swiglu_oai(w13 · x), + the shared expert's.

    FP32 inside, summed in ascending expert id and the shared expert last, one cast to the dtype
    of `x_TC`. On CUDA tokens and weights have one dtype, the activation is rounded to it between
    the two products as in a dense MLP, and there are no gradients; from about 33 tokens on the
    shared expert is a dense MLP there, so its output too is rounded before it is added.

    Args:
        x_TC: [T, C].
        w13_E2IC: [E, 2I, C], gate rows and then up rows; in MXFP8 if `w2_ECI` is.
        w2_ECI: [E, C, I].
        ids_TA: [T, A] int32 experts; -1 adds nothing (padding, an expert held elsewhere). On CUDA
            nobody checks their range: that would wait for the device.
        weights_TA: [T, A] FP32, `routed_scaling_factor` included.
        shared: (gate rows and then up rows [2S, C], down [C, S]) of an expert that every token
            has with weight 1. On one whose width S is I it costs least. In MXFP8, both of them,
            beside routed experts in MXFP8 only.
        num_routed: experts that `ids_TA` was chosen among, those held elsewhere included (None:
            E). How the work is cut on CUDA depends on it, what is computed does not.

    Returns:
        [T, C].
    """
    weights = (w13_E2IC, w2_ECI, *(shared or ()))
    on_gpu = use_kernel(OP, x_TC, ids_TA, weights_TA, *tensors_of(*weights))
    _check_formats(*weights)
    num_tokens, hidden = x_TC.shape
    num_experts, double_width, _ = w13_E2IC.shape
    expect_shape(OP, "w13_E2IC", _values(w13_E2IC), (num_experts, double_width, hidden))
    expect_shape(OP, "w2_ECI", _values(w2_ECI), (num_experts, hidden, double_width // 2))
    expect_shape(OP, "ids_TA", ids_TA, (num_tokens, ids_TA.shape[-1]))
    expect_shape(OP, "weights_TA", weights_TA, tuple(ids_TA.shape))
    expect_dtype(OP, "ids_TA", ids_TA, torch.int32)
    expect_dtype(OP, "weights_TA", weights_TA, torch.float32)
    if shared is not None:
        shared_width = shared[1].shape[1]
        expect_shape(OP, "shared[0]", _values(shared[0]), (2 * shared_width, hidden))
        expect_shape(OP, "shared[1]", _values(shared[1]), (hidden, shared_width))
    if on_gpu:
        names = ("w13_E2IC", "w2_ECI", "shared[0]", "shared[1]")
        for name, weight in zip(names, weights, strict=False):
            if isinstance(weight, Tensor):
                expect_dtype(OP, name, weight, x_TC.dtype)
        run = _kernel(is_mxfp8=isinstance(w13_E2IC, MXFP8Tensor))
        return run(
            x_TC, w13_E2IC, w2_ECI, ids_TA, weights_TA, alpha, limit, beta, shared, num_routed
        )
    if ids_TA.numel() and not -1 <= int(ids_TA.min()) <= int(ids_TA.max()) < num_experts:
        raise ValueError(
            f"{OP}: ids_TA holds {int(ids_TA.min())}..{int(ids_TA.max())}, "
            f"needs -1..{num_experts - 1}"
        )
    return reference.expert_gemm(
        x_TC, w13_E2IC, w2_ECI, ids_TA, weights_TA, alpha, limit, beta, shared
    )


def _values(weight: Tensor | MXFP8Tensor) -> Tensor:
    return weight.values if isinstance(weight, MXFP8Tensor) else weight


def _check_formats(*weights: Tensor | MXFP8Tensor) -> None:
    """`weights`: w13, w2 and, where there is one, the two of the shared expert."""
    is_mxfp8 = [isinstance(weight, MXFP8Tensor) for weight in weights]
    w13, w2, *shared = is_mxfp8
    if w13 != w2 or len(set(shared)) > 1 or (any(shared) and not w13):
        formats = ["MXFP8" if is_it else "plain" for is_it in is_mxfp8]
        raise TypeError(
            f"{OP}: weights are {formats}; w13 and w2 have one format, both of the shared expert "
            "have one, and it is MXFP8 only beside routed experts in MXFP8"
        )


def _kernel(*, is_mxfp8: bool) -> Callable[..., Tensor]:
    if is_mxfp8:
        from inference.kernels.expert_gemm import mxfp8_kernel

        return mxfp8_kernel.expert_gemm
    from inference.kernels.expert_gemm import kernel

    return kernel.expert_gemm
