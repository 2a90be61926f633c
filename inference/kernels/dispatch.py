"""Where an op runs: the kernel on CUDA, the reference on the CPU, else an error."""

import numpy as np
import torch
from torch import Tensor, dtype


def use_kernel(op: str, *tensors: Tensor | None) -> bool:
    """True where `op` runs its kernel (CUDA), False where it runs its reference (the CPU).

    Raises:
        ValueError: the tensors lie on different devices.
        NotImplementedError: they lie on another kind of device; nothing falls back in silence.
    """
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if len(devices) != 1:
        raise ValueError(
            f"{op}: tensors lie on {sorted(map(str, devices))}; move them to one device"
        )
    device = devices.pop()
    if device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"{op}: no {device.type.upper()} kernel")
    return device.type == "cuda"


def send(array: np.ndarray, device: torch.device) -> Tensor:
    """`array` on `device`; the host does not wait for what the device still has to do.

    A copy from memory that is not pinned would.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def expect_shape(op: str, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless `tensor` has `shape`."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}, needs {shape}")


def expect_dtype(op: str, name: str, tensor: Tensor, *dtypes: dtype) -> None:
    """Raise TypeError unless `tensor` has one of `dtypes`."""
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        found = str(tensor.dtype).removeprefix("torch.")
        raise TypeError(f"{op}: {name} is {found}, needs {allowed}")
