"""What follows a grouped product on Hopper: SwiGLU and the way to memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from inference.kernels.expert_gemm.mxfp8_operands_kernel import BOX, CHUNK, ROWS
from inference.kernels.swiglu_oai.kernel import clamped


@gluon.jit
def _halves(b_out):
    """Of the tokens, [rows, tokens / 2] each."""
    TOKENS: gl.constexpr = b_out.shape[1]
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS // 2, 16])
    b_low, b_high = gl.split(b_out.reshape([ROWS, 2, TOKENS // 2]).permute((0, 2, 1)))
    b_low = gl.convert_layout(b_low, mma, assert_trivial=True)
    return b_low, gl.convert_layout(b_high, mma, assert_trivial=True)


@gluon.jit
def _store(out_ptr, b_out, row, num_rows, first, end, stride_out, HAS_EDGE: gl.constexpr):
    """Columns `row`.. of tokens `first`.. ."""
    TOKENS: gl.constexpr = b_out.shape[1]
    if TOKENS > BOX:
        # Registers for the addresses of a few tokens only.
        b_low, b_high = _halves(b_out)
        _store(out_ptr, b_low, row, num_rows, first, end, stride_out, HAS_EDGE)
        _store(out_ptr, b_high, row, num_rows, first + TOKENS // 2, end, stride_out, HAS_EDGE)
    else:
        b_out = b_out.to(out_ptr.dtype.element_ty)
        if out_ptr.dtype.element_ty.primitive_bitwidth == 16:
            b_out = gl.convert_layout(b_out, gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1]))
        layout: gl.constexpr = b_out.type.layout
        o_m = first + gl.arange(0, TOKENS, gl.SliceLayout(0, layout))
        o_row = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        m_out = (o_m < end)[None, :]
        if HAS_EDGE:
            m_out = m_out & (o_row < num_rows)[:, None]
        p_out = out_ptr + o_m.to(gl.int64)[None, :] * stride_out + o_row[:, None]
        gl.store(p_out, b_out, mask=m_out)


@gluon.jit
def _swiglu(b_gate, b_up, act):
    alpha, limit, beta = act
    b_gate, b_up = clamped(b_gate, b_up, limit)
    return b_gate / (1.0 + gl.exp(-alpha * b_gate)) * (b_up + beta)


@gluon.jit
def _store_ordered(out_ptr, b_out, row, first, end, NUM_COLUMNS: gl.constexpr):
    """Write [64 columns from `row`, tokens from `first`] of a right operand, in its order."""
    TOKENS: gl.constexpr = b_out.shape[1]
    if TOKENS > BOX:
        # Space in shared memory for a few tokens only.
        b_low, b_high = _halves(b_out)
        _store_ordered(out_ptr, b_low, row, first, end, NUM_COLUMNS)
        _store_ordered(out_ptr, b_high, row, first + TOKENS // 2, end, NUM_COLUMNS)
    else:
        layout: gl.constexpr = gl.BlockedLayout([1, 4, 1], [16, 1, 2], [1, 1, 4], [1, 0, 2])
        # t j e h -> j h, t e
        b_out = b_out.reshape([2, 8, 2, 2, TOKENS]).permute((1, 3, 0, 2, 4))
        b_out = b_out.reshape([16, 4, TOKENS])
        b_out = gl.convert_layout(b_out, layout)
        o_piece = gl.arange(0, 16, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
        o_place = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
        o_m = first + gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
        p_out = out_ptr + row // CHUNK * CHUNK + row % CHUNK // 16
        p_out = p_out + o_piece[:, None, None] * 8 + o_place[None, :, None]
        p_out = p_out + o_m.to(gl.int64)[None, None, :] * NUM_COLUMNS
        gl.store(p_out, b_out, mask=(o_m < end)[None, None, :])


@gluon.jit
def finish(
    b_0, b_1, out_ptr, row, first, end, stride_out, act, NUM_ROWS: gl.constexpr,
    STRIDE_PART: gl.constexpr, IS_SWIGLU: gl.constexpr, IS_ORDERED: gl.constexpr,
):  # fmt: skip
    HAS_EDGE: gl.constexpr = NUM_ROWS % (4 * ROWS) != 0
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    if IS_SWIGLU and IS_ORDERED:
        b_h = _swiglu(b_0, b_1, act).to(dtype)
        _store_ordered(out_ptr, b_h, row, first, end, STRIDE_PART)
    elif IS_SWIGLU:
        # Rounded before, as in a dense MLP.
        b_h = _swiglu(b_0.to(dtype).to(gl.float32), b_1.to(dtype).to(gl.float32), act)
        _store(out_ptr, b_h, row, NUM_ROWS, first, end, stride_out, False)
    else:
        _store(out_ptr, b_0, row, NUM_ROWS, first, end, stride_out, HAS_EDGE)
        _store(out_ptr, b_1, row + STRIDE_PART, NUM_ROWS, first, end, stride_out, HAS_EDGE)
