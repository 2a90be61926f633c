"""Policies with adapters for tests, and what their merged weights must be."""

from dataclasses import replace

import torch

from inference.kernels.packing import Packing
from m3rl.lora.policy import LoraPolicy
from m3rl.lora.settings import LoraSettings
from m3rl.policy import Policy
from tests.m3rl.rank_cases import SETTINGS
from tests.tiny_models import model_config, tiny_config

CONFIG = tiny_config(num_hidden_layers=3, intermediate_size=32)
"""Rows of all experts' weights are whole blocks of MXFP8."""
ALL = ("attention", "shared_experts", "experts")
LORA = LoraSettings(rank=4, alpha=8.0, seed=3)
TARGETS = [replace(LORA, targets=("attention",)), replace(LORA, targets=ALL)]
RANK = replace(
    SETTINGS, lora=LORA, optimizer=replace(SETTINGS.optimizer, lr=1e-2, eps=1e-4, grad_clip=None)
)


def make(path, dtype="float32", lora=LORA, **options):
    policy = LoraPolicy(model_config(CONFIG), dtype=dtype, lora=lora, **options)
    policy.load(path)
    return policy


def plain(path, dtype="float32"):
    policy = Policy(model_config(CONFIG), dtype=dtype)
    policy.load(path)
    return policy


@torch.no_grad()
def shake(policy, seed=0, std=0.05):
    """Give A and B other values, as training does."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.adapters.parameters():
        noise = torch.randn(parameter.shape, generator=generator) * std
        parameter.add_(noise.to(parameter.dtype))
    policy.stepped()


def product(adapter):
    """What an adapter adds to its weight, FP64."""
    return adapter.scale * (adapter.B.detach().double() @ adapter.A.detach().double())


def sample(lengths=(21, 13, 6), seed=0):
    """(ids, packing, targets)."""
    generator = torch.Generator().manual_seed(seed)
    ids_T = torch.randint(1, 97, (sum(lengths),), generator=generator)
    packing = Packing.of(list(lengths), "cpu")
    begins = set(packing.starts_B1.tolist())
    return ids_T, packing, torch.tensor([t for t in range(sum(lengths)) if t not in begins])


def logprobs(policy, *args):
    return policy(*(args or sample()), temperature=1.0)[0]
