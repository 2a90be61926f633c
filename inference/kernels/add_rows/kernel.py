"""A tile of a token's row per program; its rows are read once, in the order of the ranks."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_rows_kernel(
    y_ptr,
    rows_ptr,
    own_ptr,
    index_ptr,
    stride_y,
    num_rows,
    width,
    NUM_RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    # [BLOCK]
    o_c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_c = o_c < width
    b_sum = tl.zeros([BLOCK], tl.float32)
    for i_rank in tl.static_range(NUM_RANKS):
        i_row = tl.load(index_ptr + i_token * NUM_RANKS + i_rank).to(tl.int64)
        # Of the two loads one has an empty mask, and both have one where nothing is added.
        n_own = tl.where(i_row >= num_rows, width, 0)
        n_row = tl.where(i_row >= 0, width, 0) - n_own
        p_own = own_ptr + (i_row - num_rows) * width + o_c
        p_row = rows_ptr + i_row * width + o_c
        b_sum += tl.load(p_row, mask=o_c < n_row, other=0.0).to(tl.float32)
        b_sum += tl.load(p_own, mask=o_c < n_own, other=0.0).to(tl.float32)
    p_y = y_ptr + i_token * stride_y + o_c
    b_sum += tl.load(p_y, mask=m_c, other=0.0).to(tl.float32)
    tl.store(p_y, b_sum.to(y_ptr.dtype.element_ty), mask=m_c)


def add_rows(y_SC: Tensor, rows_RC: Tensor, own_XC: Tensor, index_SW: Tensor) -> None:
    (num_tokens, width), num_ranks = y_SC.shape, index_SW.shape[1]
    if y_SC.stride(1) != 1:
        raise ValueError(f"add_rows: columns of y_SC have stride {y_SC.stride(1)}, need 1")
    if not num_tokens:
        return
    block = min(1024, triton.next_power_of_2(width))
    _add_rows_kernel[(num_tokens, triton.cdiv(width, block))](
        y_SC,
        rows_RC.contiguous(),
        own_XC.contiguous(),
        index_SW.contiguous(),
        y_SC.stride(0),
        len(rows_RC),
        width,
        NUM_RANKS=num_ranks,
        BLOCK=block,
        num_warps=4,
    )
