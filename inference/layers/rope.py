"""The table of rotary angles shared by all layers, for keys and index keys alike."""

import torch
from torch import Tensor


def rope_table(
    rotary_dim: int, theta: float, num_positions: int, device: torch.device | str
) -> Tensor:
    """[num_positions, rotary_dim] FP32: cosines of the rotary_dim / 2 angles, then their sines.

    angle_i(p) = p · theta^(−2i / rotary_dim). The exponent counts the rotated dims, not the head's.
    Angles are FP32 products, as transformers computes them, so trainer and runtime rotate equally.
    """
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
    position = torch.arange(num_positions, dtype=torch.float32, device=device)
    angle = position[:, None] * (1.0 / theta**exponent)
    return torch.cat([angle.cos(), angle.sin()], dim=-1)
