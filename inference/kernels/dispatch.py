"""Where an op runs: the reference on the CPU, an error where there is no kernel."""

from torch import Tensor, dtype


def require_reference(op: str, *tensors: Tensor | None) -> None:
    """Let `op` run its CPU reference, or refuse: nothing falls back in silence.

    Raises:
        ValueError: the tensors lie on different devices.
        NotImplementedError: they lie on a device for which the op has no kernel.
    """
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if len(devices) != 1:
        raise ValueError(
            f"{op}: tensors lie on {sorted(map(str, devices))}; move them to one device"
        )
    device = devices.pop()
    if device.type != "cpu":
        raise NotImplementedError(f"{op}: no {device.type.upper()} kernel")


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
