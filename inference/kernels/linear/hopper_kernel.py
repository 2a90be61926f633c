"""Few tokens times a weight that is read once, on Hopper: a ring of tiles that never runs dry.

As `kernel.py`, but the tiles come by bulk copies into a ring that this kernel manages itself.
Weights do not depend on the kernel in front, so a program fills its ring with them before it
waits for that kernel, and lets the kernel behind do the same at once: while one kernel ends and
the next one begins, the memory goes on working. Only the tokens are loaded after the wait.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference.kernels.swiglu_oai.kernel import clamped

# Renamed between Triton 3.6 and 3.9.
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


class Config(NamedTuple):
    """How a weight is cut."""

    rows: int
    """Of the weight, a program: 64 or 128."""
    block_k: int
    """Columns of a tile."""
    stages: int
    """Tiles of the ring."""


MANY_ROWS = 1 << 15
"""From here on programs follow each other on a multiprocessor many times."""


def config_of(num_tokens: int, num_rows: int, size: int) -> Config:
    """One program a multiprocessor with a deep ring: programs that start early spread evenly.

    Of a weight of very many rows two programs share one, so that one's end hides the other's
    beginning; and so where `size` does not fill the deep ring.
    """
    is_deep = num_rows < MANY_ROWS
    if num_tokens > 16:
        return Config(64, 128, 8 if is_deep and size >= 8 * 128 else 4)
    if is_deep and size >= 5 * 256 and size % 256 == 0:
        return Config(64, 256, 5)
    return Config(64, 128, 5)


@gluon.jit(do_not_specialize=["num_tokens"])
def stream_kernel(
    x_desc,
    w_desc,
    out_ptr,
    num_tokens,
    num_rows,
    stride_out,
    alpha,
    limit,
    beta,
    SIZE: gl.constexpr,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    IS_SWIGLU: gl.constexpr,
):
    """`w_desc` is [1, Y, X]; with SwiGLU [2, Y / 2, X]: a tile holds gates and then their ups."""
    PARTS: gl.constexpr = 2 if IS_SWIGLU else 1
    SHARE: gl.constexpr = ROWS // PARTS
    STEPS: gl.constexpr = SIZE // BLOCK_K
    NUM_BYTES: gl.constexpr = (ROWS + TOKENS) * BLOCK_K * 2
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    dtype: gl.constexpr = w_desc.dtype
    first = gl.program_id(0) * SHARE
    w_smem = gl.allocate_shared_memory(dtype, [STAGES, PARTS, SHARE, BLOCK_K], w_desc.layout)
    x_smem = gl.allocate_shared_memory(dtype, [STAGES, TOKENS, BLOCK_K], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for step in gl.static_range(STAGES):
        mbarrier.init(full.index(step), count=1)
    for step in gl.static_range(STAGES):
        mbarrier.expect(full.index(step), NUM_BYTES)
        _load(w_desc, [0, first, step * BLOCK_K], full.index(step), w_smem.index(step))
    gdc_launch_dependents()
    gdc_wait()
    for step in gl.static_range(STAGES):
        _load(x_desc, [0, step * BLOCK_K], full.index(step), x_smem.index(step))

    # [ROWS, TOKENS]
    b_acc = gl.zeros([ROWS, TOKENS], gl.float32, layout=ACC)
    for step in range(STEPS):
        slot = step % STAGES
        mbarrier.wait(full.index(slot), (step // STAGES) & 1)
        b_weight = w_smem.index(slot).reshape([ROWS, BLOCK_K])
        b_x = x_smem.index(slot).permute((1, 0))
        b_acc = warpgroup_mma(b_weight, b_x, b_acc, is_async=True)
        # The step before is done with its slot, which takes the next tile that has none yet.
        b_acc = warpgroup_mma_wait(1, deps=[b_acc])
        _barrier()
        ahead = step + STAGES - 1
        is_ahead = (step > 0) & (ahead < STEPS)
        slot = ahead % STAGES
        k = ahead * BLOCK_K
        mbarrier.expect(full.index(slot), NUM_BYTES, pred=is_ahead)
        _load(w_desc, [0, first, k], full.index(slot), w_smem.index(slot), pred=is_ahead)
        _load(x_desc, [0, k], full.index(slot), x_smem.index(slot), pred=is_ahead)
    b_acc = warpgroup_mma_wait(0, deps=[b_acc])

    out_type: gl.constexpr = out_ptr.dtype.element_ty
    if IS_SWIGLU:
        OUT: gl.constexpr = gl.BlockedLayout([SHARE // 8, 1], [8, 4], [1, 4], [0, 1])
        EXCHANGE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0, 1])
        y_smem = gl.allocate_shared_memory(gl.float32, [ROWS, TOKENS], EXCHANGE)
        _barrier()
        y_smem.store(b_acc.to(out_type).to(gl.float32))
        _barrier()
        # [SHARE, TOKENS] each
        b_gate = y_smem.slice(0, SHARE).load(OUT)
        b_gate, b_up = clamped(b_gate, y_smem.slice(SHARE, SHARE).load(OUT), limit)
        b_out = b_gate / (1.0 + gl.exp(-alpha * b_gate)) * (b_up + beta)
        o_row = first + gl.arange(0, SHARE, layout=gl.SliceLayout(1, OUT))
        m_row = o_row < num_rows // 2
        o_token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, OUT))
    else:
        OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
        b_out = gl.convert_layout(b_acc.to(out_type), OUT)
        o_row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
        m_row = o_row < num_rows
        o_token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, OUT))
    p_out = out_ptr + o_token.to(gl.int64)[None, :] * stride_out + o_row[:, None]
    gl.store(p_out, b_out.to(out_type), mask=m_row[:, None] & (o_token < num_tokens)[None, :])


def _descriptor(matrix: Tensor, block: list[int]) -> TensorDescriptor:
    dtype = gl.bfloat16 if matrix.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return TensorDescriptor.from_tensor(matrix, block, layout)


def stream_linear(
    x_TX: Tensor,
    weight_YX: Tensor,
    out_dtype: torch.dtype | None,
    swiglu: tuple[float, float, float] | None,
    config: Config | None = None,
) -> Tensor:
    """T in 1..32, BF16 or FP16, rows contiguous and aligned to 16 bytes; X: whole tiles."""
    (num_tokens, size), num_rows = x_TX.shape, weight_YX.shape[0]
    config = config_of(num_tokens, num_rows, size) if config is None else config
    width = num_rows if swiglu is None else num_rows // 2
    y_TY = torch.empty(num_tokens, width, dtype=out_dtype or x_TX.dtype, device=x_TX.device)
    alpha, limit, beta = (0.0, 0.0, 0.0) if swiglu is None else swiglu
    tokens = max(16, triton.next_power_of_2(num_tokens))
    assert size % config.block_k == 0
    assert size >= config.stages * config.block_k, "the ring is filled before the wait"
    parts = 1 if swiglu is None else 2
    weight = weight_YX.as_strided(
        (parts, num_rows // parts, size),
        (num_rows // parts * weight_YX.stride(0), weight_YX.stride(0), 1),
    )
    stream_kernel[(triton.cdiv(num_rows, config.rows),)](
        _descriptor(x_TX, [tokens, config.block_k]),
        _descriptor(weight, [parts, config.rows // parts, config.block_k]),
        y_TY,
        num_tokens,
        num_rows,
        y_TY.stride(0),
        alpha,
        limit,
        beta,
        SIZE=size,
        ROWS=config.rows,
        TOKENS=tokens,
        BLOCK_K=config.block_k,
        STAGES=config.stages,
        IS_SWIGLU=swiglu is not None,
        num_warps=4,
        launch_pdl=True,
    )
    return y_TY
