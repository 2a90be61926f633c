"""Few tokens times an MXFP8 weight that is read once, on Hopper.

As `hopper_kernel.py`: 64 rows a program, a ring of tiles that is filled before the wait for the
kernel in front, and the tokens on the narrow side of the tensor cores. Widening takes as long as
one warpgroup has, so two or four share the rows: each walks over every second or fourth tile of
columns with a ring of its own, and the sums meet at the end. The weights are widened in registers
as `expert_gemm/mxfp8_operands_kernel.py` tells, which is why the tokens' columns change their order
on the way to shared memory.
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
from inference.kernels.expert_gemm.mxfp8_operands_kernel import (
    CHUNK,
    ROWS,
    bytes_of,
    scales,
    widened,
)
from inference.kernels.hardware import num_multiprocessors
from inference.kernels.mxfp8 import MXFP8Tensor
from inference.kernels.swiglu_oai.kernel import clamped

STAGES = {16: 5, 32: 4}
"""Tiles of a warpgroup's ring, by padded tokens: four warpgroups fit a multiprocessor."""
REGISTERS = 128
"""Of a thread, for the same reason."""
LINE = gl.constexpr(128)
"""Bytes that come from memory together."""

# Renamed between Triton 3.6 and 3.9.
_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def _fetch(w_desc, w_tiles, full, first, i_own, w: gl.constexpr, WARPGROUPS: gl.constexpr, pred):
    """A warpgroup's own tile number `i_own` into its ring."""
    RING: gl.constexpr = full.shape[0] // WARPGROUPS
    slot = w * RING + i_own % RING
    mbarrier.expect(full.index(slot), ROWS * CHUNK, pred=pred)
    place = [0, first, (WARPGROUPS * i_own + w) * CHUNK]
    _load(w_desc, place, full.index(slot), w_tiles.index(slot), pred=pred)


@gluon.jit
def _tokens(x_ptr, k, num_tokens, stride_x, SIZE: gl.constexpr, TOKENS: gl.constexpr):
    """[tokens, columns] from `k`; zeros behind the last."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    o_t = gl.arange(0, TOKENS, gl.SliceLayout(1, layout))
    o_k = k + gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
    p_x = x_ptr + o_t.to(gl.int64)[:, None] * stride_x + o_k[None, :]
    return gl.load(p_x, mask=(o_t < num_tokens)[:, None] & (o_k < SIZE)[None, :], other=0.0)


@gluon.jit
def _prefetch(p_bytes, num_bytes):
    """Have the lines from `p_bytes` on fetched into L2."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    o_line = gl.arange(0, 128, layout)
    for first in range(0, num_bytes, 128 * LINE):
        o_byte = gl.minimum(first + o_line * LINE, num_bytes - 1)
        address = (p_bytes + o_byte).to(gl.int64)
        fetch: gl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
        gl.inline_asm_elementwise(fetch, "=r,l", [address], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _walk(
    w: gl.constexpr, w_desc, pointers, shared, sizes, act, SIZE: gl.constexpr,
    IS_SWIGLU: gl.constexpr, WARPGROUPS: gl.constexpr,
):  # fmt: skip
    x_ptr, scale_ptr, out_ptr = pointers
    w_tiles, full, x_tiles, y_tiles, is_summed = shared
    num_tokens, num_rows, stride_x, stride_out = sizes
    RING: gl.constexpr = full.shape[0] // WARPGROUPS
    TOKENS: gl.constexpr = x_tiles.shape[1]
    PARTS: gl.constexpr = 2 if IS_SWIGLU else 1
    SHARE: gl.constexpr = ROWS // PARTS
    STRIDE: gl.constexpr = WARPGROUPS * CHUNK
    NUM_OWN: gl.constexpr = (SIZE // CHUNK + WARPGROUPS - 1 - w) // WARPGROUPS
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    first = gl.program_id(0) * SHARE
    for i in gl.static_range(RING):
        _fetch(w_desc, w_tiles, full, first, i, w, WARPGROUPS, i < NUM_OWN)
    part_rows = num_rows // PARTS
    if w < PARTS:
        num_own_rows = gl.minimum(SHARE, part_rows - first)
        p_own = scale_ptr + (w * part_rows + first) * (SIZE // 32)
        _prefetch(p_own, num_own_rows * (SIZE // 32))
    # Those of this step and of the next.
    p_scale = scale_ptr + w * (CHUNK // 32)
    b_scale = scales(p_scale, first, num_rows, part_rows, SHARE, SIZE, True)
    p_scale += STRIDE // 32 * (1 if NUM_OWN > 1 else 0)
    b_scale_next = scales(p_scale, first, num_rows, part_rows, SHARE, SIZE, True)
    gdc_launch_dependents()
    gdc_wait()
    k = w * CHUNK
    b_x = _tokens(x_ptr, k, num_tokens, stride_x, SIZE, TOKENS)
    b_x_next = _tokens(x_ptr, k + STRIDE, num_tokens, stride_x, SIZE, TOKENS)
    # [rows, tokens]
    b_acc = warpgroup_mma_init(gl.zeros([ROWS, TOKENS], gl.float32, mma))
    for i_own in range(NUM_OWN):
        # The product that read this buffer, two steps ago, had ended before the last barrier.
        x_tile = x_tiles.index(w * 2 + i_own % 2)
        b_x = b_x.reshape([TOKENS, 4, 8, 2, 2]).permute((0, 2, 4, 1, 3)).reshape([TOKENS, CHUNK])
        x_tile.store(b_x)
        fence_async_shared()
        b_x = b_x_next
        k += STRIDE
        b_x_next = _tokens(x_ptr, k + STRIDE, num_tokens, stride_x, SIZE, TOKENS)
        slot = w * RING + i_own % RING
        mbarrier.wait(full.index(slot), (i_own // RING) & 1)
        b_w = widened(bytes_of(w_tiles.index(slot).reshape([ROWS, CHUNK])), b_scale, mma)
        b_sum = warpgroup_mma_wait(0, deps=(b_acc,))
        _barrier()
        i_next = i_own + RING
        _fetch(w_desc, w_tiles, full, first, i_next, w, WARPGROUPS, i_next < NUM_OWN)
        b_scale = b_scale_next
        p_scale += gl.where(i_own + 2 < NUM_OWN, STRIDE // 32, 0)
        b_scale_next = scales(p_scale, first, num_rows, part_rows, SHARE, SIZE, True)
        b_acc = warpgroup_mma(b_w, x_tile.permute((1, 0)), b_sum, is_async=True)
    b_acc = warpgroup_mma_wait(0, deps=(b_acc,))

    if w > 0:
        y_tiles.index(w - 1).store(b_acc)
        _barrier()
        mbarrier.arrive(is_summed)
    else:
        mbarrier.wait(is_summed, 0)
        for i in gl.static_range(WARPGROUPS - 1):
            b_acc += y_tiles.index(i).load(mma)
        out_type: gl.constexpr = out_ptr.dtype.element_ty
        _barrier()
        y_tile = y_tiles.index(0)
        y_tile.store(b_acc.to(out_type).to(gl.float32))
        _barrier()
        out: gl.constexpr = gl.BlockedLayout([SHARE // 8, 1], [8, 4], [1, 4], [0, 1])
        b_out = y_tile.slice(0, SHARE).load(out)
        if IS_SWIGLU:
            alpha, limit, beta = act
            b_up = y_tile.slice(SHARE, SHARE).load(out)
            b_gate, b_up = clamped(b_out, b_up, limit)
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
    WARPGROUPS: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """`w_desc` is [1, Y, X]; with SwiGLU [2, Y / 2, X]: a tile holds gates and then their ups."""
    box: gl.constexpr = w_desc.block_type.shape
    num_slots: gl.constexpr = WARPGROUPS * RING
    shape: gl.constexpr = [num_slots, box[0], box[1], box[2]]
    w_tiles = gl.allocate_shared_memory(gl.uint8, shape, w_desc.layout)
    x_tiles = gl.allocate_shared_memory(
        x_ptr.dtype.element_ty, [2 * WARPGROUPS, TOKENS, CHUNK], X_LAYOUT
    )
    exchange: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0, 1])
    y_tiles = gl.allocate_shared_memory(gl.float32, [WARPGROUPS - 1, ROWS, TOKENS], exchange)
    full = gl.allocate_shared_memory(gl.int64, [num_slots, 1], mbarrier.MBarrierLayout())
    is_summed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(num_slots):
        mbarrier.init(full.index(i), count=1)
    mbarrier.init(is_summed, count=WARPGROUPS - 1)
    fence_async_shared()
    pointers = x_ptr, scale_ptr, out_ptr
    shared = w_tiles, full, x_tiles, y_tiles, is_summed
    sizes = num_tokens, num_rows, stride_x, stride_out
    act = alpha, limit, beta
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_walk, (0, w_desc, pointers, shared, sizes, act, SIZE, IS_SWIGLU, WARPGROUPS)),
                (_walk, (1, w_desc, pointers, shared, sizes, act, SIZE, IS_SWIGLU, WARPGROUPS)),
            ],
            [4],
            [REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_walk, (0, w_desc, pointers, shared, sizes, act, SIZE, IS_SWIGLU, WARPGROUPS)),
                (_walk, (1, w_desc, pointers, shared, sizes, act, SIZE, IS_SWIGLU, WARPGROUPS)),
                (_walk, (2, w_desc, pointers, shared, sizes, act, SIZE, IS_SWIGLU, WARPGROUPS)),
                (_walk, (3, w_desc, pointers, shared, sizes, act, SIZE, IS_SWIGLU, WARPGROUPS)),
            ],
            [4, 4, 4],
            [REGISTERS, REGISTERS, REGISTERS],
        )


def stream(
    x_TX: Tensor, weight: MXFP8Tensor, y_TY: Tensor, swiglu: tuple[float, float, float] | None
) -> Tensor:
    """Write x wᵀ, T in 1..32, operands that `fits` of the grouped product accepts."""
    (num_tokens, size), num_rows = x_TX.shape, weight.shape[0]
    tokens = 16 if num_tokens <= 16 else 32
    parts = 1 if swiglu is None else 2
    alpha, limit, beta = swiglu or (0.0, 0.0, 0.0)
    one_each = num_multiprocessors(x_TX.device)
    values = weight.values.view(torch.uint8).view(parts, num_rows // parts, size)
    box = [parts, ROWS.value // parts, CHUNK.value]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.uint8)
    num_programs = triton.cdiv(num_rows, ROWS.value)
    # Two programs share a multiprocessor where one each would leave a second round for few.
    is_shared = one_each < num_programs <= 2 * one_each or size < 4 * CHUNK.value
    warpgroups = 2 if is_shared else 4
    _stream_kernel[(num_programs,)](
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
        WARPGROUPS=warpgroups,
        REGISTERS=REGISTERS,
        num_warps=4,
        maxnreg=REGISTERS,
        launch_pdl=True,
    )
    return y_TY
