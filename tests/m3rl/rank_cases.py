"""Settings, batches and measurements for the tests of trainer ranks."""

from dataclasses import replace

import numpy as np
import torch

from m3rl.grpo.loss import LossSettings
from m3rl.rank_settings import OptimizerSettings, RankSettings
from m3rl.train_rank import TrainRank
from m3rl.types import TrainBatch
from tests.tiny_models import tiny_config

CONFIG = tiny_config(num_hidden_layers=3)
WIDTH = 24

SETTINGS = RankSettings(
    loss=LossSettings(
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=None,
        kl_coef=0.0,
        kl_estimator="k3",
        importance_cap=2.0,
    ),
    optimizer=OptimizerSettings(
        lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, grad_clip=1.0, warmup_steps=0
    ),
    dtype="float32",
    replay_routing=False,
    micro_batch_tokens=60,
    old_logprobs="behaviour",
    updates_per_batch=1,
    seed=0,
    num_threads=1,
    timeout_s=60,
)


def with_loss(**changes):
    return replace(SETTINGS, loss=replace(SETTINGS.loss, **changes))


def with_optimizer(**changes):
    return replace(SETTINGS, optimizer=replace(SETTINGS.optimizer, **changes))


def random_batch(seed, num_rows=7, num_prompt=5):
    rng = np.random.default_rng(seed)
    length_B = rng.integers(num_prompt + 1, WIDTH + 1, num_rows)
    place_S = np.arange(WIDTH)
    mask = (place_S >= num_prompt) & (place_S < length_B[:, None])
    mask[0, num_prompt + 1 :: 3] = False  # tokens of a tool
    ids = np.where(place_S < length_B[:, None], rng.integers(1, 97, (num_rows, WIDTH)), 0)
    logprobs = np.where(mask, -rng.uniform(3, 6, mask.shape), 0).astype(np.float32)
    advantages = rng.normal(size=num_rows).astype(np.float32)
    samples = [(row, 0) for row in range(num_rows)]
    return TrainBatch(
        samples, ids, length_B, mask, logprobs, advantages, 1.0, denominator=float(mask.sum())
    )


def start(model, settings=SETTINGS):
    rank = TrainRank(settings, 0, 1)
    rank.load_initial(model)
    return rank


def on_policy(rank, batch):
    batch.behaviour_logprobs_BS = rank.logprobs(batch)
    return batch


def gradients(rank, batch, rows=None):
    """Summed gradient of one optimizer step, which is not taken."""
    rows = np.arange(len(batch.sample_ids)) if rows is None else rows
    taken = {}

    def keep(loss):
        for name, parameter in rank.policy.named_parameters():
            if parameter.grad is not None:
                taken[name] = parameter.grad.clone()
                parameter.grad = None
        return {"loss": loss}

    real, rank._optimizer.step = rank._optimizer.step, keep
    try:
        rank._step(batch, rows, rank._grpo_loss_of(batch, rows, batch.behaviour_logprobs_BS), None)
    finally:
        rank._optimizer.step = real
    return taken


def distance(actual, expected):
    """‖Δ‖ / ‖g‖ over all parameters of two gradients by name."""
    assert actual.keys() == expected.keys()
    off = sum((actual[name] - grad).square().sum() for name, grad in expected.items())
    norm = sum(grad.square().sum() for grad in expected.values())
    assert norm > 0
    return float((off / norm).sqrt())


def assert_close_gradients(actual, expected):
    """FP32 sums in another order: 1e-6 of the largest gradient of the tensor."""
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        atol = 1e-6 * max(1.0, grad.abs().max().item())
        torch.testing.assert_close(actual[name], grad, atol=atol, rtol=1e-5, msg=name)
