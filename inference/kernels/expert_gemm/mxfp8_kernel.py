"""Routed experts with weights in MXFP8, widened on the way to the tensor cores.

As `kernel.py`: tiles of a plan, two grouped products, a sum. On Hopper a few rows an expert stream
each weight once (`mxfp8_decode_hopper_kernel`); more are arithmetic too (`mxfp8_gemm_kernel`, which
also serves other GPUs). How a call runs follows from shapes alone, so it can be captured in a CUDA
graph.
"""

import torch
from torch import Tensor

from inference.kernels.expert_gemm import mxfp8_gemm_kernel
from inference.kernels.expert_gemm.align_kernel import align
from inference.kernels.expert_gemm.kernel import combine, shared_mlp
from inference.kernels.hardware import USE_PDL, is_hopper
from inference.kernels.mxfp8 import MXFP8Tensor

MAX_FEW_ROWS = 4
"""Of an expert on average; up to here tiles of 8 rows hold nearly all experts'."""
MAX_UNPLANNED_TOKENS = 4
"""Whose tiles every program finds itself, which takes as long as a plan once there are more."""
MAX_SHARED_TOKENS = 8
"""Of one tile: up to here a shared expert in MXFP8 is one expert more. A second tile would read it
again."""


def expert_gemm(
    x_TC: Tensor,
    w13_E2IC: MXFP8Tensor,
    w2_ECI: MXFP8Tensor,
    ids_TA: Tensor,
    weights_TA: Tensor,
    alpha: float,
    limit: float,
    beta: float,
    shared: tuple[Tensor, Tensor] | tuple[MXFP8Tensor, MXFP8Tensor] | None = None,
    num_routed: int | None = None,
    *,
    config: tuple[int, int, int, int, int] | None = None,
) -> Tensor:
    """As `kernel.expert_gemm`; `config` chooses the kernel for few rows and how it is cut."""
    (num_tokens, topk), num_experts = ids_TA.shape, w13_E2IC.shape[0]
    x, ids, weights = (tensor.contiguous() for tensor in (x_TC, ids_TA, weights_TA))
    if not num_tokens:
        return torch.empty_like(x)
    act = alpha, limit, beta
    num_routed = num_experts if num_routed is None else num_routed
    is_few = num_tokens * topk <= MAX_FEW_ROWS * num_routed
    if config is None and not (is_few and _on_hopper(x, w2_ECI)):
        args = x, w13_E2IC, w2_ECI, ids, weights
        return mxfp8_gemm_kernel.grouped(*args, *act, shared, num_routed)
    from inference.kernels.expert_gemm import mxfp8_decode_hopper_kernel as hopper

    if config is None:
        cut = hopper.config_for(num_tokens, topk, num_routed)
    else:
        cut = hopper.Config(*config)
    is_one_more = (
        shared is not None
        and isinstance(shared[0], MXFP8Tensor)
        and shared[0].shape == w13_E2IC.shape[1:]
        and num_tokens <= MAX_SHARED_TOKENS
    )
    own = shared if is_one_more else None
    add_TC = None if is_one_more else shared_mlp(x, shared, *act)
    plan = None
    if num_tokens > MAX_UNPLANNED_TOKENS or num_tokens * topk > hopper.MAX_UNPLANNED.value:
        plan = align(ids, num_experts, cut.tokens, use_pdl=USE_PDL)
    y_XC = hopper.products(x, w13_E2IC, w2_ECI, ids, weights, plan, *act, own, cut)
    if is_one_more:
        add_TC = y_XC[num_tokens * topk :]
    return combine(y_XC, ids, add_TC, x.dtype, use_pdl=USE_PDL)


def _on_hopper(x_TC: Tensor, w2_ECI: MXFP8Tensor) -> bool:
    if not x_TC.is_cuda or not is_hopper(x_TC.device):
        return False
    from inference.kernels.expert_gemm.mxfp8_decode_hopper_kernel import fits

    return fits(x_TC, w2_ECI)
