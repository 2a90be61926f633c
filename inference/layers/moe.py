"""Mixture of experts: FP32 router, routed experts, one shared expert."""

import torch
from torch import Tensor, nn

from inference.config import ModelConfig
from inference.kernels.expert_gemm import expert_gemm
from inference.kernels.router import router
from inference.layers.linear import MLP, Linear, empty_parameter, empty_scale, with_scale
from inference.parallel.groups import ParallelGroups
from inference.parallel.moe import ParallelExperts


class Experts(nn.Module):
    """Weights of the routed experts: `w13` [E, 2 I, C] (gates, then ups) and `w2` [E, C, I]."""

    def __init__(
        self, num_experts: int, config: ModelConfig, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`num_experts`: that are held here."""
        super().__init__()
        E, C, I = num_experts, config.hidden_size, config.intermediate_size
        self.w13 = empty_parameter(E, 2 * I, C, dtype=dtype, device=device)
        self.w2 = empty_parameter(E, C, I, dtype=dtype, device=device)
        self.w13_scale, self.w2_scale = empty_scale(self.w13), empty_scale(self.w2)


class MoE(nn.Module):
    """y = shared(x) + Σ over the chosen experts of weight · expert(x), with several ranks over all
    of them."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        expert_dtype: torch.dtype | None = None,
        groups: ParallelGroups | None = None,
    ) -> None:
        """
        Args:
            config: with widths as they are here, but all experts.
            dtype: of the shared expert's weights.
            expert_dtype: of the others', if another.
            groups: the ranks that the experts are spread over; None: this one has them all.
        """
        super().__init__()
        E, C = config.num_local_experts, config.hidden_size
        self.num_experts = E
        self.topk, self.scale = config.num_experts_per_tok, config.routed_scaling_factor
        self.alpha, self.limit = config.swiglu_alpha, config.swiglu_limit
        self.beta = config.swiglu_beta
        self.gate = Linear(C, E, dtype=torch.float32, device=device)
        self.e_score_correction_bias = empty_parameter(E, dtype=torch.float32, device=device)
        num_held = E if groups is None else len(groups.config.experts(E, groups.rank))
        self.experts = Experts(num_held, config, dtype=expert_dtype or dtype, device=device)
        self.over_ranks = None if groups is None else ParallelExperts(groups, E)
        self.shared_experts = MLP(
            C,
            config.shared_intermediate_size,
            alpha=self.alpha,
            limit=self.limit,
            beta=self.beta,
            dtype=dtype,
            device=device,
        )

    def forward(self, x_TC: Tensor, max_tokens: int | None = None) -> tuple[Tensor, Tensor]:
        """(y_TC, chosen experts ids_TA int32).

        `max_tokens`: most of any dp group, the same number on all ranks; None: as here.
        """
        weights_TA, ids_TA = router(
            x_TC,
            self.gate.weight,
            self.e_score_correction_bias,
            topk=self.topk,
            scale=self.scale,
        )
        if self.over_ranks is None:
            return self.expert_sum(x_TC, ids_TA, weights_TA, with_shared=True), ids_TA
        y_TC = self.over_ranks(
            x_TC,
            ids_TA,
            weights_TA,
            self.expert_sum,
            self.shared_experts,
            max_tokens=len(x_TC) if max_tokens is None else max_tokens,
        )
        return y_TC, ids_TA

    def expert_sum(
        self, x_RC: Tensor, ids_RA: Tensor, weights_RA: Tensor, *, with_shared: bool
    ) -> Tensor:
        """[R, C] of the experts held here, by their place among them, and of the shared one."""
        shared = (self.shared_experts.gate_up_proj.matrix, self.shared_experts.down_proj.matrix)
        return expert_gemm(
            x_RC,
            with_scale(self.experts.w13, self.experts.w13_scale),
            with_scale(self.experts.w2, self.experts.w2_scale),
            ids_RA,
            weights_RA,
            alpha=self.alpha,
            limit=self.limit,
            beta=self.beta,
            shared=shared if with_shared else None,
            num_routed=self.num_experts,
        )
