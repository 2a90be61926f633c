"""Rows of MXFP8 weights times a few tokens on Hopper: a ring of tiles, widened in registers.

Weights come by bulk copies into a ring that goes on from tile to tile, so the memory never waits
for the end of one. They are widened to BF16 in registers, exactly, and are the left operand of
`mma.sync`. A sum over k does not care about its order, so a thread takes the 32 contiguous bytes
that share a scale and of the tokens the same 32 places: nothing is exchanged between threads.

Of 128 columns thread t of four has 32 t + 4 s + 2 e + h, which the product of step s takes as its
column 8 h + 2 t + e: bytes h and h + 2 of a word become neighbours, which costs least.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Renamed between Triton 3.6 and 3.9.
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

DEPTH = gl.constexpr(128)
"""Columns of a tile of the ring: one swizzled line."""
WORDS = gl.constexpr(32)
"""As int32."""


@gluon.constexpr_function
def _bases(rows, tail):
    """(registers, lanes, warps) of the rows of a tile, with `tail` zeros behind each."""
    zeros = [0] * tail
    warps = [[16 << i, *zeros] for i in range((rows // 32).bit_length() - 1)]
    return [[8, *zeros], [rows // 2, *zeros]], [[1 << i, *zeros] for i in range(3)], warps


@gluon.constexpr_function
def _word_layout(rows):
    """[rows, 4, 8] words: a thread has the eight that share a scale, of four rows."""
    registers, lanes, warps = _bases(rows, 2)
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4], *registers]
    lanes = [[0, 1, 0], [0, 2, 0], *lanes]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [rows, 4, 8])


@gluon.constexpr_function
def _flat_word_layout(rows):
    registers, lanes, warps = _bases(rows, 1)
    registers = [[0, 1], [0, 2], [0, 4], *registers]
    return gl.DistributedLinearLayout(
        registers, [[0, 8], [0, 16], *lanes], warps, [], [rows, WORDS.value]
    )


@gluon.constexpr_function
def token_layout(tokens, rows):
    """[tokens, DEPTH / 2] words of two: every warp has all of them, a thread 16 of a token."""
    registers = [[0, 1 << i] for i in range(4)]
    registers += [[8 << i, 0] for i in range((tokens // 8).bit_length() - 1)]
    lanes = [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]]
    warps = [[0, 0]] * ((rows // 32).bit_length() - 1)
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [tokens, DEPTH.value // 2])


@gluon.jit
def _widen(b_word, b_scale, operand: gl.constexpr, LAYOUT: gl.constexpr):
    """[ROWS, DEPTH] BF16 of [ROWS, 4, 8] words and the [ROWS] words of their scales.

    An e4m3 byte seeeemmm put at s0000eeeemmm0000 is BF16 and worth 2^-120 of it.
    """
    ROWS: gl.constexpr = b_word.shape[0]
    o_t = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    # [ROWS, 4]: 2^(scale - 127 + 120) twice, by its bits.
    b_factor = ((b_scale[:, None] >> (8 * o_t)[None, :]) & 0xFF) * 0x00800080 + 0x3C003C00
    b_0, b_1, b_2, b_3 = gl.inline_asm_elementwise(
        """{
        .reg .b32 even, odd, sign;
        shr.b32 odd, $4, 4;
        and.b32 odd, odd, 0x07F007F0;
        lop3.b32 odd, $4, 0x80008000, odd, 0xEA;
        shl.b32 even, $4, 4;
        and.b32 even, even, 0x07F007F0;
        shl.b32 sign, $4, 8;
        lop3.b32 even, sign, 0x80008000, even, 0xEA;
        mul.rn.bf16x2 even, even, $5;
        mul.rn.bf16x2 odd, odd, $5;
        mov.b32 {$0, $2}, even;
        mov.b32 {$1, $3}, odd;
        }""",
        "=h,=h,=h,=h,r,r",
        [b_word, b_factor[:, :, None]],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=1,
    )
    # [ROWS, t, s, e, h]
    b_weight = gl.join(gl.join(b_0, b_2), gl.join(b_1, b_3))
    b_weight = b_weight.permute((0, 2, 4, 1, 3)).reshape([ROWS, DEPTH])
    return gl.convert_layout(b_weight, operand, assert_trivial=True)


@gluon.jit
def _reorder(b_x, operand: gl.constexpr):
    """[DEPTH, TOKENS] BF16 of [TOKENS, DEPTH / 2] words of two, in the order of `_widen`."""
    TOKENS: gl.constexpr = b_x.shape[0]
    b_x = b_x.reshape([TOKENS, 4, 8, 2])
    b_0 = b_x.to(gl.int16).to(gl.bfloat16, bitcast=True)
    b_1 = (b_x >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    # [TOKENS, t, s, e, h]
    b_x = gl.join(b_0, b_1).permute((2, 4, 1, 3, 0)).reshape([DEPTH, TOKENS])
    return gl.convert_layout(b_x, operand, assert_trivial=True)


@gluon.jit
def make_ring(w_desc, STAGES: gl.constexpr):
    """(slots, barriers of full ones)."""
    shape: gl.constexpr = w_desc.block_type.shape
    smem = gl.allocate_shared_memory(
        w_desc.dtype, [STAGES, shape[0], shape[1], shape[2]], w_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
    return smem, full


@gluon.jit
def _fetch(weights, ring, slot, expert, row, step, pred, HAS_SHARED: gl.constexpr):
    """Copy a tile of an expert's weight, rows from `row`, into a slot of the ring."""
    w_desc, shared_desc = weights
    smem, full = ring
    PARTS: gl.constexpr = smem.shape[1]
    NUM_BYTES: gl.constexpr = PARTS * smem.shape[2] * DEPTH
    bar = full.index(slot)
    mbarrier.expect(bar, NUM_BYTES, pred=pred)
    if HAS_SHARED:
        is_shared = pred & (expert < 0)
        _load(shared_desc, [0, row, step * WORDS], bar, smem.index(slot), pred=is_shared)
        pred = pred & (expert >= 0)
    _load(w_desc, [expert * PARTS, row, step * WORDS], bar, smem.index(slot), pred=pred)


@gluon.jit
def fill(weights, ring, expert, row, pred, HAS_SHARED: gl.constexpr):
    STAGES: gl.constexpr = ring[0].shape[0]
    for step in gl.static_range(STAGES):
        _fetch(weights, ring, step, expert, row, step, pred, HAS_SHARED)


@gluon.jit
def product(
    weights, ring, i_use, expert, row, next_expert, next_row, has_next, p_x, m_x, p_scale,
    STEPS: gl.constexpr, HAS_SHARED: gl.constexpr,
):  # fmt: skip
    """([ROWS, TOKENS] of the tile at the ring's use `i_use`, the use behind it).

    The slots are given to what follows: first the rest of this tile, then the next one.
    """
    smem, full = ring
    STAGES: gl.constexpr = smem.shape[0]
    ROWS: gl.constexpr = smem.shape[1] * smem.shape[2]
    TOKENS: gl.constexpr = p_x.shape[0]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [ROWS // 32, 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    WORD: gl.constexpr = _word_layout(ROWS)
    FLAT: gl.constexpr = _flat_word_layout(ROWS)
    b_acc = gl.zeros([ROWS, TOKENS], gl.float32, ACC)
    b_x = gl.load(p_x, mask=m_x, other=0)
    b_scale = gl.load(p_scale)
    b_scale_1 = gl.load(p_scale + 1)
    for step in range(STEPS):
        b_x_1 = gl.load(p_x + gl.minimum(step + 1, STEPS - 1) * (DEPTH // 2), mask=m_x, other=0)
        b_scale_2 = gl.load(p_scale + gl.minimum(step + 2, STEPS - 1))
        slot = i_use % STAGES
        mbarrier.wait(full.index(slot), (i_use // STAGES) & 1)
        b_word = smem.index(slot).reshape([ROWS, WORDS]).load(FLAT)
        # Everyone has read the slot.
        _barrier()
        ahead = step + STAGES
        if ahead < STEPS:
            _fetch(weights, ring, slot, expert, row, ahead, True, HAS_SHARED)
        else:
            _fetch(weights, ring, slot, next_expert, next_row, ahead - STEPS, has_next, HAS_SHARED)
        b_word = gl.convert_layout(b_word.reshape([ROWS, 4, 8]), WORD, assert_trivial=True)
        b_acc = mma_v2(_widen(b_word, b_scale, LEFT, WORD), _reorder(b_x, RIGHT), b_acc)
        b_x, b_scale, b_scale_1 = b_x_1, b_scale_1, b_scale_2
        i_use += 1
    return b_acc, i_use


@gluon.jit
def scales_at(scales, expert, row, NUM_ROWS: gl.constexpr, STEPS: gl.constexpr, smem):
    """[ROWS] pointers to the first word of scales of a tile's rows."""
    PARTS: gl.constexpr = smem.shape[1]
    SHARE: gl.constexpr = smem.shape[2]
    LAYOUT: gl.constexpr = _word_layout(PARTS * SHARE)
    o_r = gl.arange(0, PARTS * SHARE, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    o_row = gl.minimum(row + o_r % SHARE, NUM_ROWS - 1) + o_r // SHARE * NUM_ROWS
    p_scale = scales[0] + gl.maximum(expert, 0).to(gl.int64) * (PARTS * NUM_ROWS * STEPS)
    if expert < 0:
        p_scale = scales[1]
    return p_scale + o_row.to(gl.int64) * STEPS
