"""Grouped products with MXFP8 weights on Hopper: the weights are the operand in registers.

A program takes tile after tile of 256 rows of weights and up to 160 tokens. One warp fetches
through the copy engine; two warpgroups read bytes of weights, widen them to BF16 exactly and hand
them to the tensor cores as their left operand (`mxfp8_operands_kernel.py`), while the products
before run. The tokens are the right operand, from shared memory: a tile of 32 costs the tensor
cores a quarter of one of 128. An expert's last tile may have a tail of 32 more, a second product
with the same widened weights: hardly an expert has a few tokens left that fetch them again.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from inference.kernels.expert_gemm.align_kernel import Plan
from inference.kernels.expert_gemm.mxfp8_config import Config
from inference.kernels.expert_gemm.mxfp8_fetch_kernel import (
    class_of,
    num_tiles_m,
    produce,
    tile_of,
    tokens_of,
)
from inference.kernels.expert_gemm.mxfp8_finish_kernel import finish
from inference.kernels.expert_gemm.mxfp8_operands_kernel import (
    BOX,
    CHUNK,
    ROWS,
    WORDS,
    half_of,
    scale_words,
    scales_of,
    widened,
)
from inference.kernels.hardware import num_multiprocessors
from inference.kernels.mxfp8 import MXFP8Tensor

REGISTERS = (240, 24)
"""Of a thread of the second warpgroup and of the warp that fetches."""
W_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
X_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)

GROUP = 8
"""Neighbouring tiles of tokens that go over the same weights at the same time."""

# Renamed between Triton 3.6 and 3.9.
_Shared = gl.shared_memory_descriptor
_reinterpret = getattr(_Shared, "reinterpret", None) or _Shared._reinterpret


@gluon.jit
def _multiply(b_w, ring, i_x, i_tail, b_accs, HAS_TAIL: gl.constexpr):
    """Begin to add half a step of a block, and wait for what began before.

    `b_accs`: of the tokens, of the tail, and of both the other block's.
    """
    x_tiles, tails = ring
    b_acc, b_tail, b_other, b_other_tail = b_accs
    b_acc = warpgroup_mma(b_w, x_tiles.index(i_x).permute((1, 0)), b_acc, is_async=True)
    if HAS_TAIL:
        b_x = tails.index(i_tail).permute((1, 0))
        b_tail = warpgroup_mma(b_w, b_x, b_tail, is_async=True)
    return _wait(1, (b_acc, b_tail, b_other, b_other_tail), HAS_TAIL)


@gluon.jit
def _wait(num_outstanding: gl.constexpr, b_accs, HAS_TAIL: gl.constexpr):
    b_0, b_tail_0, b_1, b_tail_1 = b_accs
    if HAS_TAIL:
        b_0, b_tail_0, b_1, b_tail_1 = warpgroup_mma_wait(2 * num_outstanding, deps=b_accs)
    else:
        b_0, b_1 = warpgroup_mma_wait(num_outstanding, deps=(b_0, b_1))
    return b_0, b_tail_0, b_1, b_tail_1


@gluon.jit
def _products(
    w: gl.constexpr, ring, p_scale, i_use, row, num_rows, TOKENS: gl.constexpr, SIZE: gl.constexpr,
    STRIDE_PART: gl.constexpr, HAS_EDGE: gl.constexpr, HAS_TAIL: gl.constexpr,
):  # fmt: skip
    """Two blocks of rows of weights times the tokens of a tile and times its tail."""
    x_boxes, tails, w_tiles, full, empty = ring
    STAGES: gl.constexpr = full.shape[0]
    PER_STAGE: gl.constexpr = x_boxes.shape[0] // (TOKENS // BOX) // STAGES
    shape: gl.constexpr = [STAGES * PER_STAGE, TOKENS, CHUNK // 2]
    x_tiles = _reinterpret(x_boxes, x_boxes.dtype, shape, X_LAYOUT)
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    b_0 = gl.zeros([ROWS, TOKENS], gl.float32, mma)
    b_1 = gl.zeros([ROWS, TOKENS], gl.float32, mma)
    tail_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BOX, 16])
    b_tail_0 = gl.zeros([ROWS, BOX], gl.float32, tail_mma)
    b_tail_1 = gl.zeros([ROWS, BOX], gl.float32, tail_mma)
    NUM: gl.constexpr = SIZE // CHUNK
    b_next_0 = scale_words(p_scale, row, num_rows, 0, SIZE, HAS_EDGE)
    b_next_1 = scale_words(p_scale, row + STRIDE_PART, num_rows, 0, SIZE, HAS_EDGE)
    for first in range(0, NUM, WORDS):
        b_words_0 = b_next_0
        b_words_1 = b_next_1
        b_next_0 = scale_words(p_scale, row, num_rows, first + WORDS, SIZE, HAS_EDGE)
        b_next_1 = scale_words(p_scale, row + STRIDE_PART, num_rows, first + WORDS, SIZE, HAS_EDGE)
        for i in range(0, WORDS if NUM % WORDS == 0 else gl.minimum(WORDS, NUM - first)):
            stage = i_use % STAGES
            b_scale_0 = scales_of(b_words_0, i)
            b_scale_1 = scales_of(b_words_1, i)
            w_0 = w_tiles.index(stage * 4 + w)
            w_1 = w_tiles.index(stage * 4 + 2 + w)
            i_x = stage * PER_STAGE
            i_tail = stage * 2
            mbarrier.wait(full.index(stage), (i_use // STAGES) & 1)
            # Half a block is widened while the half before is multiplied.
            b_w = widened(half_of(w_0, 0), b_scale_0, mma)
            b_0, b_tail_0, b_1, b_tail_1 = _multiply(
                b_w, (x_tiles, tails), i_x, i_tail, (b_0, b_tail_0, b_1, b_tail_1), HAS_TAIL
            )
            b_w = widened(half_of(w_0, 1), b_scale_0, mma)
            b_0, b_tail_0, b_1, b_tail_1 = _multiply(
                b_w, (x_tiles, tails), i_x + 1, i_tail + 1, (b_0, b_tail_0, b_1, b_tail_1), HAS_TAIL
            )
            b_w = widened(half_of(w_1, 0), b_scale_1, mma)
            b_1, b_tail_1, b_0, b_tail_0 = _multiply(
                b_w, (x_tiles, tails), i_x, i_tail, (b_1, b_tail_1, b_0, b_tail_0), HAS_TAIL
            )
            b_w = widened(half_of(w_1, 1), b_scale_1, mma)
            b_1, b_tail_1, b_0, b_tail_0 = _multiply(
                b_w, (x_tiles, tails), i_x + 1, i_tail + 1, (b_1, b_tail_1, b_0, b_tail_0), HAS_TAIL
            )
            b_0, b_tail_0, b_1, b_tail_1 = _wait(0, (b_0, b_tail_0, b_1, b_tail_1), HAS_TAIL)
            mbarrier.arrive(empty.index(stage))
            i_use += 1
    return b_0, b_1, b_tail_0, b_tail_1


@gluon.jit
def _consume_tile(
    w: gl.constexpr, out_ptr, p_scale, ring, i_use, row, first, end, stride_out, act,
    TOKENS: gl.constexpr, NUM_ROWS: gl.constexpr, SIZE: gl.constexpr, STRIDE_PART: gl.constexpr,
    IS_SWIGLU: gl.constexpr, IS_ORDERED: gl.constexpr, HAS_TAIL: gl.constexpr,
):  # fmt: skip
    HAS_EDGE: gl.constexpr = NUM_ROWS % (4 * ROWS) != 0
    b_0, b_1, b_tail_0, b_tail_1 = _products(
        w, ring, p_scale, i_use, row, NUM_ROWS, TOKENS, SIZE, STRIDE_PART, HAS_EDGE, HAS_TAIL
    )
    finish(
        b_0, b_1, out_ptr, row, first, end, stride_out, act, NUM_ROWS, STRIDE_PART, IS_SWIGLU,
        IS_ORDERED,
    )  # fmt: skip
    if HAS_TAIL:
        finish(
            b_tail_0, b_tail_1, out_ptr, row, first + TOKENS, end, stride_out, act, NUM_ROWS,
            STRIDE_PART, IS_SWIGLU, IS_ORDERED,
        )  # fmt: skip


@gluon.jit
def _consume(
    w: gl.constexpr, out_ptr, scale_ptr, plan_ptr, ring, num_tokens, num_n, group, stride_out, act,
    NUM_ROWS: gl.constexpr, SIZE: gl.constexpr, STRIDE_N: gl.constexpr, STRIDE_PART: gl.constexpr,
    IS_SWIGLU: gl.constexpr, IS_ORDERED: gl.constexpr, HAS_TAIL: gl.constexpr,
):  # fmt: skip
    BOXES: gl.constexpr = ring[0].shape[0] // ring[3].shape[0] // 2
    num_m = num_tiles_m(plan_ptr, num_tokens, BOXES * BOX)
    i_use = 0
    for tile in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        i_m, i_n = tile_of(tile, num_m, num_n, group)
        expert, first, end = tokens_of(plan_ptr, i_m, num_tokens, BOXES * BOX)
        num_boxes, is_more = class_of(end - first, BOXES)
        row = i_n * STRIDE_N + w * ROWS
        p_scale = scale_ptr + expert.to(gl.int64) * (NUM_ROWS * (SIZE // CHUNK))
        for log in gl.static_range(3):
            if (1 << log) <= BOXES:  # noqa: SIM102
                if (num_boxes == (1 << log)) & (is_more == 0):
                    _consume_tile(
                        w, out_ptr, p_scale, ring, i_use, row, first, end, stride_out, act,
                        BOX << log, NUM_ROWS, SIZE, STRIDE_PART, IS_SWIGLU, IS_ORDERED, False,
                    )  # fmt: skip
        if HAS_TAIL:  # noqa: SIM102
            if is_more:
                _consume_tile(
                    w, out_ptr, p_scale, ring, i_use, row, first, end, stride_out, act,
                    BOX * BOXES, NUM_ROWS, SIZE, STRIDE_PART, IS_SWIGLU, IS_ORDERED, True,
                )  # fmt: skip
        i_use += SIZE // CHUNK


@gluon.jit(do_not_specialize=["num_tokens", "group"])
def product_kernel(
    x_desc, w_desc, scale_ptr, out_ptr, plan_ptr, num_tokens, group, stride_out, alpha, limit, beta,
    NUM_ROWS: gl.constexpr, SIZE: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr,
    IS_SWIGLU: gl.constexpr, IS_ORDERED: gl.constexpr, HAS_TAIL: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Rows of `w_desc`, NUM_ROWS an expert, times the tokens that are an expert's by the plan.

    Without a plan all are the only expert's. With SwiGLU a tile holds gates and their ups.
    """
    STRIDE_N: gl.constexpr = 2 * ROWS if IS_SWIGLU else 4 * ROWS
    STRIDE_PART: gl.constexpr = NUM_ROWS // 2 if IS_SWIGLU else 2 * ROWS
    COLUMNS: gl.constexpr = NUM_ROWS // 2 if IS_SWIGLU else NUM_ROWS
    num_n: gl.constexpr = (COLUMNS + STRIDE_N - 1) // STRIDE_N
    w_tiles = gl.allocate_shared_memory(gl.uint8, [STAGES * 4, ROWS, CHUNK], W_LAYOUT)
    x_boxes = gl.allocate_shared_memory(
        x_desc.dtype, [STAGES * (TOKENS // BOX) * 2, BOX, CHUNK // 2], X_LAYOUT
    )
    num_tails: gl.constexpr = STAGES * 2 if HAS_TAIL else 1
    tails = gl.allocate_shared_memory(x_desc.dtype, [num_tails, BOX, CHUNK // 2], X_LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    ring = x_boxes, tails, w_tiles, full, empty
    act = alpha, limit, beta
    gl.warp_specialize(
        [
            (_consume, (0, out_ptr, scale_ptr, plan_ptr, ring, num_tokens, num_n, group, stride_out,
                        act, NUM_ROWS, SIZE, STRIDE_N, STRIDE_PART, IS_SWIGLU, IS_ORDERED,
                        HAS_TAIL)),
            (_consume, (1, out_ptr, scale_ptr, plan_ptr, ring, num_tokens, num_n, group, stride_out,
                        act, NUM_ROWS, SIZE, STRIDE_N, STRIDE_PART, IS_SWIGLU, IS_ORDERED,
                        HAS_TAIL)),
            (produce, (x_desc, w_desc, ring, plan_ptr, num_tokens, num_n, group, NUM_ROWS, SIZE,
                       STRIDE_N, STRIDE_PART, HAS_TAIL)),
        ],
        [4, 1],
        REGISTERS,
    )  # fmt: skip


def fits(x_TX: Tensor, weight: MXFP8Tensor, *, is_swiglu: bool) -> bool:
    """Whether `product` takes these operands, x_TX before it is `ordered`."""
    num_rows, size = weight.shape[-2:]
    return (
        x_TX.dtype == torch.bfloat16
        and x_TX.stride(-1) == 1
        and size % CHUNK.value == 0
        and (not is_swiglu or num_rows % (4 * ROWS.value) == 0)
        and weight.values.is_contiguous()
        and weight.scale.is_contiguous()
        and weight.values.data_ptr() % 16 == 0
        and weight.scale.data_ptr() % 4 == 0
    )


def product(
    x_XX: Tensor,
    weight: MXFP8Tensor,
    out_XY: Tensor,
    config: Config,
    plan: Plan | None = None,
    act: tuple[float, float, float] | None = None,
    *,
    is_ordered: bool = False,
) -> Tensor:
    """Write x wᵀ of every row of `x_XX` and the expert that it is sorted to.

    The kernel in front is `ordered` or `product`: while it ends, weights and plan are read. Both
    let this one start only after whatever wrote these has ended.

    Args:
        x_XX: [rows, X] from `ordered`, or the output of a product with `is_ordered`.
        weight: [E, Y, X]; [Y, X] without a plan.
        out_XY: BF16 or FP32; [rows, Y], or [rows, Y / 2] with `act`.
        plan: of tiles and tails as in `config`; None: all rows are the only expert's.
        act: (alpha, limit, beta) of swiglu_oai; gates are the first half of the rows.
        is_ordered: columns of the output are in the order of a right operand.
    """
    num_rows, size = weight.shape[-2:]
    columns = num_rows // 2 if act is not None else num_rows
    num_n = triton.cdiv(columns, ROWS.value * (2 if act is not None else 4))
    num_m = triton.cdiv(x_XX.shape[0], config.tokens) if plan is None else plan.max_tiles
    alpha, limit, beta = act or (0.0, 0.0, 0.0)
    values = weight.values.view(torch.uint8).view(-1, size)
    product_kernel[(min(num_m * num_n, num_multiprocessors(x_XX.device)),)](
        _describe(x_XX, [BOX.value, CHUNK.value // 2], X_LAYOUT),
        _describe(values, [ROWS.value, CHUNK.value], W_LAYOUT),
        weight.scale.view(torch.int32),
        out_XY,
        None if plan is None else plan.data,
        x_XX.shape[0],
        GROUP,
        out_XY.stride(0),
        alpha,
        limit,
        beta,
        NUM_ROWS=num_rows,
        SIZE=size,
        TOKENS=config.tokens,
        STAGES=config.stages,
        IS_SWIGLU=act is not None,
        IS_ORDERED=is_ordered,
        HAS_TAIL=config.has_tail,
        REGISTERS=REGISTERS,
        num_warps=4,
        launch_pdl=True,
    )
    return out_XY


def _describe(matrix: Tensor, box: list[int], layout: gl.NVMMASharedLayout) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), box, layout)
