"""The tensors of a step, by hand."""

import numpy as np
import torch

from inference.config import EngineConfig
from inference.engine.batch import build_batch
from inference.engine.graphs import DecodeGraphs
from inference.engine.request import Request, SamplingParams, make_live
from inference.engine.rows import RunningRows
from inference.engine.scheduler import Schedule
from inference.engine.staging import Staging


def place(rows, tokens, pages, num_computed):
    live = make_live(Request("r", tokens, SamplingParams(max_tokens=4)), ())
    return rows.place(live, pages, num_computed)


def test_a_decode_and_a_chunk_over_pages_out_of_order():
    rows = RunningRows(num_rows=3, page_size=4)
    chunked = place(rows, [10, 11, 12, 13, 14, 15, 16], pages=[5, 2], num_computed=3)
    decode = place(rows, [20, 21, 22], pages=[7], num_computed=2)
    schedule = Schedule(
        rows_R=np.array([decode, chunked]),
        num_new_R=np.array([1, 3]),
        is_last_R=np.array([True, False]),
        ends_prompt_R=np.array([False, False]),
        num_decodes=1,
    )
    batch = build_batch(rows, schedule, Staging(torch.device("cpu")))
    paged = batch.paged
    assert batch.input_ids_T.tolist() == [22, 13, 14, 15]
    assert paged.positions_T.tolist() == [2, 3, 4, 5]
    assert paged.slots_T.tolist() == [7 * 4 + 2, 5 * 4 + 3, 2 * 4, 2 * 4 + 1]
    assert paged.query_start_R1.tolist() == [0, 1, 4]
    assert paged.seq_len_R.tolist() == [3, 6]
    assert paged.page_table_RN.tolist() == [[7, -1], [5, 2]]
    assert (paged.num_decodes, paged.max_query_len, paged.max_seq_len) == (1, 3, 6)
    assert batch.last_token_S.tolist() == [0]
    dtypes = (paged.positions_T.dtype, paged.slots_T.dtype, paged.query_start_R1.dtype)
    assert dtypes == (torch.int64, torch.int64, torch.int32)


def test_rows_keep_their_content_when_a_longer_request_widens_them():
    rows = RunningRows(num_rows=2, page_size=2)
    first = place(rows, [1, 2, 3], pages=[4, 0], num_computed=1)
    second = place(rows, list(range(40)), pages=list(range(5, 25)), num_computed=0)
    assert rows.tokens_MX[first, :3].tolist() == [1, 2, 3]
    assert rows.pages(first) == [4, 0]
    assert rows.pages(second) == list(range(5, 25))
    rows.add_page(np.array([first, second]), [30, 31])
    assert rows.pages(first) == [4, 0, 30]
    assert rows.pages(second)[-2:] == [24, 31]


def test_a_replayed_step_samples_for_every_row():
    config = EngineConfig(
        page_size=4, max_model_len=64, max_running_requests=4, cuda_graph_sizes=(2,)
    )
    graphs = DecodeGraphs(None, [], None, None, torch.zeros(5, dtype=torch.int64), config)

    def step(is_last, num_new=(1, 1)):
        num_decodes = sum(new == 1 for new in num_new)
        parts = np.arange(len(is_last)), np.array(num_new), np.array(is_last)
        return Schedule(*parts, np.zeros(len(is_last), bool), num_decodes)

    assert graphs.fits(step([True, True]))
    # A chunk of one token amid a prompt, all that a budget may have left.
    assert not graphs.fits(step([True, False]))
    assert not graphs.fits(step([True, True], num_new=(1, 2)))
    assert not graphs.fits(step([True] * 3, num_new=(1, 1, 1)))
