"""Training as transformers has it: right-padded rows, SDPA with a dense mask, grouped products for
the experts, checkpointing by layer; BF16 weights beside FP32 masters, as mixed precision is done
where autocast does not reach the experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import MiniMaxM3VLForCausalLM, MiniMaxM3VLTextConfig

from benchmarks.train_measure import model_config
from m3rl.rank_settings import OptimizerSettings

IGNORED = -100


@torch.no_grad()
def fill(weights: Mapping[str, Tensor]) -> None:
    """Random values in place, the same for the same names, shapes and device."""
    for index, (name, weight) in enumerate(sorted(weights.items())):
        std = 0.05 if "norm" in name else 1.0 if "embed" in name else 0.02
        std = 0.01 if "e_score" in name else std
        generator = torch.Generator(weight.device).manual_seed(index)
        weight.normal_(0, std, generator=generator)


class TransformersTrainer:
    """transformers' model with AdamW; the index branch is frozen, as nothing gives it a gradient.

    Args:
        raw: a published config.json.
        dtype: of the weights in the forward pass; the router's stay FP32.
    """

    def __init__(
        self, raw: dict[str, Any], dtype: str, device: torch.device, settings: OptimizerSettings
    ) -> None:
        config = model_config(raw).to_transformers() | {"pad_token_id": None}
        text = MiniMaxM3VLTextConfig(**config)
        text._attn_implementation = "sdpa"
        with torch.device(device):
            self.model: Any = MiniMaxM3VLForCausalLM(text).float().train()
        self.model.set_experts_implementation("grouped_mm")
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        fill(self.model.state_dict())
        self.device, self._settings = device, settings
        self._masters: list[tuple[Tensor, Tensor]] = []
        """(what the model computes with, its FP32 master)"""
        for name, weight in self.model.named_parameters():
            master = weight.detach().clone()
            if ".gate." not in name:
                weight.data = weight.data.to(getattr(torch, dtype))
            weight.requires_grad_("indexer" not in name)
            if weight.requires_grad:
                self._masters.append((weight, master))
        masters = [master for _, master in self._masters]
        self._adamw = torch.optim.AdamW(
            [
                {"params": [m for m in masters if m.ndim > 1]},
                {"params": [m for m in masters if m.ndim <= 1], "weight_decay": 0.0},
            ],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def step(
        self, ids_BS: np.ndarray, length_B: np.ndarray, mask_BS: np.ndarray
    ) -> tuple[float, float]:
        """(mean loss of the masked tokens, gradient norm before clipping)."""
        labels = torch.from_numpy(np.where(mask_BS, ids_BS, IGNORED)).to(self.device)
        loss = self.model(**self._rows(ids_BS, length_B), labels=labels).loss
        loss.backward()
        norm = self._update()
        return float(loss.detach()), float(norm)

    @torch.no_grad()
    def logprobs(self, ids_BS: np.ndarray, length_B: np.ndarray, mask_BS: np.ndarray) -> Tensor:
        """[M] of the masked tokens, row by row, on the host."""
        rows = self._rows(ids_BS, length_B)
        logits_BSV = self.model(**rows).logits
        found = []
        for ids_S, mask_S, logits_SV in zip(rows["input_ids"], mask_BS, logits_BSV, strict=True):
            logprobs_SV = logits_SV[:-1].float().log_softmax(-1)
            logprobs_S = logprobs_SV.gather(1, ids_S[1:, None])[:, 0].cpu()
            found.append(logprobs_S[torch.from_numpy(mask_S[1:])])
        return torch.cat(found)

    def _rows(self, ids_BS: np.ndarray, length_B: np.ndarray) -> dict[str, Any]:
        """The model's arguments for right-padded rows."""
        is_token_BS = np.arange(ids_BS.shape[1]) < length_B[:, None]
        ids, mask = (
            torch.from_numpy(x).to(self.device) for x in (ids_BS, is_token_BS.astype(np.int64))
        )
        # Without padding no mask has to be made.
        attention_mask = None if is_token_BS.all() else mask
        return {"input_ids": ids, "attention_mask": attention_mask, "use_cache": False}

    @torch.no_grad()
    def _update(self) -> Tensor:
        for weight, master in self._masters:
            assert weight.grad is not None, "every trained weight is used by every batch"
            master.grad, weight.grad = weight.grad.float(), None
        clip = self._settings.grad_clip
        assert clip is not None, "the bench clips"
        norm: Tensor = torch.nn.utils.clip_grad_norm_([m for _, m in self._masters], clip)
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        for weight, master in self._masters:
            weight.copy_(master)
        return norm
