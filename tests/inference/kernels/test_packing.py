import pytest
import torch

from inference.kernels import packing_kernel
from inference.kernels.packing import Packing, from_pages, to_pages

LENGTHS = [5, 1, 8, 9]


def test_samples_begin_pages_of_their_own():
    packing = Packing.of(LENGTHS, "cpu")
    assert packing.starts_B1.tolist() == [0, 5, 6, 14, 23]
    assert packing.positions_T.tolist() == [*range(5), 0, *range(8), *range(9)]
    pages = packing.pages(4)
    first_and_count = [[0, 4], [4, 1], [5, 1], [6, 4], [10, 4], [14, 4], [18, 4], [22, 1]]
    assert pages.tokens_P2.tolist() == first_and_count
    table = [[0, 1, -1], [2, -1, -1], [3, 4, -1], [5, 6, 7]]
    assert pages.batch.page_table_RN.tolist() == table
    assert packing.pages(4) is pages


def test_a_range_of_queries_sees_its_samples_up_to_its_last_query():
    packing = Packing.of(LENGTHS, "cpu", first=8, num_queries=8)
    seen = packing.seen
    assert (seen.query_lens, seen.key_lens) == ((6, 2), (8, 2))
    assert (seen.keys.start, seen.keys.stop) == (6, 16)
    assert seen.query_start_R1.tolist() == [0, 6, 8]
    assert seen.key_start_R1.tolist() == [0, 8, 10]
    batch = packing.pages(4).batch
    assert batch.positions_T.tolist() == [2, 3, 4, 5, 6, 7, 0, 1]
    assert batch.query_start_R1.tolist() == [0, 6, 8]
    assert batch.seq_len_R.tolist() == [8, 2]
    # Pages of the row, of which the last sample's other pages are no longer seen.
    assert batch.page_table_RN.tolist() == [[3, 4], [5, -1]]


def test_a_range_may_begin_and_end_where_a_sample_does():
    seen = Packing.of(LENGTHS, "cpu", first=5, num_queries=1).seen
    assert (seen.first_sample, seen.first_key) == (1, 5)
    assert (seen.query_lens, seen.key_lens) == ((1,), (1,))


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_pages_give_back_what_they_were_given(page_size):
    packing = Packing.of(LENGTHS, "cpu")
    x_TKD = torch.randn(23, 2, 3)
    pages = to_pages(x_TKD, packing, page_size)
    assert torch.equal(from_pages(pages, packing, page_size), x_TKD)
    # Places without a token hold zeros.
    assert int((pages != 0).sum()) == x_TKD.numel()
    assert from_pages(pages, packing, page_size, torch.float64).dtype == torch.float64


@pytest.mark.parametrize("page_size", [4, 6])
def test_the_kernel_copies_as_the_reference(kernel_device, page_size, monkeypatch):
    monkeypatch.setattr(packing_kernel, "BLOCK", 32)
    packing = Packing.of(LENGTHS, kernel_device)
    # A part of a wider projection.
    x_TKD = torch.randn(23, 5, 12, device=kernel_device)[:, 1:4]
    tokens_P2 = packing.pages(page_size).tokens_P2
    pages = torch.full((len(tokens_P2), 3, page_size, 12), torch.nan, device=kernel_device)
    packing_kernel.copy_to_pages(x_TKD, tokens_P2, pages)
    assert torch.equal(pages, to_pages(x_TKD, packing, page_size))
    out = torch.full((23, 3, 12), torch.nan, dtype=torch.float16, device=kernel_device)
    packing_kernel.copy_from_pages(pages, tokens_P2, out)
    assert torch.equal(out, x_TKD.half())


def test_errors_say_what_is_wrong():
    with pytest.raises(ValueError, match="at least one token"):
        Packing.of([3, 0], "cpu")
    with pytest.raises(ValueError, match="at least one token"):
        Packing.of([], "cpu")
    with pytest.raises(ValueError, match=r"queries \[2, 6\) are not a range of 5 tokens"):
        Packing.of([5], "cpu", first=2, num_queries=4)
    with pytest.raises(ValueError, match="not a range"):
        Packing.of([5], "cpu", first=5)
    with pytest.raises(ValueError, match="x_TKD has shape"):
        to_pages(torch.zeros(4, 1, 2), Packing.of([5], "cpu"), 4)
