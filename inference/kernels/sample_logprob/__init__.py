"""Draw the next token of every row and say how probable it was."""

import torch
from torch import Tensor

from inference.kernels.dispatch import expect_dtype, expect_shape, use_kernel
from inference.kernels.sample_logprob import reference
from inference.kernels.sample_logprob.reference import SampledTokens

__all__ = ["SampledTokens", "sample_logprob"]

OP = "sample_logprob"


def sample_logprob(
    logits_RV: Tensor,
    *,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    seeds_R: Tensor,
    positions_R: Tensor,
    has_cuts: bool | None = None,
) -> SampledTokens:
    """Sample from softmax(logits / temperature) cut by top-k, then top-p, then min-p.

    The noise is a pure function of (seed, position, vocabulary id): no state, and a row draws the
    same token in any batch. Temperature 0 takes the largest logit (the lowest id among equals),
    ignores the cuts, and reports the raw logprob in both places.

    Args:
        logits_RV: [R, V] FP32.
        temperature_R: FP32, >= 0.
        top_k_R: integer, exactly so many tokens stay (ties to the lower id); 0 keeps all.
        top_p_R: FP32 in (0, 1]; 1 keeps all.
        min_p_R: FP32 in [0, 1]: tokens below this share of the best one's probability go; 0 keeps
            all.
        seeds_R: int64, of the request.
        positions_R: int64, of the token being drawn in its request.
        has_cuts: whether any row has top-k, top-p or min-p, where the caller knows it. On CUDA
            None waits for the device to find out, and True runs the cuts in torch; only False can
            be captured in a graph.

    Returns:
        ids and logprobs; a row with NaN logits gets some id and a NaN logprob.
    """
    rows = {
        "temperature_R": temperature_R,
        "top_k_R": top_k_R,
        "top_p_R": top_p_R,
        "min_p_R": min_p_R,
        "seeds_R": seeds_R,
        "positions_R": positions_R,
    }
    on_cuda = use_kernel(OP, logits_RV, *rows.values())
    expect_dtype(OP, "logits_RV", logits_RV, torch.float32)
    for name, row in rows.items():
        expect_shape(OP, name, row, (logits_RV.shape[0],))
    for name in ("temperature_R", "top_p_R", "min_p_R"):
        expect_dtype(OP, name, rows[name], torch.float32)
    expect_dtype(OP, "top_k_R", top_k_R, torch.int64, torch.int32)
    expect_dtype(OP, "seeds_R", seeds_R, torch.int64)
    expect_dtype(OP, "positions_R", positions_R, torch.int64)
    args = (logits_RV, temperature_R, top_k_R, top_p_R, min_p_R, seeds_R, positions_R)
    if on_cuda:
        from inference.kernels.sample_logprob import kernel

        return kernel.sample_logprob(*args, has_cuts)
    return reference.sample_logprob(*args)
