"""One launch for what would be five elementwise ones, in every layer with experts."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _local_ids_kernel(ids_ptr, out_ptr, first, count, size, BLOCK: tl.constexpr):
    o_x = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_x = o_x < size
    b_place = tl.load(ids_ptr + o_x, mask=m_x, other=-1) - first
    is_held = (b_place >= 0) & (b_place < count)
    tl.store(out_ptr + o_x, tl.where(is_held, b_place, -1), mask=m_x)


def local_ids(ids_RA: Tensor, first: int, count: int) -> Tensor:
    ids_RA = ids_RA.contiguous()
    out_RA = torch.empty_like(ids_RA)
    size = ids_RA.numel()
    if size:
        grid = (triton.cdiv(size, BLOCK),)
        _local_ids_kernel[grid](ids_RA, out_RA, first, count, size, BLOCK=BLOCK, num_warps=4)
    return out_RA
