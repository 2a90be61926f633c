"""A hash of weights that does not care how they are sharded."""

from collections.abc import Iterable

from torch import Tensor

from inference.kernels.dispatch import use_kernel
from inference.kernels.tensor_hash import reference
from inference.kernels.tensor_hash.part import OP, HashPart, hash_part, unit_of
from inference.kernels.tensor_hash.table import HashTable

__all__ = ["HashPart", "HashTable", "combine", "hash_part", "tensor_hash", "unit_of"]


def tensor_hash(
    tensor: Tensor,
    *,
    name: str,
    offsets: tuple[int, ...] | None = None,
    shape: tuple[int, ...] | None = None,
    unit: int = 1,
) -> int:
    """Hash the bits of a tensor, or of a rectangle of it, to 64 bits; waits for the device.

    The hashes of disjoint rectangles that cover a tensor sum to its hash (see `combine`). Equal
    values with other bits (0.0 and -0.0) differ. For many tensors use a `HashTable`.

    Args:
        See `hash_part`.

    Returns:
        An integer in [0, 2^64); 0 for an empty tensor.

    Raises:
        TypeError, ValueError: see `hash_part`.
    """
    use_kernel(OP, tensor)
    part = hash_part(tensor, name=name, offsets=offsets, shape=shape, unit=unit)
    table = HashTable([part])
    table.launch(0, 1)
    return table.read()[0]


def combine(hashes: Iterable[int]) -> int:
    """The sum modulo 2^64: the hash of a whole from the hashes of its disjoint parts."""
    return sum(hashes) & reference.MASK64
