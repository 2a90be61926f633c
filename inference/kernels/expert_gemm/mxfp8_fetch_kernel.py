"""What a grouped product on Hopper multiplies: its tiles, and the warp that fetches their steps."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference.kernels.expert_gemm.mxfp8_operands_kernel import BOX, CHUNK, ROWS

# Renamed between Triton 3.6 and 3.9.
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def tile_of(tile, num_m, num_n, group):
    """(tile of tokens, tile of rows): `group` neighbouring tiles of tokens share weights in L2."""
    per_group = group * num_n
    first = tile // per_group * group
    size = gl.minimum(num_m - first, group)
    return first + tile % per_group % size, tile % per_group // size


@gluon.jit
def tokens_of(plan_ptr, i_m, num_tokens, MAX_TOKENS: gl.constexpr):
    """(expert, first sorted row, first behind) of a tile of tokens.

    Not through L1: a plan is read before the wait for the kernel in front.
    """
    if plan_ptr is None:
        expert = i_m * 0
        first = i_m * MAX_TOKENS
        end = gl.minimum(first + MAX_TOKENS, num_tokens)
    else:
        expert = gl.load(plan_ptr + 4 + 4 * i_m, cache_modifier=".cg")
        first = gl.load(plan_ptr + 5 + 4 * i_m, cache_modifier=".cg")
        end = gl.load(plan_ptr + 6 + 4 * i_m, cache_modifier=".cg")
    return expert, first, end


@gluon.jit
def num_tiles_m(plan_ptr, num_tokens, MAX_TOKENS: gl.constexpr):
    if plan_ptr is not None:
        return gl.load(plan_ptr, cache_modifier=".cg")
    else:
        return (num_tokens + MAX_TOKENS - 1) // MAX_TOKENS


@gluon.jit
def class_of(num_rows, BOXES: gl.constexpr):
    """1, 2 or 4 boxes of tokens, and whether there is a tail."""
    num_boxes = gl.where(num_rows <= 2 * BOX, gl.where(num_rows <= BOX, 1, 2), 4)
    return gl.minimum(num_boxes, BOXES), num_rows > BOXES * BOX


@gluon.jit
def _fetch_weights(
    w_desc, ring, i_use, row, k, num_boxes, is_more, is_valid, STRIDE_PART: gl.constexpr,
    HAS_TAIL: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """Begin STEPS steps: expect all their bytes and fetch those of weights, rows by rows."""
    x_boxes, _, w_tiles, full, _ = ring
    STAGES: gl.constexpr = full.shape[0]
    BOXES: gl.constexpr = x_boxes.shape[0] // STAGES // 2
    for step in gl.static_range(STEPS):
        bar = full.index((i_use + step) % STAGES)
        # A number of bytes is a constant.
        for log in gl.static_range(3):
            if (1 << log) <= BOXES:
                is_so = (num_boxes == (1 << log)) & (is_more == 0) & is_valid
                mbarrier.expect(bar, (4 * ROWS + 2 * (BOX << log)) * CHUNK, pred=is_so)
        if HAS_TAIL:
            num_bytes: gl.constexpr = (4 * ROWS + 2 * BOX * (BOXES + 1)) * CHUNK
            mbarrier.expect(bar, num_bytes, pred=is_more & is_valid)
    for i in gl.static_range(4):
        for step in gl.static_range(STEPS):
            stage = (i_use + step) % STAGES
            place = [row + i // 2 * STRIDE_PART + i % 2 * ROWS, k + step * CHUNK]
            _load(w_desc, place, full.index(stage), w_tiles.index(stage * 4 + i), pred=is_valid)


@gluon.jit
def _fetch_tokens(
    x_desc, ring, i_use, first, k, num_boxes, is_more, is_valid, HAS_TAIL: gl.constexpr,
    STEPS: gl.constexpr,
):  # fmt: skip
    """The rest of STEPS steps. Halves of the columns lie behind each other, `num_boxes` long."""
    x_boxes, tails, _, full, _ = ring
    STAGES: gl.constexpr = full.shape[0]
    BOXES: gl.constexpr = x_boxes.shape[0] // STAGES // 2
    for step in gl.static_range(STEPS):
        stage = (i_use + step) % STAGES
        bar = full.index(stage)
        for half in gl.static_range(2):
            column = k + step * CHUNK + half * (CHUNK // 2)
            for i in gl.static_range(BOXES):
                x_box = x_boxes.index(stage * (2 * BOXES) + half * num_boxes + i)
                is_there = (i < num_boxes) & is_valid
                _load(x_desc, [first + i * BOX, column], bar, x_box, pred=is_there)
            if HAS_TAIL:
                tail = tails.index(stage * 2 + half)
                place = [first + BOXES * BOX, column]
                _load(x_desc, place, bar, tail, pred=is_more & is_valid)


@gluon.jit
def produce(
    x_desc, w_desc, ring, plan_ptr, num_tokens, num_n, group, NUM_ROWS: gl.constexpr,
    SIZE: gl.constexpr, STRIDE_N: gl.constexpr, STRIDE_PART: gl.constexpr,
    HAS_TAIL: gl.constexpr,
):  # fmt: skip
    """Fill the ring, tile after tile.

    This warp alone waits for the kernel in front, and before the first tokens: others have nothing
    to write until these are there.
    """
    x_boxes, _, _, full, empty = ring
    STAGES: gl.constexpr = full.shape[0]
    BOXES: gl.constexpr = x_boxes.shape[0] // STAGES // 2
    num_m = num_tiles_m(plan_ptr, num_tokens, BOXES * BOX)
    num_tiles = num_m * num_n
    # Steps begun together, where the weights' bytes set the time: the memory likes neighbouring
    # lines of a row together.
    STEPS: gl.constexpr = 2 if STAGES >= 5 and SIZE // CHUNK % 2 == 0 else 1
    EARLY: gl.constexpr = min(STAGES, SIZE // CHUNK) // STEPS * STEPS
    # The first tile's first weights wait for nobody.
    is_valid = gl.program_id(0) < num_tiles
    tile = gl.where(is_valid, gl.program_id(0), 0)
    i_m, i_n = tile_of(tile, gl.maximum(num_m, 1), num_n, group)
    expert, first, end = tokens_of(plan_ptr, i_m, num_tokens, BOXES * BOX)
    num_boxes, is_more = class_of(end - first, BOXES)
    row = gl.where(is_valid, expert, 0) * NUM_ROWS + i_n * STRIDE_N
    for i in gl.static_range(0, EARLY, STEPS):
        _fetch_weights(
            w_desc, ring, i, row, i * CHUNK, num_boxes, is_more, is_valid, STRIDE_PART, HAS_TAIL,
            STEPS,
        )  # fmt: skip
    # In this order: kernels behind read ids and plan before they wait.
    gdc_wait()
    gdc_launch_dependents()
    for i in gl.static_range(0, EARLY, STEPS):
        _fetch_tokens(
            x_desc, ring, i, first, i * CHUNK, num_boxes, is_more, is_valid, HAS_TAIL, STEPS
        )
    i_use = gl.to_tensor(EARLY)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        i_m, i_n = tile_of(tile, num_m, num_n, group)
        expert, first, end = tokens_of(plan_ptr, i_m, num_tokens, BOXES * BOX)
        num_boxes, is_more = class_of(end - first, BOXES)
        row = expert * NUM_ROWS + i_n * STRIDE_N
        # Not a number that the loop carries: Triton 3.6 takes `start = start * 0` behind the first
        # tile for the constant of before.
        start = gl.where(tile == gl.program_id(0), EARLY * CHUNK, 0)
        for k in range(start, SIZE, STEPS * CHUNK):
            for step in gl.static_range(STEPS):
                i_step = i_use + step
                mbarrier.wait(empty.index(i_step % STAGES), ((i_step // STAGES) & 1) ^ 1)
            _fetch_weights(
                w_desc, ring, i_use, row, k, num_boxes, is_more, True, STRIDE_PART, HAS_TAIL, STEPS
            )
            _fetch_tokens(x_desc, ring, i_use, first, k, num_boxes, is_more, True, HAS_TAIL, STEPS)
            i_use += STEPS
