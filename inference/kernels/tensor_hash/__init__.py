"""A hash of weights that does not care how they are sharded."""

from collections.abc import Iterable

from torch import Tensor

from inference.kernels.dispatch import expect_dtype, use_kernel
from inference.kernels.tensor_hash import reference

__all__ = ["combine", "tensor_hash"]

OP = "tensor_hash"


def tensor_hash(
    tensor: Tensor,
    *,
    name: str,
    offsets: tuple[int, ...] | None = None,
    shape: tuple[int, ...] | None = None,
) -> int:
    """Hash the bits of a tensor, or of a rectangle of it, to 64 bits.

    The hashes of disjoint rectangles that cover a tensor sum to its hash (see `combine`). Equal
    values with other bits (0.0 and -0.0) differ.

    Args:
        tensor: FP32, BF16, FP8 e4m3 or uint8; need not be contiguous.
        name: published name; the same bits under another name hash to something else.
        offsets: where the rectangle begins in the global tensor; None: at its origin.
        shape: of the global tensor; None: `tensor` is all of it.

    Returns:
        An integer in [0, 2^64); 0 for an empty tensor.

    Raises:
        TypeError: another dtype.
        ValueError: the rectangle does not lie inside `shape`.
    """
    on_cuda = use_kernel(OP, tensor)
    expect_dtype(OP, name, tensor, *reference.HASHABLE_DTYPES)
    local = tuple(tensor.shape)
    offsets = (0,) * tensor.ndim if offsets is None else tuple(offsets)
    shape = local if shape is None else tuple(shape)
    is_inside = len(offsets) == len(shape) == len(local) and all(
        offset >= 0 and offset + size <= total
        for offset, size, total in zip(offsets, local, shape, strict=True)
    )
    if not is_inside:
        raise ValueError(
            f"{OP}: {name}: a rectangle {local} at {offsets} does not lie inside {shape}"
        )
    if on_cuda:
        from inference.kernels.tensor_hash import kernel

        return kernel.tensor_hash(tensor, reference.salt(name), offsets, shape)
    return reference.tensor_hash(tensor, reference.salt(name), offsets, shape)


def combine(hashes: Iterable[int]) -> int:
    """The sum modulo 2^64: the hash of a whole from the hashes of its disjoint parts."""
    return sum(hashes) & reference.MASK64
