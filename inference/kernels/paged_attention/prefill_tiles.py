"""How the prefill chunks of a batch are cut into tiles of query tokens."""

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
