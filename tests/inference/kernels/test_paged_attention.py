import math

import pytest
import torch

from inference.kernels import paged_queries
from inference.kernels.paged_attention import paged_attention

SHAPES = [
    ([1], [1], 4),
    ([1, 1, 1], [3, 4, 5], 4),
    ([1, 1, 7, 7, 63], [40, 129, 7, 23, 63], 16),
    ([129], [129], 128),
]


@pytest.mark.parametrize(("query_lens", "seq_lens", "page_size"), SHAPES)
@pytest.mark.parametrize("num_heads", [2, 6])
def test_equals_attention_over_the_contiguous_history(
    paged, attention_oracle, query_lens, seq_lens, page_size, num_heads
):
    case = paged(query_lens, seq_lens, page_size)
    q = case.randn(case.num_tokens, num_heads, 8)
    out = paged_attention(q, case.pages, case.batch, scale=0.3)
    for token, row, position in case.tokens():
        keys, values = case.keys[row][: position + 1], case.values[row][: position + 1]
        expected = attention_oracle(q[token], keys, values, 0.3)
        torch.testing.assert_close(out[token].double(), expected, rtol=1e-5, atol=1e-5)


def test_two_keys_by_hand(paged):
    case = paged([1], [2], page_size=4, num_kv_heads=1, head_dim=1)
    page = int(case.batch.page_table_RN[0, 0])
    case.pages.k_pages[page, 0, :2, 0] = torch.tensor([0.0, math.log(3.0)])
    case.pages.v_pages[page, 0, :2, 0] = torch.tensor([1.0, 5.0])
    # Two query heads with queries 2 and 0: weights (1/4, 3/4) at scale 1/2, then (1/2, 1/2).
    q = torch.tensor([[[2.0], [0.0]]])
    out = paged_attention(q, case.pages, case.batch, scale=0.5)
    torch.testing.assert_close(out, torch.tensor([[[4.0], [3.0]]]))


def test_bf16_is_rounded_once(paged):
    case = paged([1, 9], [30, 9], page_size=4, dtype=torch.bfloat16)
    q = case.randn(10, 4, 8)
    rounded = paged_attention(q, case.pages, case.batch, scale=0.3)
    case.pages.k_pages = case.pages.k_pages.float()
    case.pages.v_pages = case.pages.v_pages.float()
    exact = paged_attention(q.float(), case.pages, case.batch, scale=0.3)
    assert torch.equal(rounded, exact.bfloat16())


def test_small_tiles_give_the_same(paged, monkeypatch):
    case = paged([1, 1, 9, 9, 30], [13, 57, 9, 40, 30], page_size=4)
    q = case.randn(case.num_tokens, 4, 8)
    expected = paged_attention(q, case.pages, case.batch, scale=0.3)
    monkeypatch.setattr(paged_queries, "MAX_TILE_PAIRS", 50)
    out = paged_attention(q, case.pages, case.batch, scale=0.3)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


def test_chunks_and_decodes_give_what_one_prefill_gives(paged):
    whole = paged([21], [21], page_size=4)
    q = whole.randn(21, 4, 8)
    expected = paged_attention(q, whole.pages, whole.batch, scale=0.3)
    last = 0
    for length in (1, 2, 7, 8, 20, 21):
        chunk = paged([length - last], [length], page_size=4)
        chunk.batch.page_table_RN = whole.batch.page_table_RN
        out = paged_attention(q[last:length], whole.pages, chunk.batch, scale=0.3)
        torch.testing.assert_close(out, expected[last:length], rtol=1e-6, atol=1e-6)
        last = length


def test_a_key_without_a_page_is_an_error(paged):
    case = paged([1, 1], [5, 9], page_size=4)
    case.batch.page_table_RN[1, 2] = -1
    with pytest.raises(ValueError, match="page_table_RN has no page"):
        paged_attention(case.randn(2, 4, 8), case.pages, case.batch, scale=1.0)
    case.batch.page_table_RN = case.batch.page_table_RN[:, :2]
    with pytest.raises(ValueError, match="page_table_RN has no page"):
        paged_attention(case.randn(2, 4, 8), case.pages, case.batch, scale=1.0)


def test_heads_must_share_kv_heads_evenly(paged):
    case = paged([1], [5], page_size=4)
    with pytest.raises(ValueError, match="3 query heads do not share 2 KV heads"):
        paged_attention(torch.zeros(1, 3, 8), case.pages, case.batch, scale=1.0)
