"""Mixture of experts: FP32 router, routed experts, one shared expert."""

import torch
from torch import Tensor, nn

from inference.config import ModelConfig
from inference.kernels.expert_gemm import expert_gemm
from inference.kernels.router import router
from inference.layers.linear import MLP, Linear, empty_parameter, empty_scale, with_scale


class Experts(nn.Module):
    """Weights of the routed experts: `w13` [E, 2 I, C] (gates, then ups) and `w2` [E, C, I]."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        E, C, I = config.num_local_experts, config.hidden_size, config.intermediate_size
        self.w13 = empty_parameter(E, 2 * I, C, dtype=dtype, device=device)
        self.w2 = empty_parameter(E, C, I, dtype=dtype, device=device)
        self.w13_scale, self.w2_scale = empty_scale(self.w13), empty_scale(self.w2)


class MoE(nn.Module):
    """y = shared(x) + Σ over the chosen experts of weight · expert(x)."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        expert_dtype: torch.dtype | None = None,
    ) -> None:
        """`dtype`: of the shared expert's weights; `expert_dtype`: of the others', if another."""
        super().__init__()
        E, C = config.num_local_experts, config.hidden_size
        self.topk, self.scale = config.num_experts_per_tok, config.routed_scaling_factor
        self.alpha, self.limit = config.swiglu_alpha, config.swiglu_limit
        self.beta = config.swiglu_beta
        self.gate = Linear(C, E, dtype=torch.float32, device=device)
        self.e_score_correction_bias = empty_parameter(E, dtype=torch.float32, device=device)
        self.experts = Experts(config, dtype=expert_dtype or dtype, device=device)
        self.shared_experts = MLP(
            C,
            config.shared_intermediate_size,
            alpha=self.alpha,
            limit=self.limit,
            beta=self.beta,
            dtype=dtype,
            device=device,
        )

    def forward(self, x_TC: Tensor) -> tuple[Tensor, Tensor]:
        """(y_TC, chosen experts ids_TA int32)."""
        weights_TA, ids_TA = router(
            x_TC,
            self.gate.weight,
            self.e_score_correction_bias,
            topk=self.topk,
            scale=self.scale,
        )
        y_TC = expert_gemm(
            x_TC,
            with_scale(self.experts.w13, self.experts.w13_scale),
            with_scale(self.experts.w2, self.experts.w2_scale),
            ids_TA,
            weights_TA,
            alpha=self.alpha,
            limit=self.limit,
            beta=self.beta,
            shared=(
                self.shared_experts.gate_up_proj.matrix,
                self.shared_experts.down_proj.matrix,
            ),
        )
        return y_TC, ids_TA
