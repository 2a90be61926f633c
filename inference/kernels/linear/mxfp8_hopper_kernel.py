"""Few tokens times an MXFP8 weight that is read once, on Hopper.

As `hopper_kernel.py`: 64 rows a program, a ring of tiles that is filled before the wait for the
kernel in front, and the tokens on the narrow side of the tensor cores. Widening takes as long as
one warpgroup has, so two share the rows: each walks over every other tile of columns with a ring
of its own, and the sums meet at the end. The weights are widened in registers as
`expert_gemm/mxfp8_operands_kernel.py` tells, which is why the tokens' columns change their
order on the way to shared memory.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference.kernels.expert_gemm.mxfp8_gemm_hopper_kernel import X_LAYOUT
from inference.kernels.expert_gemm.mxfp8_operands_kernel import CHUNK, ROWS, scales, widened
from inference.kernels.mxfp8 import MXFP8Tensor

STAGES = {16: 5, 32: 4}
"""Tiles of a warpgroup's ring, by padded tokens: two programs fit a multiprocessor."""
REGISTERS = 128
"""Of a thread, for the same reason."""

# Renamed between Triton 3.6 and 3.9.
_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def _fetch(w_desc, w_tiles, full, first, i_own, w: gl.constexpr, pred):
    """A warpgroup's own tile number `i_own` into its ring."""
    RING: gl.constexpr = full.shape[0] // 2
    slot = w * RING + i_own % RING
    mbarrier.expect(full.index(slot), ROWS * CHUNK, pred=pred)
    place = [0, first, (2 * i_own + w) * CHUNK]
    _load(w_desc, place, full.index(slot), w_tiles.index(slot), pred=pred)


@gluon.jit
def _tokens(x_ptr, i_own, num_tokens, stride_x, w: gl.constexpr, SIZE: gl.constexpr,
            TOKENS: gl.constexpr):  # fmt: skip
    """[tokens, columns] of an own step; zeros behind the last."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    o_t = gl.arange(0, TOKENS, gl.SliceLayout(1, layout))
    o_k = (2 * i_own + w) * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
    p_x = x_ptr + o_t.to(gl.int64)[:, None] * stride_x + o_k[None, :]
    return gl.load(p_x, mask=(o_t < num_tokens)[:, None] & (o_k < SIZE)[None, :], other=0.0)


@gluon.jit
def _walk(
    w: gl.constexpr, w_desc, x_ptr, scale_ptr, w_tiles, full, x_tiles, y_tiles, is_summed, out_ptr,
    num_tokens, num_rows, stride_x, stride_out, alpha, limit, beta, SIZE: gl.constexpr,
    IS_SWIGLU: gl.constexpr,
):  # fmt: skip
    RING: gl.constexpr = full.shape[0] // 2
    TOKENS: gl.constexpr = x_tiles.shape[1]
    PARTS: gl.constexpr = 2 if IS_SWIGLU else 1
    SHARE: gl.constexpr = ROWS // PARTS
    NUM_OWN: gl.constexpr = (SIZE // CHUNK + 1 - w) // 2
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    first = gl.program_id(0) * SHARE
    for i in gl.static_range(RING):
        _fetch(w_desc, w_tiles, full, first, i, w, i < NUM_OWN)
    # Those of this step and of the next.
    p_scale = scale_ptr + w * (CHUNK // 32)
    part_rows = num_rows // PARTS
    b_scale = scales(p_scale, first, num_rows, part_rows, SHARE, SIZE, True)
    p_scale += 2 * (CHUNK // 32) * (1 if NUM_OWN > 1 else 0)
    b_scale_next = scales(p_scale, first, num_rows, part_rows, SHARE, SIZE, True)
    gdc_launch_dependents()
    gdc_wait()
    b_x = _tokens(x_ptr, 0, num_tokens, stride_x, w, SIZE, TOKENS)
    # [rows, tokens]
    b_acc = warpgroup_mma_init(gl.zeros([ROWS, TOKENS], gl.float32, mma))
    for i_own in range(NUM_OWN):
        # The product that read this buffer, two steps ago, had ended before the last barrier.
        x_tile = x_tiles.index(w * 2 + i_own % 2)
        b_x = b_x.reshape([TOKENS, 4, 8, 2, 2]).permute((0, 2, 4, 1, 3)).reshape([TOKENS, CHUNK])
        x_tile.store(b_x)
        fence_async_shared()
        b_x = _tokens(x_ptr, i_own + 1, num_tokens, stride_x, w, SIZE, TOKENS)
        slot = w * RING + i_own % RING
        mbarrier.wait(full.index(slot), (i_own // RING) & 1)
        b_w = widened(w_tiles.index(slot).reshape([ROWS, CHUNK]), b_scale, mma)
        b_sum = warpgroup_mma_wait(0, deps=(b_acc,))
        _barrier()
        _fetch(w_desc, w_tiles, full, first, i_own + RING, w, i_own + RING < NUM_OWN)
        b_scale = b_scale_next
        p_scale += gl.where(i_own + 2 < NUM_OWN, 2 * (CHUNK // 32), 0)
        b_scale_next = scales(p_scale, first, num_rows, part_rows, SHARE, SIZE, True)
        b_acc = warpgroup_mma(b_w, x_tile.permute((1, 0)), b_sum, is_async=True)
    b_acc = warpgroup_mma_wait(0, deps=(b_acc,))

    if w == 1:
        y_tiles.store(b_acc)
        _barrier()
        mbarrier.arrive(is_summed)
    else:
        mbarrier.wait(is_summed, 0)
        b_acc += y_tiles.load(mma)
        out_type: gl.constexpr = out_ptr.dtype.element_ty
        _barrier()
        y_tiles.store(b_acc.to(out_type).to(gl.float32))
        _barrier()
        out: gl.constexpr = gl.BlockedLayout([SHARE // 8, 1], [8, 4], [1, 4], [0, 1])
        b_out = y_tiles.slice(0, SHARE).load(out)
        if IS_SWIGLU:
            b_gate = gl.minimum(b_out, limit)
            b_up = y_tiles.slice(SHARE, SHARE).load(out)
            b_up = gl.minimum(gl.maximum(b_up, -limit), limit)
            b_out = b_gate / (1.0 + gl.exp(-alpha * b_gate)) * (b_up + beta)
        o_row = first + gl.arange(0, SHARE, gl.SliceLayout(1, out))
        o_t = gl.arange(0, TOKENS, gl.SliceLayout(0, out))
        p_out = out_ptr + o_t.to(gl.int64)[None, :] * stride_out + o_row[:, None]
        m_out = (o_row < part_rows)[:, None] & (o_t < num_tokens)[None, :]
        gl.store(p_out, b_out.to(out_type), mask=m_out)


@gluon.jit(do_not_specialize=["num_tokens"])
def _stream_kernel(
    w_desc,
    x_ptr,
    scale_ptr,
    out_ptr,
    num_tokens,
    num_rows,
    stride_x,
    stride_out,
    alpha,
    limit,
    beta,
    SIZE: gl.constexpr,
    TOKENS: gl.constexpr,
    RING: gl.constexpr,
    IS_SWIGLU: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """`w_desc` is [1, Y, X]; with SwiGLU [2, Y / 2, X]: a tile holds gates and then their ups."""
    box: gl.constexpr = w_desc.block_type.shape
    w_tiles = gl.allocate_shared_memory(gl.uint8, [2 * RING, box[0], box[1], box[2]], w_desc.layout)
    x_tiles = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [4, TOKENS, CHUNK], X_LAYOUT)
    exchange: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0, 1])
    y_tiles = gl.allocate_shared_memory(gl.float32, [ROWS, TOKENS], exchange)
    full = gl.allocate_shared_memory(gl.int64, [2 * RING, 1], mbarrier.MBarrierLayout())
    is_summed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * RING):
        mbarrier.init(full.index(i), count=1)
    mbarrier.init(is_summed, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_walk, (0, w_desc, x_ptr, scale_ptr, w_tiles, full, x_tiles, y_tiles, is_summed,
                     out_ptr, num_tokens, num_rows, stride_x, stride_out, alpha, limit, beta, SIZE,
                     IS_SWIGLU)),
            (_walk, (1, w_desc, x_ptr, scale_ptr, w_tiles, full, x_tiles, y_tiles, is_summed,
                     out_ptr, num_tokens, num_rows, stride_x, stride_out, alpha, limit, beta, SIZE,
                     IS_SWIGLU)),
        ],
        [4],
        [REGISTERS],
    )  # fmt: skip


def stream(
    x_TX: Tensor, weight: MXFP8Tensor, y_TY: Tensor, swiglu: tuple[float, float, float] | None
) -> Tensor:
    """Write x wᵀ, T in 1..32, operands that `fits` of the grouped product accepts."""
    (num_tokens, size), num_rows = x_TX.shape, weight.shape[0]
    tokens = 16 if num_tokens <= 16 else 32
    parts = 1 if swiglu is None else 2
    alpha, limit, beta = swiglu or (0.0, 0.0, 0.0)
    values = weight.values.view(torch.uint8).view(parts, num_rows // parts, size)
    box = [parts, ROWS.value // parts, CHUNK.value]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.uint8)
    _stream_kernel[(triton.cdiv(num_rows, ROWS.value),)](
        TensorDescriptor.from_tensor(values, box, layout),
        x_TX,
        weight.scale,
        y_TY,
        num_tokens,
        num_rows,
        x_TX.stride(0),
        y_TY.stride(0),
        alpha,
        limit,
        beta,
        SIZE=size,
        TOKENS=tokens,
        RING=STAGES[tokens],
        IS_SWIGLU=swiglu is not None,
        REGISTERS=REGISTERS,
        num_warps=4,
        maxnreg=REGISTERS,
        launch_pdl=True,
    )
    return y_TY
