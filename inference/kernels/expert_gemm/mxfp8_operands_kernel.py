"""Both operands of a product with MXFP8 weights on Hopper's tensor cores.

The weights are the left operand and come from registers, widened to BF16 exactly: they never lie
in shared memory in BF16. The bits s eeee mmm of a value put where BF16 has its sign, the last bits
of its exponent and the first of its mantissa are the value times 2^-120, also of a subnormal. One
product with a power of two mends that and applies the scale; within BF16 as long as a scale byte
is at most 134.

A thread reads 32 neighbouring bytes of a row, one block of one scale, and they are not the columns
that the tensor cores expect of it. A sum over columns may take them in any order, so the right
operand, the tokens, has its columns in the same other order: in each 128, bits t t j j j e h of a
column's number become j j j h t t e.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from inference.kernels.expert_gemm import mxfp8_config as config
from inference.kernels.expert_gemm.align_kernel import Plan

CHUNK = gl.constexpr(128)
"""Columns of a step, and those whose order is changed together."""
ROWS = gl.constexpr(64)
"""Of a block of weights; a warpgroup has two, a program four."""

BOX = gl.constexpr(config.BOX)
WORDS = gl.constexpr(4)
"""Steps whose scales are read together: a step's four of a row are a word."""

_WIDEN = gl.constexpr("""{
.reg .b32 odd, even, sign;
and.b32 sign, $2, 0x80808080;
shr.u32 odd, $2, 4;
lop3.b32 odd, odd, sign, 0x07f007f0, 0xe4;
mul.rn.bf16x2 $1, odd, $3;
shl.b32 even, $2, 4;
shl.b32 sign, sign, 8;
lop3.b32 even, even, sign, 0x07f007f0, 0xe4;
mul.rn.bf16x2 $0, even, $3;
}""")


@gluon.constexpr_function
def _bytes_layout(width=32):
    """[rows, 4 blocks, 32 columns]: a thread has a block of each of two rows, 8 rows apart."""
    columns = [[0, 0, 1 << bit] for bit in range(width.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[*columns, [8, 0, 0]],
        lane_bases=[[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]],
        block_bases=[],
        shape=[64, 4, width],
    )


@gluon.constexpr_function
def _flat_bytes_layout():
    """The same of [rows, 128 columns]."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [8, 0]],
        lane_bases=[[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 128],
    )


@gluon.jit
def scales(
    p_scale, row, num_rows, stride_part, SHARE: gl.constexpr, SIZE: gl.constexpr,
    HAS_EDGE: gl.constexpr,
):  # fmt: skip
    """Scale bytes of a step, [rows, 4]: SHARE rows from `row`, as many `stride_part` further on."""
    by_block: gl.constexpr = gl.SliceLayout(2, _bytes_layout())
    o_row = gl.arange(0, ROWS, gl.SliceLayout(1, by_block))
    o_row = row + o_row % SHARE + o_row // SHARE * stride_part
    o_block = gl.arange(0, CHUNK // 32, gl.SliceLayout(0, by_block))
    p_scale += o_row[:, None] * (SIZE // 32) + o_block[None, :]
    if HAS_EDGE:
        b_scale = gl.load(p_scale, mask=(o_row < num_rows)[:, None], other=0)
    else:
        b_scale = gl.load(p_scale)
    return b_scale


@gluon.constexpr_function
def _words_layout():
    """[rows, WORDS]: a thread has a word of each of two rows, 8 rows apart."""
    return gl.DistributedLinearLayout(
        reg_bases=[[8, 0]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 4],
    )


@gluon.jit
def scale_words(
    p_scale, row, num_rows, first_step, SIZE: gl.constexpr, HAS_EDGE: gl.constexpr
):  # fmt: skip
    """Scale bytes of WORDS steps, [rows, WORDS] int32; zeros behind the last step."""
    layout: gl.constexpr = _words_layout()
    NUM: gl.constexpr = SIZE // CHUNK
    o_row = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    o_step = first_step + gl.arange(0, WORDS, gl.SliceLayout(0, layout))
    m_word = (o_step < NUM)[None, :]
    if HAS_EDGE:
        m_word = m_word & (o_row < num_rows)[:, None]
    return gl.load(p_scale + o_row[:, None] * NUM + o_step[None, :], mask=m_word, other=0)


@gluon.jit
def scales_of(b_words, i):
    """Scale bytes of the i-th of WORDS steps, [rows, 4]."""
    layout: gl.constexpr = _words_layout()
    b_word = gl.gather(b_words, gl.full([ROWS, WORDS], 0, gl.int32, layout) + i, 1)
    o_block = gl.arange(0, CHUNK // 32, gl.SliceLayout(0, layout))
    b_scale = (b_word >> (8 * o_block)[None, :]) & 0xFF
    return gl.convert_layout(b_scale, gl.SliceLayout(2, _bytes_layout()), assert_trivial=True)


@gluon.jit
def bytes_of(w_tile):
    """[rows, 4 blocks, 32 columns] of bytes from shared memory, a block a thread."""
    b_bytes = w_tile.load(_flat_bytes_layout()).reshape([ROWS, 4, 32])
    return gl.convert_layout(b_bytes, _bytes_layout(), assert_trivial=True)


@gluon.jit
def half_of(w_tile, half: gl.constexpr):
    """[rows, 4 blocks, 16 columns]: in the other order the first or the last half of all."""
    b_bytes = bytes_of(w_tile).reshape([ROWS, 4, 2, 16]).permute((0, 1, 3, 2))
    return gl.split(b_bytes)[half]


@gluon.jit
def widened(b_bytes, b_scale, mma: gl.constexpr):
    """[rows, columns] BF16 as the left operand of a product, columns in the other order.

    Of bytes from `bytes_of` or `half_of` and the scale bytes from `scales` or `scales_of`.
    """
    WIDTH: gl.constexpr = b_bytes.shape[2]
    layout: gl.constexpr = _bytes_layout(WIDTH)
    b_bytes = gl.convert_layout(b_bytes, layout, assert_trivial=True)
    b_scale = gl.convert_layout(b_scale, gl.SliceLayout(2, layout), assert_trivial=True)
    # [rows, 4]: 2^(scale - 7), that is 2^(scale - 127) · 2^120, in both halves.
    b_power = ((b_scale.to(gl.int32) + 120) << 7) * 0x10001
    b_power, b_bytes = gl.broadcast(gl.expand_dims(b_power, 2), b_bytes)
    b_w = gl.inline_asm_elementwise(
        _WIDEN, "=r,=r,r,r,r,r,r", [b_bytes, b_power], dtype=gl.bfloat16, is_pure=True, pack=4
    )
    b_w = b_w.reshape([ROWS, 4, WIDTH // 4, 2, 2]).permute((0, 2, 3, 1, 4))
    b_w = b_w.reshape([ROWS, 4 * WIDTH])
    return gl.convert_layout(b_w, gl.DotOperandLayout(0, mma, 2), assert_trivial=True)


@triton.jit(do_not_specialize=["place_start", "num_chunks"])
def _ordered_kernel(
    x_ptr,
    out_ptr,
    ids_ptr,
    plan_ptr,
    place_start,
    num_chunks,
    stride_x,
    SIZE: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """BLOCK chunks of 128 columns: out[place] = x[token], columns in the other order.

    A token is read once, whatever number of experts it has here, if any.
    """
    if USE_PDL:
        # In this order: `product` reads the plan before it waits.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    o_chunk = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_chunk = o_chunk < num_chunks
    o_token = o_chunk // (SIZE // 128)
    m_token = m_chunk
    if plan_ptr is not None:
        m_token = o_token < 0
        for a in tl.static_range(TOPK):
            b_id = tl.load(ids_ptr + o_token * TOPK + a, mask=m_chunk, other=-1)
            m_token = m_token | (b_id >= 0)
    # [BLOCK, 128]
    o_k = tl.arange(0, 128)[None, :]
    o_k += (o_chunk % (SIZE // 128) * 128)[:, None]
    p_x = x_ptr + o_token.to(tl.int64)[:, None] * stride_x + o_k
    b_x = tl.load(p_x, mask=m_token[:, None], other=0.0)
    # t j e h -> j h t e
    b_x = b_x.reshape(BLOCK, 4, 8, 2, 2).permute(0, 2, 4, 1, 3).reshape(BLOCK, 128)
    for a in tl.static_range(TOPK):
        o_row = o_token
        m_row = m_chunk
        if plan_ptr is not None:
            o_pair = o_token * TOPK + a
            m_row = tl.load(ids_ptr + o_pair, mask=m_chunk, other=-1) >= 0
            o_row = tl.load(plan_ptr + place_start + o_pair, mask=m_row, other=0)
        p_out = out_ptr + o_row.to(tl.int64)[:, None] * SIZE + o_k
        tl.store(p_out, b_x, mask=m_row[:, None])


def ordered(
    x_TX: Tensor, plan: Plan | None = None, ids_TA: Tensor | None = None, *, use_pdl: bool
) -> Tensor:
    """The right operand of `product`, [T, X]; with a plan a row of each pair in its order."""
    num_tokens, size = x_TX.shape
    num_rows, topk = (num_tokens, 1) if ids_TA is None else (ids_TA.numel(), ids_TA.shape[1])
    out_XX = torch.empty(num_rows, size, dtype=x_TX.dtype, device=x_TX.device)
    block, num_chunks = 32, num_tokens * (size // 128)
    _ordered_kernel[(triton.cdiv(num_chunks, block),)](
        x_TX,
        out_XX,
        ids_TA,
        None if plan is None else plan.data,
        0 if plan is None else plan.place_start,
        num_chunks,
        x_TX.stride(0),
        SIZE=size,
        TOPK=topk,
        BLOCK=block,
        USE_PDL=use_pdl,
        launch_pdl=use_pdl,
        num_warps=4,
    )
    return out_XX
