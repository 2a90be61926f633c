"""AdamW over FP32 masters with warm-up, clipping, and no step on numbers that are not finite.

Works on what this rank owns of each parameter: with several ranks every master, its gradient and
its moments exist once.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from m3rl.rank_group import RankGroup
from m3rl.rank_settings import OptimizerSettings

logger = logging.getLogger(__name__)

CLIP_EPS = 1e-6
"""Added to the norm that divides, as `torch.nn.utils.clip_grad_norm_` does."""
CHUNK_BYTES = 256 << 20
"""Moments that lie on the host come to the device in runs of about so many bytes."""


class Trainable(Protocol):
    """What is trained, a `Policy`."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def sum_gradients(self) -> None:
        """Add gradients over ranks, as far as backward passes did not."""

    def stepped(self) -> None:
        """Take note of a step."""


@dataclass(slots=True)
class _Trained:
    """A parameter, or this rank's part of it, with AdamW's state."""

    parameter: nn.Parameter
    master: Tensor
    """In the parameter's own memory."""
    decays: bool
    step: Tensor
    moments: tuple[Tensor, Tensor] | None = None
    """None before the first step."""

    @property
    def grad(self) -> Tensor | None:
        grad = self.parameter.grad
        return _own(grad) if grad is not None else None


class Optimizer:
    """Steps a policy's trained parameters; all ranks take the same steps.

    The learning rate is a function of `num_steps` alone, so there is no schedule to save. With
    `offload` the moments lie in pinned memory of the host, which saves two thirds of what training
    adds to masters and gradients; a step carries them over and back.
    """

    def __init__(self, module: Trainable, settings: OptimizerSettings, group: RankGroup) -> None:
        self.num_steps = 0
        """Steps taken; skipped ones do not count."""
        self._module = module
        self._settings = settings
        self._group = group
        self._trained = {
            self._state_name(name, parameter): _Trained(
                parameter,
                _own(parameter.detach()),
                decays=parameter.ndim > 1,
                step=torch.zeros((), device=parameter.device),
            )
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }

    def _state_name(self, name: str, parameter: Tensor) -> str:
        """Experts of another group are other tensors."""
        mesh = self._group.mesh
        if mesh is None or mesh.split.ep == 1 or not isinstance(parameter, DTensor):
            return name
        if parameter.device_mesh != mesh.expert_ranks:
            return name
        return f"{name}.experts_of_{mesh.split.expert_group(mesh.rank)}"

    @torch.no_grad()
    def step(self, loss: float) -> dict[str, float]:
        """Clip gradients, as sums over ranks, and step; they are cleared.

        Args:
            loss: of the step, over all ranks. A NaN may show here and not in the gradient, where a
                clamp has replaced it by 0; so the step is skipped when either is not finite.
        """
        clip = math.inf if self._settings.grad_clip is None else self._settings.grad_clip
        self._module.sum_gradients()
        norm = self._grad_norm()
        lr = self._settings.lr_at(self.num_steps)
        is_finite = math.isfinite(norm) and math.isfinite(loss)
        if is_finite:
            self._update(lr, min(1.0, clip / (norm + CLIP_EPS)))
            self._module.stepped()
            self.num_steps += 1
        else:
            logger.warning(
                "optimizer step %d skipped: loss %g, gradient norm %g", self.num_steps, loss, norm
            )
        for trained in self._trained.values():
            trained.parameter.grad = None
        return {
            "optim/lr": lr,
            "optim/grad_norm": norm,
            "optim/grad_norm_clipped": min(norm, clip),
            "optim/update_skipped": float(not is_finite),
        }

    def _grad_norm(self) -> float:
        """L2 norm of the whole gradient; each rank adds what it owns, rank 0 what all hold."""
        is_first = self._group.rank == 0
        mine = [t for t in self._trained.values() if is_first or isinstance(t.parameter, DTensor)]
        grads = [grad for t in mine if (grad := t.grad) is not None and grad.numel()]
        squares = torch.zeros((), dtype=torch.float64, device=self._group.device)
        if grads:
            norms = torch._foreach_norm(grads)
            squares = torch.stack([norm.double().square() for norm in norms]).sum()
        return float(self._group.sum(squares).sqrt())

    def _update(self, lr: float, scale: float) -> None:
        settings = self._settings
        for decays, run in self._runs():
            grads = [grad for _, grad in run]
            # AdamW divides by it as it reads them.
            divisor = torch.full((), 1 / scale, device=grads[0].device) if scale < 1 else None
            kept = [self._moments(trained) for trained, _ in run]
            here = [m.to(grads[0].device, non_blocking=True) for pair in kept for m in pair]
            adamw(
                [trained.master for trained, _ in run],
                grads,
                here[::2],
                here[1::2],
                [],
                [trained.step for trained, _ in run],
                fused=True,
                grad_scale=divisor,
                amsgrad=False,
                beta1=settings.betas[0],
                beta2=settings.betas[1],
                lr=lr,
                weight_decay=settings.weight_decay if decays else 0.0,
                eps=settings.eps,
                maximize=False,
            )
            if settings.offload:
                for old, new in zip((m for pair in kept for m in pair), here, strict=True):
                    old.copy_(new, non_blocking=True)

    def _runs(self) -> Iterator[tuple[bool, list[tuple[_Trained, Tensor]]]]:
        """(is decayed, [(parameter, its gradient)]): all at once, or as much as may come over."""
        most = CHUNK_BYTES if self._settings.offload else sys.maxsize
        for decays in (True, False):
            run: list[tuple[_Trained, Tensor]] = []
            held = 0
            for trained in self._trained.values():
                grad = trained.grad
                if trained.decays != decays or grad is None or not grad.numel():
                    continue
                if run and held + grad.nbytes > most:
                    yield decays, run
                    run, held = [], 0
                run.append((trained, grad))
                held += grad.nbytes
            if run:
                yield decays, run

    def _moments(self, trained: _Trained) -> tuple[Tensor, Tensor]:
        if trained.moments is None:
            trained.moments = self._fresh_moments(trained.master)
        return trained.moments

    def _fresh_moments(self, master: Tensor) -> tuple[Tensor, Tensor]:
        if not self._settings.offload:
            return torch.zeros_like(master), torch.zeros_like(master)
        return _on_host(master), _on_host(master)

    def tensors(self) -> dict[str, Tensor]:
        """AdamW's moments and counters by parameter name, in its own memory; none before a step.

        Those of sharded parameters are DTensors.
        """
        if self._settings.offload and torch.cuda.is_available():
            torch.cuda.synchronize()  # copies to the host may be under way
        named: dict[str, Tensor] = {}
        for name, trained in self._trained.items():
            if trained.moments is not None:
                first, second = trained.moments
                named |= {
                    f"{name}.step": trained.step,
                    f"{name}.exp_avg": _like(trained.parameter, first),
                    f"{name}.exp_avg_sq": _like(trained.parameter, second),
                }
        return named

    def allocate(self) -> dict[str, Tensor]:
        """Zeroed `tensors()` to be filled from a checkpoint."""
        for trained in self._trained.values():
            trained.step.zero_()
            trained.moments = None
            if trained.master.numel():
                trained.moments = self._fresh_moments(trained.master)
        return self.tensors()


def _own(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        local: Tensor = tensor.to_local()
        return local
    return tensor


def _on_host(like: Tensor) -> Tensor:
    return torch.zeros(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)


def _like(parameter: Tensor, own: Tensor) -> Tensor:
    """This rank's part of a state, as part of a tensor that is sharded like `parameter`."""
    if not isinstance(parameter, DTensor):
        return own
    return DTensor.from_local(
        own,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
