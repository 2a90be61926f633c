"""AdamW over FP32 masters with warm-up, clipping, and no step on numbers that are not finite."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import Tensor, nn

from m3rl.rank_group import RankGroup
from m3rl.rank_settings import OptimizerSettings

logger = logging.getLogger(__name__)


class Optimizer:
    """Steps a policy's trained parameters; all ranks take the same steps.

    The learning rate is a function of `num_steps` alone, so there is no schedule to save.
    """

    def __init__(self, module: nn.Module, settings: OptimizerSettings, group: RankGroup) -> None:
        self.num_steps = 0
        """Steps taken; skipped ones do not count."""
        self._settings = settings
        self._group = group
        self._trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        parameters = list(self._trained.values())
        groups: list[dict[str, Any]] = [
            {"params": [p for p in parameters if p.ndim > 1]},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            groups,
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )

    def step(self, loss: float) -> dict[str, float]:
        """Sum gradients over ranks, clip and step; gradients are cleared.

        Args:
            loss: of the step, over all ranks. A NaN may show here and not in the gradient, where a
                clamp has replaced it by 0; so the step is skipped when either is not finite.
        """
        parameters = self._trained.values()
        self._group.sum_gradients(parameters)
        clip = math.inf if self._settings.grad_clip is None else self._settings.grad_clip
        norm = float(self._group.accelerator.clip_grad_norm_(parameters, clip))
        lr = self._settings.lr_at(self.num_steps)
        is_finite = math.isfinite(norm) and math.isfinite(loss)
        if is_finite:
            for param_group in self._adamw.param_groups:
                param_group["lr"] = lr
            self._adamw.step()
            self.num_steps += 1
        else:
            logger.warning(
                "optimizer step %d skipped: loss %g, gradient norm %g", self.num_steps, loss, norm
            )
        self._adamw.zero_grad(set_to_none=True)
        return {
            "optim/lr": lr,
            "optim/grad_norm": norm,
            "optim/grad_norm_clipped": min(norm, clip),
            "optim/update_skipped": float(not is_finite),
        }

    def tensors(self) -> dict[str, Tensor]:
        """AdamW's moments and counters by parameter name, in its own memory; none before a step."""
        return {
            f"{name}.{kind}": tensor
            for name, parameter in self._trained.items()
            for kind, tensor in self._adamw.state[parameter].items()
        }

    def allocate(self) -> dict[str, Tensor]:
        """Zeroed `tensors()` to be filled from a checkpoint."""
        for parameter in self._trained.values():
            self._adamw.state[parameter] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        return self.tensors()
