"""SwiGLU with clamps, as M3's dense MLPs, routed experts and shared expert use it."""

import torch
from torch import Tensor


def swiglu_oai(gate_up_TX: Tensor, alpha: float, limit: float, beta: float) -> Tensor:
    dtype = torch.promote_types(gate_up_TX.dtype, torch.float32)
    gate, up = gate_up_TX.to(dtype).chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + beta)).to(gate_up_TX.dtype)
