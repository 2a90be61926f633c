"""The step of a rank against torch's own AdamW, clipping and warm-up."""

import pytest
import torch

from tests.m3rl.rank_cases import CONFIG, gradients, random_batch, start, with_optimizer
from tests.tiny_models import random_checkpoint

LR, BETAS, EPS, DECAY, CLIP, WARMUP = 1e-2, (0.8, 0.97), 1e-2, 0.1, 0.05, 3


def test_steps_are_those_of_torchs_adamw_after_clipping_and_warm_up(tmp_path):
    random_checkpoint(tmp_path, CONFIG, seed=0)
    settings = with_optimizer(
        lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, grad_clip=CLIP, warmup_steps=WARMUP
    )
    rank, twin = start(tmp_path, settings), start(tmp_path, settings)
    trained = {n: p for n, p in twin.policy.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for p in trained.values() if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in trained.values() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    expected = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    for step in range(WARMUP + 1):
        metrics = rank.update(random_batch(step))
        for name, grad in gradients(twin, random_batch(step)).items():
            trained[name].grad = grad
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), CLIP)
        for group in expected.param_groups:
            group["lr"] = LR * min(1, (step + 1) / WARMUP)
        expected.step()
        expected.zero_grad()
        assert norm > 2 * CLIP
        assert metrics["optim/grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    for name, parameter in rank.policy.named_parameters():
        if name in trained:
            torch.testing.assert_close(parameter, trained[name], atol=1e-6, rtol=0, msg=name)
