"""Rows of MXFP8 weights times a few tokens on Hopper: a ring of tiles, widened in registers.

Weights and scales come by bulk copies into a ring that goes on from tile to tile, so the memory
never waits for the end of one. Warps take rows of a tile and parts of its columns, and add up at
its end: a warp widens few bytes at a time, so even a single expert needs many.

Weights are widened to BF16 in registers, exactly, and are the left operand of `mma.sync`. A sum
over k does not care about its order, so a thread takes the 32 contiguous bytes that share a scale
and of the tokens the same 32 places: nothing is exchanged between threads.

Of 128 columns thread t of four has 32 t + 4 s + 2 e + h, which the product of step s takes as its
column 8 h + 2 t + e: bytes h and h + 2 of a word become neighbours, which costs least.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Renamed between Triton 3.6 and 3.9.
_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

WORDS = gl.constexpr(32)
"""Of a swizzled line of the ring: a row's 128 columns as int32."""
LINE = gl.constexpr(128)
"""Its columns."""


@gluon.constexpr_function
def _bases(rows, splits, head, tail):
    """(registers, lanes, warps) of [splits, rows] between zeros: warps cut the rows, then k."""
    row = [[*head, 0, 1 << i, *tail] for i in range(rows.bit_length() - 1)]
    warps = row[4:-1] + [[*head, 1 << i, 0, *tail] for i in range(splits.bit_length() - 1)]
    return [row[3], row[-1]], row[:3], warps


@gluon.constexpr_function
def _word_layout(rows, splits):
    """[splits, rows, 4, 8] words: a thread has the eight that share a scale, of four rows."""
    registers, lanes, warps = _bases(rows, splits, [], [0, 0])
    registers = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], *registers]
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], *lanes]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [splits, rows, 4, 8])


@gluon.constexpr_function
def _line_layout(rows, splits):
    """[splits * rows, WORDS], as `_word_layout`."""
    registers, lanes, warps = _bases(rows, splits, [], [0])
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4], *registers]
    lanes = [[0, 0, 8], [0, 0, 16], *lanes]
    flat = [[[s * rows + r, w] for s, r, w in part] for part in (registers, lanes, warps)]
    return gl.DistributedLinearLayout(*flat, [], [splits * rows, WORDS.value])


@gluon.constexpr_function
def _scale_layout(rows, splits, size):
    """[rows, size] words of four scales: of each a thread uses one, of its warp's part of k."""
    registers, lanes, warps = _bases(rows, splits, [], [])
    lanes = [[0, 0], [0, 0], *lanes]
    turned = [[[r, s] for s, r in part] for part in (registers, lanes, warps)]
    more = [[0, splits << i] for i in range((size // splits).bit_length() - 1)]
    return gl.DistributedLinearLayout([*more, *turned[0]], *turned[1:], [], [rows, size])


@gluon.jit
def _scales(s_scale, k, SPLITS: gl.constexpr):
    """[ROWS, SPLITS] words of the lines from k of a slot, which begins at a multiple of four."""
    ROWS: gl.constexpr = s_scale.shape[0]
    SIZE: gl.constexpr = s_scale.shape[1]
    b_scale = s_scale.load(_scale_layout(ROWS, SPLITS, SIZE))
    if SPLITS < 4:
        b_scale = b_scale.reshape([ROWS, 2, 2]).permute((0, 2, 1))
        b_0, b_1 = b_scale.split()
        b_scale = gl.where(k & 2 != 0, b_1, b_0)
        if SPLITS == 1:
            b_0, b_1 = b_scale.split()
            b_scale = gl.where(k & 1 != 0, b_1, b_0).reshape([ROWS, 1])
    return b_scale


@gluon.constexpr_function
def token_layout(tokens, rows, splits):
    """[tokens, splits * 64] words of two: a thread has 16 of a token in its warp's part of k."""
    registers = [[0, 1 << i] for i in range(4)]
    registers += [[8 << i, 0] for i in range((tokens // 8).bit_length() - 1)]
    lanes = [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]]
    warps = [[0, 0]] * ((rows // 32).bit_length() - 1)
    warps += [[0, 64 << i] for i in range(splits.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [tokens, splits * 64])


@gluon.constexpr_function
def sum_layout(rows, splits):
    """[splits, rows, tokens] partial sums."""
    return gl.NVMMADistributedLayout([2, 0], [splits, rows // 32, 1], [1, 16, 8])


@gluon.jit
def _widen(b_word, b_scale, operand: gl.constexpr, LAYOUT: gl.constexpr):
    """[SPLITS, ROWS, LINE] BF16 of [SPLITS, ROWS, 4, 8] words and [SPLITS, ROWS] of scales.

    An e4m3 byte seeeemmm put at s0000eeeemmm0000 is BF16 and worth 2^-120 of it.
    """
    SPLITS: gl.constexpr = b_word.shape[0]
    ROWS: gl.constexpr = b_word.shape[1]
    T: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT)))
    o_t = gl.arange(0, 4, T)
    # [SPLITS, ROWS, 4]: 2^(scale - 127 + 120) twice, by its bits.
    b_factor = (b_scale[:, :, None] >> (8 * o_t)[None, None, :]) & 0xFF
    b_factor = b_factor * 0x00800080 + 0x3C003C00
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
        [b_word, b_factor[:, :, :, None]],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=1,
    )
    # [SPLITS, ROWS, t, s, e, h]
    b_weight = gl.join(gl.join(b_0, b_2), gl.join(b_1, b_3))
    b_weight = b_weight.permute((0, 1, 3, 5, 2, 4)).reshape([SPLITS, ROWS, LINE])
    return gl.convert_layout(b_weight, operand, assert_trivial=True)


@gluon.jit
def _reorder(b_x, operand: gl.constexpr, SPLITS: gl.constexpr):
    """[SPLITS, LINE, TOKENS] BF16 of [TOKENS, SPLITS * 64] words, in the order of `_widen`."""
    TOKENS: gl.constexpr = b_x.shape[0]
    b_x = b_x.reshape([TOKENS, SPLITS, 4, 8, 2])
    b_0 = b_x.to(gl.int16).to(gl.bfloat16, bitcast=True)
    b_1 = (b_x >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    # [TOKENS, split, t, s, e, h]
    b_x = gl.join(b_0, b_1).permute((1, 3, 5, 2, 4, 0)).reshape([SPLITS, LINE, TOKENS])
    return gl.convert_layout(b_x, operand, assert_trivial=True)


@gluon.jit
def make_ring(w_desc, scale_desc, STAGES: gl.constexpr):
    """(slots of weights, of scales, barriers of full ones of both).

    Barriers of their own cost less than what the compiler puts between two uses of one.
    """
    shape: gl.constexpr = w_desc.block_type.shape
    small: gl.constexpr = scale_desc.block_type.shape
    words = gl.allocate_shared_memory(
        w_desc.dtype, [STAGES, shape[0], shape[1], shape[2], shape[3]], w_desc.layout
    )
    scales = gl.allocate_shared_memory(
        scale_desc.dtype, [STAGES, small[0], small[1], small[2]], scale_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_scales = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(full_scales.index(slot), count=1)
    return words, scales, full, full_scales


@gluon.jit
def _copy(descs, ring, slot, matrix, row, step, pred):
    w_desc, scale_desc = descs
    words, scales, full, full_scales = ring
    k = step * words.shape[1]
    _load(w_desc, [k, matrix, row, 0], full.index(slot), words.index(slot), pred=pred)
    # What the copy engine reads begins at 16 bytes, or the instruction is illegal.
    at = [matrix, row, k & -4]
    _load(scale_desc, at, full_scales.index(slot), scales.index(slot), pred=pred)


@gluon.jit
def _fetch(weights, ring, slot, expert, row, step, pred, HAS_SHARED: gl.constexpr):
    """Copy a tile of an expert's weight, rows from `row`, into a slot of the ring."""
    own, shared = weights
    words, scales, full, full_scales = ring
    SPLITS: gl.constexpr = words.shape[1]
    PARTS: gl.constexpr = words.shape[2]
    ROWS: gl.constexpr = PARTS * words.shape[3]
    mbarrier.expect(full.index(slot), ROWS * SPLITS * LINE, pred=pred)
    mbarrier.expect(full_scales.index(slot), ROWS * scales.shape[3] * 4, pred=pred)
    if HAS_SHARED:
        if expert < 0:
            _copy(shared, ring, slot, 0, row, step, pred)
        else:
            _copy(own, ring, slot, expert * PARTS, row, step, pred)
    else:
        _copy(own, ring, slot, expert * PARTS, row, step, pred)


@gluon.jit
def fill(weights, ring, expert, row, pred, HAS_SHARED: gl.constexpr):
    STAGES: gl.constexpr = ring[0].shape[0]
    for step in gl.static_range(STAGES):
        _fetch(weights, ring, step, expert, row, step, pred, HAS_SHARED)


@gluon.jit
def product(
    weights, ring, i_use, expert, row, next_expert, next_row, has_next, p_x, m_x,
    STEPS: gl.constexpr, HAS_SHARED: gl.constexpr,
):  # fmt: skip
    """([ROWS, TOKENS] of the tile at the ring's use `i_use`, the use behind it).

    The slots are given to what follows: first the rest of this tile, then the next one.
    """
    words, scales, full, full_scales = ring
    STAGES: gl.constexpr = words.shape[0]
    SPLITS: gl.constexpr = words.shape[1]
    ROWS: gl.constexpr = words.shape[2] * words.shape[3]
    TOKENS: gl.constexpr = p_x.shape[0]
    ACC: gl.constexpr = sum_layout(ROWS, SPLITS)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    WORD: gl.constexpr = _word_layout(ROWS, SPLITS)
    FLAT: gl.constexpr = _line_layout(ROWS, SPLITS)
    b_acc = gl.zeros([SPLITS, ROWS, TOKENS], gl.float32, ACC)
    b_x = gl.load(p_x, mask=m_x, other=0)
    for step in range(STEPS):
        slot = i_use % STAGES
        phase = (i_use // STAGES) & 1
        mbarrier.wait(full.index(slot), phase)
        mbarrier.wait(full_scales.index(slot), phase)
        b_word = words.index(slot).reshape([SPLITS * ROWS, WORDS]).load(FLAT)
        s_scale = scales.index(slot).reshape([ROWS, scales.shape[3]])
        b_scale = _scales(s_scale, step * SPLITS, SPLITS)
        # The compiler has everyone read the slot before it is filled again.
        ahead = step + STAGES
        is_own = ahead < STEPS
        if is_own | has_next:
            _fetch(
                weights, ring, slot, gl.where(is_own, expert, next_expert),
                gl.where(is_own, row, next_row), gl.where(is_own, ahead, ahead - STEPS),
                True, HAS_SHARED,
            )  # fmt: skip
        # Behind the copy, whose fence waits for loads.
        last = STEPS - 1
        b_x_1 = gl.load(p_x + gl.minimum(step + 1, last) * (SPLITS * 64), mask=m_x, other=0)
        b_word = b_word.reshape([SPLITS, ROWS, 4, 8])
        b_word = gl.convert_layout(b_word, WORD, assert_trivial=True)
        b_scale = gl.convert_layout(
            b_scale.permute((1, 0)), gl.SliceLayout(2, gl.SliceLayout(3, WORD)), assert_trivial=True
        )
        b_weight = _widen(b_word, b_scale, LEFT, WORD)
        b_acc = mma_v2(b_weight, _reorder(b_x, RIGHT, SPLITS), b_acc)
        b_x = b_x_1
        i_use += 1
    return gl.sum(b_acc, 0), i_use
