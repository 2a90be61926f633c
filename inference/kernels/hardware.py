"""What the kernels ask of the GPU that they run on."""

import functools

import torch

USE_PDL = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9
"""Programmatic dependent launch: a kernel begins while the one in front of it ends."""


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether `device`, a CUDA one, has the instructions of the Gluon kernels."""
    return torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
