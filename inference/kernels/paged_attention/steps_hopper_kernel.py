"""What the two dense Gluon kernels share: rings of pages, turns at the tensor cores, the softmax.

One warp fetches pages through the tensor memory accelerator into rings of buffers; two warpgroups
of 64 query rows each read them. A warpgroup issues the scores of page j and the values of page
j - 1, then lets the other issue its own and computes its softmax meanwhile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ROWS, HEAD_DIM, PAGE_SIZE = 64, 128, 128
"""Query rows of a warpgroup; the only head dim and page size served."""
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""Its name changed between Triton 3.6 and 3.9."""
NEG_INF = gl.constexpr(float("-inf"))


@gluon.jit
def make_ring(desc, STAGES: gl.constexpr, num_readers: gl.constexpr):
    """(buffers, barriers of full ones, barriers of empty ones)."""
    shape: gl.constexpr = desc.block_type.shape
    smem = gl.allocate_shared_memory(desc.dtype, [STAGES, shape[0], shape[1]], desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=num_readers)
    return smem, full, empty


@gluon.jit
def fetch(desc, row, column, ring, i_use):
    """Load the rows from `row` on as use number `i_use` of the ring, once it is free."""
    smem, full, empty = ring
    STAGES: gl.constexpr = smem.shape[0]
    i_stage = i_use % STAGES
    mbarrier.wait(empty.index(i_stage), ((i_use // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(i_stage), desc.block_type.nbytes)
    _load(desc, [row, column], full.index(i_stage), smem.index(i_stage))


@gluon.jit
def await_use(ring, i_use, pred=True):
    """Wait until use number `i_use` of the ring is loaded, and return its buffer."""
    smem, full, _empty = ring
    STAGES: gl.constexpr = smem.shape[0]
    mbarrier.wait(full.index(i_use % STAGES), (i_use // STAGES) & 1, pred=pred)
    return smem.index(i_use % STAGES)


@gluon.jit
def release(ring, i_use):
    mbarrier.arrive(ring[2].index(i_use % ring[0].shape[0]))


@gluon.jit
def to_and_fro(i_round, place, width):
    """The item of a round over `width` programs: sorted work comes out even."""
    return i_round * width + gl.where(i_round % 2 == 0, place, width - 1 - place)


@gluon.jit
def _take_turn(w: gl.constexpr):
    """Wait for `pass_turn` of the other warpgroup; hardware barriers 14 and 15 are ours."""
    if w == 0:
        gl.inline_asm_elementwise(
            "bar.sync 14, 256; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    else:
        gl.inline_asm_elementwise(
            "bar.sync 15, 256; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def pass_turn(w: gl.constexpr):
    """Let the other warpgroup than `w` begin its products; warpgroup 1 does so at the start."""
    if w == 0:
        gl.inline_asm_elementwise(
            "bar.arrive 15, 256; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    else:
        gl.inline_asm_elementwise(
            "bar.arrive 14, 256; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def _sums(b_x):
    """[M, 4] sums over the keys that a thread holds: no warp shuffles before the last page."""
    M: gl.constexpr = b_x.shape[0]
    N: gl.constexpr = b_x.shape[1]
    # Thread t of a row has the keys 8 i + 2 t and 8 i + 2 t + 1.
    return gl.sum(gl.sum(b_x.reshape([M, N // 8, 4, 2]), 3), 1)


@gluon.jit
def _softmax(b_s, b_max, b_sum, first_key, b_last, scale_log2, IS_MASKED: gl.constexpr):
    """(weights, maximum, `_sums` of the weights, factor on what was summed before); base 2."""
    if IS_MASKED:
        PAGE: gl.constexpr = b_s.shape[1]
        o_key = first_key + gl.arange(0, PAGE, gl.SliceLayout(0, b_s.type.layout))
        b_s = gl.where(o_key[None, :] <= b_last[:, None], b_s, NEG_INF)
    b_new = gl.maximum(b_max, gl.max(b_s, 1) * scale_log2)
    b_alpha = gl.exp2(b_max - b_new)
    b_x = gl.exp2(b_s * scale_log2 - b_new[:, None])
    of_sums: gl.constexpr = gl.SliceLayout(1, b_sum.type.layout)
    b_decay = gl.convert_layout(b_alpha, of_sums, assert_trivial=True)
    b_more = gl.convert_layout(_sums(b_x), b_sum.type.layout, assert_trivial=True)
    return b_x, b_new, b_sum * b_decay[:, None] + b_more, b_alpha


@gluon.jit
def _start_scores(b_q, b_k, w: gl.constexpr):
    """Products of the queries with the keys of a page, left running; begun in one's turn."""
    PAGE: gl.constexpr = b_k.shape[0]
    mma: gl.constexpr = b_q.type.layout.parent
    b_zero = gl.zeros([b_q.shape[0], PAGE], gl.float32, mma)
    _take_turn(w)
    return warpgroup_mma(b_q, b_k.permute((1, 0)), b_zero, use_acc=False, is_async=True)


@gluon.jit
def _step(
    b_acc, b_p, b_max, b_sum, b_q, keys, values, i_use, has_next, first_key, b_last, scale_log2,
    w: gl.constexpr, IS_MASKED: gl.constexpr,
):  # fmt: skip
    """Scores of the page that is use `i_use` of the ring, values of the page before, softmax."""
    b_v = await_use(values, i_use - 1)
    b_s = _start_scores(b_q, keys[0].index(i_use % keys[0].shape[0]), w)
    b_acc = warpgroup_mma(b_p, b_v, b_acc, is_async=True)
    pass_turn(w)
    b_s = warpgroup_mma_wait(1, deps=(b_s,))
    release(keys, i_use)
    b_x, b_max, b_sum, b_alpha = _softmax(
        b_s, b_max, b_sum, first_key, b_last, scale_log2, IS_MASKED
    )
    # This wait also keeps the assembler from waiting for the values before the softmax.
    await_use(keys, i_use + 1, pred=has_next)
    b_acc, b_x = warpgroup_mma_wait(0, deps=(b_acc, b_x))
    release(values, i_use - 1)
    b_p = gl.convert_layout(b_x.to(b_p.dtype), b_p.type.layout)
    return b_acc * b_alpha[:, None], b_p, b_max, b_sum


@gluon.jit
def attend(
    b_q, keys, values, i_use, num_pages, num_whole, b_last, scale_log2, w: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    """(output, maximum, sum of weights) of rows over pages, the first of them use `i_use`.

    Both warpgroups must take as many pages. With IS_CAUSAL a row sees keys 0 to its `b_last`, and
    all rows see the pages before number `num_whole`.
    """
    ROWS: gl.constexpr = b_q.shape[0]
    D: gl.constexpr = b_q.shape[1]
    PAGE: gl.constexpr = keys[0].shape[1]
    operand: gl.constexpr = b_q.type.layout
    mma: gl.constexpr = operand.parent
    b_max = gl.full([ROWS], NEG_INF, gl.float32, gl.SliceLayout(1, mma))
    b_sum = _sums(gl.zeros([ROWS, PAGE], gl.float32, mma))
    b_acc = gl.zeros([ROWS, D], gl.float32, mma)
    b_s = _start_scores(b_q, await_use(keys, i_use), w)
    pass_turn(w)
    b_s = warpgroup_mma_wait(0, deps=(b_s,))
    release(keys, i_use)
    b_x, b_max, b_sum, _b_alpha = _softmax(b_s, b_max, b_sum, 0, b_last, scale_log2, IS_CAUSAL)
    await_use(keys, i_use + 1, pred=num_pages > 1)
    b_p = gl.convert_layout(b_x.to(b_q.dtype), operand)
    # Scores of page j and values of the page before are under way during the softmax of page j.
    for j in range(1, num_whole):
        b_acc, b_p, b_max, b_sum = _step(
            b_acc, b_p, b_max, b_sum, b_q, keys, values, i_use + j, j + 1 < num_pages, 0, b_last,
            scale_log2, w, False,
        )  # fmt: skip
    if IS_CAUSAL:
        for j in range(gl.maximum(num_whole, 1), num_pages):
            b_acc, b_p, b_max, b_sum = _step(
                b_acc, b_p, b_max, b_sum, b_q, keys, values, i_use + j, j + 1 < num_pages,
                j * PAGE, b_last, scale_log2, w, True,
            )  # fmt: skip
    i_last = i_use + num_pages - 1
    b_acc = warpgroup_mma(b_p, await_use(values, i_last), b_acc, is_async=True)
    b_acc = warpgroup_mma_wait(0, deps=(b_acc,))
    release(values, i_last)
    return b_acc, b_max, gl.convert_layout(gl.sum(b_sum, 1), gl.SliceLayout(1, mma))
