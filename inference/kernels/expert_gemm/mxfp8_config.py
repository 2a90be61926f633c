"""How products with MXFP8 weights for many tokens are cut on Hopper."""

from typing import NamedTuple

import torch
import triton

from inference.kernels.hardware import num_multiprocessors

BOX = 32
"""Tokens that are fetched together, the shortest tile, and those of a tail."""
PROGRAM_ROWS = 256
"""Rows of weights that a program takes at once."""


class Config(NamedTuple):
    """How many tokens a tile has at most, and how many steps are on their way."""

    tokens: int
    """32, 64 or 128."""
    stages: int
    has_tail: bool = False
    """Whether an expert's last tile may have BOX more."""

    @property
    def tail_rows(self) -> int:
        """As `align` calls it."""
        return BOX if self.has_tail else 0


def config_of(rows: float) -> Config:
    """For `rows` tokens of an expert on average: few get more than a tile holds."""
    if rows <= 20:
        return Config(32, 5)
    if rows <= 44:
        return Config(64, 4)
    if rows <= 72:
        return Config(64, 3, True)
    return Config(128, 3, True)


def dense_config_of(num_tokens: int, num_rows: int, device: torch.device) -> Config:
    """For a weight of one expert: tiles that leave few multiprocessors without work."""
    # How long a step takes, about.
    configs = {Config(32, 5): 4, Config(64, 4): 5, Config(128, 3): 9}

    def cost(config: Config) -> int:
        num_tiles = triton.cdiv(num_tokens, config.tokens) * triton.cdiv(num_rows, PROGRAM_ROWS)
        return triton.cdiv(num_tiles, num_multiprocessors(device)) * configs[config]

    return min(configs, key=cost)
