"""FP8 pages of the prefill requests as pages of 16 bits, for a kernel that converts nothing.

A page is read by many programs; converted once, it costs them nothing.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import triton
import triton.language as tl

from inference.kernels.dispatch import send
from inference.kernels.msa_attention.invert_kernel import request_of
from inference.kernels.paging import LayerPages, PagedBatch

MAX_BYTES = 1 << 30
"""Most memory for a layer's converted pages."""


def block_starts(batch: PagedBatch) -> np.ndarray:
    """[R + 1] int32: first block of each request, counted over the prefill requests."""
    seq_len_R = batch.host_lengths()[1]
    blocks_R = -(-seq_len_R // batch.page_size)
    blocks_R[: batch.num_decodes] = 0
    return np.concatenate([[0], np.cumsum(blocks_R)]).astype(np.int32)


def wide_bytes(pages: LayerPages, batch: PagedBatch) -> int:
    """Memory that `widen_pages` takes."""
    return 4 * int(block_starts(batch)[-1]) * pages.k_pages[0].numel()


def widen_pages(
    pages: LayerPages, batch: PagedBatch, dtype: torch.dtype
) -> tuple[LayerPages, PagedBatch]:
    """Pages [blocks, K, page, D] of `dtype` and the batch with a page table for them.

    Places of values beyond a request's keys are zero; a block without a page has undefined ones.
    """
    num_kv_heads, page_size, head_dim = pages.k_pages.shape[1:]
    device = pages.k_pages.device
    start_R1 = block_starts(batch)
    num_blocks, num_requests = int(start_R1[-1]), len(start_R1) - 1
    starts = send(start_R1, device)
    wide_k, wide_v = (
        torch.empty((num_blocks, num_kv_heads, page_size, head_dim), dtype=dtype, device=device)
        for _ in "kv"
    )
    _widen_kernel[(num_blocks, num_kv_heads)](
        pages.k_pages,
        pages.v_pages,
        wide_k,
        wide_v,
        starts,
        batch.seq_len_R,
        batch.page_table_RN,
        *pages.k_pages.stride()[:2],
        batch.page_table_RN.stride(0),
        num_requests,
        num_requests.bit_length(),
        D=head_dim,
        PAGE=page_size,
    )
    table_RN = batch.page_table_RN
    column_N = torch.arange(table_RN.shape[1], dtype=torch.int32, device=device)
    wide_RN = torch.where(table_RN < 0, -1, starts[:-1, None] + column_N)
    return LayerPages(wide_k, wide_v, None), replace(batch, page_table_RN=wide_RN)


@triton.jit(do_not_specialize=("num_requests", "steps"))
def _widen_kernel(
    k_ptr,
    v_ptr,
    wide_k_ptr,
    wide_v_ptr,
    start_ptr,
    seq_len_ptr,
    table_ptr,
    stride_page,
    stride_pk,
    stride_table,
    num_requests,
    steps,
    D: tl.constexpr,
    PAGE: tl.constexpr,
):
    """One block of one KV head; D and PAGE are powers of two."""
    i_block, i_k = tl.program_id(0), tl.program_id(1)
    i_request = request_of(start_ptr, i_block, 0, num_requests, steps)
    i_column = i_block - tl.load(start_ptr + i_request)
    num_keys = tl.load(seq_len_ptr + i_request) - i_column * PAGE
    i_page = tl.load(table_ptr + i_request.to(tl.int64) * stride_table + i_column)
    if i_page >= 0:
        o_s, o_d = tl.arange(0, PAGE)[:, None], tl.arange(0, D)[None, :]
        o_from = i_page.to(tl.int64) * stride_page + i_k.to(tl.int64) * stride_pk + o_s * D + o_d
        o_to = (i_block.to(tl.int64) * tl.num_programs(1) + i_k) * PAGE * D + o_s * D + o_d
        b_k = tl.load(k_ptr + o_from)
        b_v = tl.load(v_ptr + o_from, mask=o_s < num_keys, other=0.0)
        tl.store(wide_k_ptr + o_to, b_k.to(wide_k_ptr.dtype.element_ty))
        tl.store(wide_v_ptr + o_to, b_v.to(wide_v_ptr.dtype.element_ty))
