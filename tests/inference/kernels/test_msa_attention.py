import pytest
import torch

from inference.kernels.index_select import index_select
from inference.kernels.msa_attention import msa_attention
from inference.kernels.msa_attention import reference as msa_reference
from inference.kernels.paged_attention import paged_attention


def random_blocks(case, topk: int) -> torch.Tensor:
    """Any valid choice that includes the query's own block, ids ascending, then -1."""
    blocks = torch.full((case.num_tokens, case.num_kv_heads, topk), -1, dtype=torch.int32)
    for token, _, position in case.tokens():
        own = position // case.page_size
        for head in range(case.num_kv_heads):
            others = torch.randperm(own, generator=case.generator)[: topk - 1]
            chosen = torch.cat([others, torch.tensor([own])]).sort().values
            blocks[token, head, : len(chosen)] = chosen.int()
    return blocks


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "page_size", "topk"),
    [
        ([1], [1], 4, 2),
        ([1, 1, 1], [3, 40, 5], 4, 3),
        ([1, 1, 7, 7, 63], [40, 129, 7, 23, 63], 8, 2),
    ],
)
def test_equals_attention_over_the_keys_of_the_chosen_blocks(
    paged, attention_oracle, query_lens, seq_lens, page_size, topk
):
    case = paged(query_lens, seq_lens, page_size)
    q = case.randn(case.num_tokens, 6, 8)
    blocks = random_blocks(case, topk)
    out = msa_attention(q, case.pages, blocks, case.batch, scale=0.3)
    for token, row, position in case.tokens():
        block_of_key = torch.arange(position + 1) // page_size
        for kv_head in range(2):
            keep = torch.isin(block_of_key, blocks[token, kv_head].long())
            keys = case.keys[row][: position + 1][keep][:, kv_head : kv_head + 1]
            values = case.values[row][: position + 1][keep][:, kv_head : kv_head + 1]
            heads = slice(3 * kv_head, 3 * kv_head + 3)
            expected = attention_oracle(q[token, heads], keys, values, 0.3)
            torch.testing.assert_close(out[token, heads].double(), expected, rtol=1e-5, atol=1e-5)


# BR-064
def test_equals_dense_attention_while_every_block_is_chosen(paged):
    """topk 4 blocks of 4: positions 0..15 are dense, position 16 is the first that is not."""
    case = paged([40], [40], page_size=4)
    q, index_q = case.randn(40, 4, 8), case.randn(40, 2, 8)
    blocks = index_select(
        index_q, case.pages.index_pages, case.batch, topk_blocks=4, local_blocks=1
    )
    sparse = msa_attention(q, case.pages, blocks, case.batch, scale=0.3)
    dense = paged_attention(q, case.pages, case.batch, scale=0.3)
    torch.testing.assert_close(sparse[:16], dense[:16], rtol=1e-6, atol=1e-6)
    assert ((sparse[16:] - dense[16:]).abs().amax((1, 2)) > 1e-3).all()


def test_keys_outside_the_chosen_blocks_change_no_bit(paged):
    case = paged([1], [40], page_size=4)
    q = case.randn(1, 4, 8)
    blocks = torch.tensor([[[0, 3, 9], [2, 9, -1]]]).int()
    before = msa_attention(q, case.pages, blocks, case.batch, scale=0.3)
    for block in (1, 4, 5, 6, 7, 8):
        page = int(case.batch.page_table_RN[0, block])
        case.pages.k_pages[page] = torch.nan
        case.pages.v_pages[page] = torch.inf
    for head, unread in ((0, (2,)), (1, (0, 3))):
        for block in unread:
            case.pages.v_pages[int(case.batch.page_table_RN[0, block]), head] = torch.nan
    assert torch.equal(msa_attention(q, case.pages, blocks, case.batch, scale=0.3), before)


def test_nothing_chosen_gives_zeros(paged):
    case = paged([1, 3], [40, 9], page_size=4)
    blocks = torch.full((4, 2, 3), -1, dtype=torch.int32)
    out = msa_attention(case.randn(4, 4, 8), case.pages, blocks, case.batch, scale=0.3)
    assert torch.equal(out, torch.zeros(4, 4, 8))


def test_small_tiles_give_the_same(paged, monkeypatch):
    case = paged([1, 1, 9, 30], [13, 57, 40, 30], page_size=4)
    q, blocks = case.randn(case.num_tokens, 4, 8), random_blocks(case, 3)
    expected = msa_attention(q, case.pages, blocks, case.batch, scale=0.3)
    monkeypatch.setattr(msa_reference, "MAX_TILE_ELEMENTS", 1000)
    out = msa_attention(q, case.pages, blocks, case.batch, scale=0.3)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


def test_a_decode_gives_what_prefill_gives_at_its_position(paged):
    whole = paged([30], [30], page_size=4)
    q, blocks = whole.randn(30, 4, 8), random_blocks(whole, 3)
    expected = msa_attention(q, whole.pages, blocks, whole.batch, scale=0.3)
    for position in (0, 3, 4, 17, 29):
        decode = paged([1], [position + 1], page_size=4)
        decode.batch.page_table_RN = whole.batch.page_table_RN
        at = slice(position, position + 1)
        out = msa_attention(q[at], whole.pages, blocks[at], decode.batch, scale=0.3)
        torch.testing.assert_close(out, expected[at], rtol=1e-6, atol=1e-6)


def test_a_chosen_block_without_a_page_is_an_error(paged):
    case = paged([1], [9], page_size=4)
    blocks = torch.tensor([[[0, 3], [1, 2]]]).int()
    with pytest.raises(ValueError, match="page_table_RN has no page"):
        msa_attention(case.randn(1, 4, 8), case.pages, blocks, case.batch, scale=1.0)


# BR-058
def test_head_major_blocks_are_refused_where_the_shape_shows_it(paged):
    case = paged([5], [9], page_size=4)
    blocks = torch.zeros(2, 5, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"blocks_TKB has shape \(2, 5, 2\), needs \(5, 2, 2\)"):
        msa_attention(case.randn(5, 4, 8), case.pages, blocks, case.batch, scale=1.0)
