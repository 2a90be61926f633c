"""What all ops over a paged batch owe to padding, poisoned memory and empty batches."""

import torch

from inference.kernels.index_select import index_select
from inference.kernels.msa_attention import msa_attention
from inference.kernels.paged_attention import paged_attention
from inference.kernels.paged_queries import query_tiles
from inference.kernels.qk_norm_rope_write import QKNorms, qk_norm_rope_write


def run_layer(case, q, index_q):
    blocks = index_select(
        index_q, case.pages.index_pages, case.batch, topk_blocks=3, local_blocks=1
    )
    sparse = msa_attention(q, case.pages, blocks, case.batch, scale=0.3)
    return blocks, sparse, paged_attention(q, case.pages, case.batch, scale=0.3)


# BR-060
def test_padding_rows_select_nothing_and_leave_real_rows_alone(paged):
    """Three decodes alone, and with five padding rows as a captured graph adds them."""
    real = paged([1] * 3, [30, 9, 17], page_size=4)
    padded = paged([1] * 8, [30, 9, 17, 0, 0, 0, 0, 0], page_size=4)
    padded.pages = real.pages
    padded.batch.page_table_RN[:3] = real.batch.page_table_RN
    q, index_q = real.randn(8, 4, 8), real.randn(8, 2, 8)
    expected = run_layer(real, q[:3], index_q[:3])
    found = run_layer(padded, q, index_q)
    assert torch.equal(found[0][:3], expected[0])
    for out, wanted in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(out[:3], wanted, rtol=1e-6, atol=1e-6)
        assert torch.equal(out[3:], torch.zeros(5, 4, 8))
    assert torch.equal(found[0][3:], torch.full((5, 2, 3), -1, dtype=torch.int32))


# BR-060
def test_tokens_beyond_the_last_request_are_padding(paged):
    case = paged([1, 4], [30, 9], page_size=4)
    q, index_q = case.randn(7, 4, 8), case.randn(7, 2, 8)
    expected = run_layer(case, q[:5], index_q[:5])
    case.batch.positions_T = torch.nn.functional.pad(case.batch.positions_T, (0, 2))
    blocks, sparse, dense = run_layer(case, q, index_q)
    assert torch.equal(blocks[:5], expected[0])
    assert (blocks[5:] == -1).all()
    assert torch.equal(sparse, torch.nn.functional.pad(expected[1], (0, 0, 0, 0, 0, 2)))
    assert torch.equal(dense, torch.nn.functional.pad(expected[2], (0, 0, 0, 0, 0, 2)))


# BR-060
def test_padding_rows_write_nowhere(paged):
    case = paged([1] * 5, [30, 9, 0, 0, 0], page_size=4, head_dim=8)
    before = [p.clone() for p in (case.pages.k_pages, case.pages.v_pages, case.pages.index_pages)]
    qkv = case.randn(5, (4 + 2 * 2) * 8 + 3 * 8)
    norms = QKNorms(*(torch.zeros(8) for _ in range(4)))
    qk_norm_rope_write(
        qkv,
        norms,
        torch.ones(64, 4),
        case.batch,
        case.pages,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        eps=1e-6,
    )
    slots = set(case.batch.slots_T[:2].tolist())
    after = (case.pages.k_pages, case.pages.v_pages, case.pages.index_pages)
    for old, new in zip(before, after, strict=True):
        is_same = (old == new) | (old.isnan() & new.isnan())
        if is_same.ndim == 4:
            is_same = is_same.all(1)
        changed = (~is_same.all(-1)).flatten().nonzero().flatten().tolist()
        assert set(changed) == slots


# BR-060
def test_an_idle_step_gives_empty_outputs(paged):
    case = paged([], [], page_size=4)
    blocks, sparse, dense = run_layer(case, torch.zeros(0, 4, 8), torch.zeros(0, 2, 8))
    assert blocks.shape == (0, 2, 3)
    assert sparse.shape == dense.shape == (0, 4, 8)


def test_unwritten_places_never_count(paged):
    """Whatever lies there, NaN, infinity or stale numbers, no bit of any output changes."""
    case = paged([1, 1, 6, 3], [30, 9, 6, 15], page_size=4)
    q, index_q = case.randn(11, 4, 8), case.randn(11, 2, 8)
    expected = run_layer(case, q, index_q)
    assert not any(t.isnan().any() for t in expected)
    for filler in (torch.inf, -torch.inf, 1e30, 0.0):
        for pages in (case.pages.k_pages, case.pages.v_pages, case.pages.index_pages):
            is_poison = ~pages.isfinite() | (pages == 1e30)
            pages[is_poison] = filler
        for found, wanted in zip(run_layer(case, q, index_q), expected, strict=True):
            assert torch.equal(found, wanted)


def test_requests_may_share_pages(paged):
    """Two members of a group read one copy of their prompt."""
    case = paged([1, 1], [13, 13], page_size=4)
    case.batch.page_table_RN[1] = case.batch.page_table_RN[0]
    q, index_q = case.randn(1, 4, 8), case.randn(1, 2, 8)
    for out in run_layer(case, q.repeat(2, 1, 1), index_q.repeat(2, 1, 1)):
        assert torch.equal(out[0], out[1])


def test_tiles_cover_every_real_token_once(paged, monkeypatch):
    case = paged([1, 1, 9, 9, 1, 30], [13, 57, 9, 40, 0, 30], page_size=4)
    for limit in (1, 50, 1000, 1 << 16):
        monkeypatch.setattr("inference.kernels.paged_queries.MAX_TILE_PAIRS", limit)
        tokens = torch.cat([tile.tokens_RQ.flatten() for tile in query_tiles(case.batch)])
        assert sorted(tokens.tolist()) == [token for token, _, _ in case.tokens()]
