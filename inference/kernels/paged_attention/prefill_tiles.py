"""How the prefill chunks of a batch are cut into tiles of query tokens and those spread."""

import numpy as np

from inference.kernels.paging import PagedBatch


def prefill_tiles(batch: PagedBatch, block_m: int) -> np.ndarray:
    """[X, 4] int32 (request, first token, tokens, position of the first): at most `block_m` each.

    The tiles cover the tokens of requests `num_decodes` to R - 1, those with most keys first.
    """
    query_len_R, seq_len_R = batch.host_lengths()
    start_R = np.cumsum(query_len_R) - query_len_R
    row_R = np.arange(batch.num_decodes, len(query_len_R))
    tiles_R = -(-query_len_R[row_R] // block_m)
    row_X = np.repeat(row_R, tiles_R)
    offset_X = (np.arange(len(row_X)) - np.repeat(np.cumsum(tiles_R) - tiles_R, tiles_R)) * block_m
    count_X = np.minimum(query_len_R[row_X] - offset_X, block_m)
    position_X = seq_len_R[row_X] - query_len_R[row_X] + offset_X
    tiles_X4 = np.stack([row_X, start_R[row_X] + offset_X, count_X, position_X], 1)
    order_X = np.argsort(-(position_X + count_X), kind="stable")
    return tiles_X4[order_X].astype(np.int32)


START = 1.5
"""What a tile costs beside its pages, in pages: its first scores and last values, its output."""


def spread(
    tiles_X4: np.ndarray, num_heads: int, group: int, page_size: int, programs: int
) -> tuple[int, int]:
    """How to deal out `num_heads` times the tiles so that the busiest program has least to do.

    A work item is a tile of one head. Rounds over the programs run to and fro.

    Returns:
        (heads together, longer programs). The heads of a tile that run next to each other, before
        its other heads: `group`, those of a KV head, or all. That many programs take the last items
        and one more than the others; 0 deals out all items alike, the last round incomplete.
    """
    num_keys_X = np.maximum(tiles_X4[:, 2] + tiles_X4[:, 3], 0)
    work_X = -(-num_keys_X // page_size) + START
    remainder = len(work_X) * num_heads % programs if len(work_X) * num_heads > programs else 0
    choices = {}
    for together in {group, num_heads}:
        work_I = np.tile(np.repeat(work_X, together), num_heads // together)
        # Heads of other KV heads find fewer of their pages in L2.
        cost = 1.0 if together == group else 1.01
        for longer in {0, remainder}:
            choices[together, longer] = cost * _busiest(work_I, programs, longer)
    return min(choices, key=lambda choice: (choices[choice], choice))


def _busiest(work_I: np.ndarray, programs: int, longer: int) -> float:
    """The most work of a program; the last `longer` programs take one item more."""
    if longer:
        rounds, others = len(work_I) // programs, programs - longer
        parts = ((work_I[: rounds * others], others), (work_I[rounds * others :], longer))
        return max(_busiest(part_I, width, 0) for part_I, width in parts)
    padded = np.zeros(-(-len(work_I) // programs) * programs)
    padded[: len(work_I)] = work_I
    rounds_RP = padded.reshape(-1, programs)
    rounds_RP[1::2] = rounds_RP[1::2, ::-1].copy()
    return float(rounds_RP.sum(0).max())
