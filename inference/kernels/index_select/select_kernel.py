"""Top blocks of score rows without a sort: the best progressions of ids, then the best in them.

Ids are dealt to `WIDTH` arithmetic progressions. The 16 progressions with the best members hold
the 16 best ids, for the order (score descending, id ascending) is total; these are dealt anew until
each holds one id: with 64 progressions 64 ids take one round, 256 two, 1,024 three, 8,192 five;
with 128 progressions 128 ids take one, 1,024 two, 8,192 three.

How many are dealt and read at once depends on what a row may hold: see `RowShape`.

Suffixes: `X` score rows · `N` columns · `B` chosen blocks.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

MAX_TOPK = 16
KEEP = tl.constexpr(16)
"""Progressions that survive a round, never fewer than the blocks to choose."""


class RowShape(NamedTuple):
    """How one program chooses in a row: `WIDTH` and `MANY` of `choose_row`, and its warps."""

    width: int
    many: int
    num_warps: int


PREFILL_ROW = RowShape(64, 16, 1)
"""Thousands of rows at once."""
DECODE_ROW = RowShape(64, 16, 4)
WIDE_DECODE_ROW = RowShape(128, 64, 8)
"""Of 8,192 blocks, three rounds of one read each."""


@triton.jit
def _best_members(
    p_row, b_first, first_member, stride, num_blocks, LOCAL: tl.constexpr, MEMBERS: tl.constexpr
):
    """[WIDTH] scores and ids of each progression's best among `MEMBERS` from `first_member` on.

    NaN counts as -inf, an infinite score as the largest finite one, a local id above all scores;
    ids that do not exist are -inf and lie behind all others.
    """
    # [WIDTH, MEMBERS]: lanes run over progressions, whose neighbours are neighbours in memory.
    o_member = first_member + tl.arange(0, MEMBERS)
    o_id = b_first[:, None] + o_member[None, :] * stride
    b_score = tl.load(p_row + o_id, mask=o_id < num_blocks - LOCAL, other=float("-inf"))
    b_score = tl.where(b_score == b_score, b_score, float("-inf"))
    b_score = tl.minimum(b_score, 3.4028234663852886e38)
    is_local = (o_id >= num_blocks - LOCAL) & (o_id < num_blocks)
    b_score = tl.where(is_local, float("inf"), b_score)
    b_best = tl.max(b_score, 1)
    b_id = tl.min(tl.where(b_score == b_best[:, None], o_id, 0x7FFFFFFF), 1)
    return b_best, b_id


@triton.jit
def _order_keys(b_score, b_id):
    """int64 that sort as (score, lower id first) do; no score is NaN."""
    b_score = tl.where(b_score == 0.0, 0.0, b_score)  # -0.0 ties with 0.0
    b_order = b_score.to(tl.int32, bitcast=True)
    b_order = b_order ^ ((b_order >> 31) & 0x7FFFFFFF)
    return (b_order.to(tl.int64) << 32) | (0x7FFFFFFF - b_id).to(tl.int64)


@triton.jit
def choose_row(
    p_row,
    p_out,
    num_blocks,
    TOPK: tl.constexpr,
    LOCAL: tl.constexpr,
    WIDTH: tl.constexpr,
    MANY: tl.constexpr,
):
    """Write the chosen ids of one row of scores, ascending, then -1.

    `WIDTH` progressions, 32 to 128, are ranked against each other at once; of long ones `MANY`
    members are read at once.
    """
    FEW: tl.constexpr = WIDTH // KEEP
    # Survivors are progressions b_kept + m * stride, m < count; at first, all ids dealt to 16.
    b_kept = tl.arange(0, KEEP)
    stride = KEEP
    count = tl.maximum(tl.cdiv(num_blocks, KEEP), 2)
    while count > 1:
        # [FEW, KEEP] -> [WIDTH]: each survivor is dealt to a few.
        b_first = tl.reshape(b_kept[None, :] + tl.arange(0, FEW)[:, None] * stride, [WIDTH])
        stride *= FEW
        count = tl.cdiv(count, FEW)
        if count <= FEW:
            b_best, b_id = _best_members(p_row, b_first, 0, stride, num_blocks, LOCAL, FEW)
        else:
            b_best, b_id = _best_members(p_row, b_first, 0, stride, num_blocks, LOCAL, MANY)
            for first in range(MANY, count, MANY):
                b_score, b_other = _best_members(
                    p_row, b_first, first, stride, num_blocks, LOCAL, MANY
                )
                # Later members have higher ids.
                b_id = tl.where(b_score > b_best, b_other, b_id)
                b_best = tl.maximum(b_best, b_score)
        # No two progressions share an id, so no two keys are equal, even of ids that do not exist.
        b_key = _order_keys(b_best, b_id)
        b_rank = tl.sum((b_key[None, :] > b_key[:, None]).to(tl.int32), 1)
        is_kept = b_rank[None, :] == tl.arange(0, KEEP)[:, None]
        b_kept = tl.sum(tl.where(is_kept, b_first[None, :], 0), 1)

    o_kept = tl.arange(0, KEEP)
    is_chosen = o_kept < tl.minimum(num_blocks, TOPK)
    # Distinct ids: what is not chosen lies behind.
    b_id = tl.where(is_chosen, b_kept, 0x7FFFFFFF - KEEP + o_kept)
    o_place = tl.sum((b_id[:, None] < b_id[None, :]).to(tl.int32), 0)
    tl.store(p_out + o_place, tl.where(is_chosen, b_id, -1), mask=o_place < TOPK)


@triton.jit
def _select_kernel(
    scores_XN,
    num_blocks_X,
    out_XB,
    num_columns,
    row_stride,
    TOPK: tl.constexpr,
    LOCAL: tl.constexpr,
    WIDTH: tl.constexpr,
    MANY: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    num_blocks = tl.minimum(tl.load(num_blocks_X + i_row).to(tl.int32), num_columns)
    p_row, p_out = scores_XN + i_row * row_stride, out_XB + i_row * TOPK
    choose_row(p_row, p_out, num_blocks, TOPK, LOCAL, WIDTH, MANY)


def select_blocks(
    scores_XN: Tensor, num_blocks_X: Tensor, out_XB: Tensor, topk: int, local: int
) -> None:
    """Choose {last `local` visible} and the best others by (score descending, id ascending).

    Args:
        scores_XN: [X, N] float32, rows any distance apart; columns from a row's number of blocks on
            are not read. NaN ranks with -inf.
        num_blocks_X: [X] int32 visible blocks of each row; 0 gives -1 throughout.
        out_XB: [X, topk] int32, contiguous, written: ids ascending, then -1.
        topk: 1 to 16.
        local: 0 to `topk`.
    """
    check_choice(topk, local)
    num_rows, num_columns = scores_XN.shape
    assert scores_XN.stride(1) == 1, "scores of a row must lie side by side"
    if not num_rows:
        return
    _select_kernel[(num_rows,)](
        scores_XN,
        num_blocks_X,
        out_XB,
        num_columns,
        scores_XN.stride(0),
        TOPK=topk,
        LOCAL=local,
        WIDTH=PREFILL_ROW.width,
        MANY=PREFILL_ROW.many,
        num_warps=PREFILL_ROW.num_warps,
    )


def check_choice(topk: int, local: int) -> None:
    """Raise ValueError unless a row of the kernel can hold the choice."""
    if not 1 <= topk <= MAX_TOPK or not 0 <= local <= topk:
        raise ValueError(
            f"index_select: topk_blocks={topk} must lie between 1 and {MAX_TOPK}, "
            f"local_blocks={local} between 0 and it"
        )
