"""Copies of many rectangles in few launches."""

from collections.abc import Sequence

import torch
from torch import Tensor

from inference.kernels.dispatch import expect_dtype, expect_shape
from inference.kernels.tables import PartTable, expect_dense_rows


class CopyTable(PartTable):
    """Copies between memories of different strides, bit for bit."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """
        Args:
            pairs: (source, out) of one shape and dtype, all on one device; their last dimension has
                stride 1. No `out` overlaps another tensor of a launch. The tensors are kept, and
                must stay where they are.

        Raises:
            TypeError: the dtypes of a pair differ.
            ValueError: shapes differ, or the last dimension has another stride.
        """
        op = "CopyTable"
        super().__init__(op, pairs)
        for source, out in pairs:
            expect_dtype(op, "source", source, out.dtype)
            expect_shape(op, "source", source, tuple(out.shape))
            expect_dense_rows(op, "source", source)
            expect_dense_rows(op, "out", out)
        self._pairs = tuple(pairs)
        if self._on_cuda:
            from inference.kernels import copy_table_kernel

            self._tables = copy_table_kernel.tables(pairs)

    @torch.no_grad()
    def launch(self, first: int, last: int) -> None:
        """Copy pairs first..last-1; on CUDA enqueued, one kernel for each width of words.

        Raises:
            ValueError: no such pairs.
            RuntimeError: the memory of one has moved.
        """
        self._expect_range(first, last)
        if self._on_cuda:
            from inference.kernels import copy_table_kernel

            copy_table_kernel.copy(self._tables, first, last)
            return
        for source, out in self._pairs[first:last]:
            out.copy_(source)
