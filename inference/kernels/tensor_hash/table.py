"""Hashes of many tensors in few launches, read when all are done."""

from collections.abc import Sequence

import torch
from torch import Tensor

from inference.kernels.mix64 import as_int64
from inference.kernels.tables import PartTable
from inference.kernels.tensor_hash import reference
from inference.kernels.tensor_hash.part import OP, HashPart


class HashTable(PartTable):
    """The sum of each part, computed on the device in any order and any number of launches."""

    sums: Tensor
    """[parts] int64 on the device, the bits of each part's hash."""
    flags: Tensor
    """[parts] int64 on the device: 1 where a part with `check_finite` holds NaN or infinity."""

    def __init__(self, parts: Sequence[HashPart]) -> None:
        """
        Args:
            parts: on one device. Their tensors are kept, and must stay where they are.
        """
        super().__init__(OP, [(part.tensor,) for part in parts])
        self._parts = tuple(parts)
        self.sums = torch.zeros(len(parts), dtype=torch.int64, device=parts[0].tensor.device)
        self.flags = torch.zeros_like(self.sums)
        self._checks = any(part.check_finite for part in parts)
        if self._on_cuda:
            from inference.kernels.tensor_hash import kernel

            self._tables = kernel.tables(parts)

    def reset(self) -> None:
        """Set sums and flags back to 0."""
        self.sums.zero_()
        self.flags.zero_()

    def launch(self, first: int, last: int) -> None:
        """Add the hashes of parts first..last-1 to `sums`; the host does not wait on CUDA.

        One kernel for each size of units: with units of 16 bytes one for all dtypes.

        Raises:
            ValueError: no such parts.
            RuntimeError: the memory of one has moved.
        """
        self._expect_range(first, last)
        if self._on_cuda:
            from inference.kernels.tensor_hash import kernel

            kernel.add(self._tables, first, last, self.sums, self.flags if self._checks else None)
            return
        for i in range(first, last):
            tensor, salt, offsets, shape, unit, check_finite = self._parts[i]
            self.sums[i] += as_int64(reference.tensor_hash(tensor, salt, offsets, shape, unit))
            if check_finite and not reference.is_finite(tensor):
                self.flags[i] = 1

    def read(self) -> list[int]:
        """The hashes, in [0, 2^64); waits for the device once."""
        return [total & reference.MASK64 for total in self.sums.tolist()]
