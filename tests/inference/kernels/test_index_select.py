import pytest
import torch

from inference.kernels import paged_queries
from inference.kernels.index_select import index_select
from inference.kernels.msa_attention import msa_attention


def brute_force(case, index_q, topk: int, local: int) -> torch.Tensor:
    """The rule word by word: {local} and the best others by (score descending, id ascending)."""
    num_heads = index_q.shape[1]
    blocks = torch.full((case.num_tokens, num_heads, topk), -1, dtype=torch.int32)
    for token, row, position in case.tokens():
        num_blocks = position // case.page_size + 1
        forced = set(range(max(0, num_blocks - local), num_blocks))
        for head in range(num_heads):
            keys = case.index_keys[row][: position + 1].float()
            scores = (keys @ index_q[token, head].float()).split(case.page_size)
            others = sorted(
                (b for b in range(num_blocks) if b not in forced),
                key=lambda b: (-float(scores[b].max()), b),
            )
            chosen = sorted([*forced, *others[: topk - len(forced)]])
            blocks[token, head, : len(chosen)] = torch.tensor(chosen).int()
    return blocks


@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [
        ([1], [1]),
        ([1, 1, 1], [3, 4, 5]),
        ([1, 1, 7, 7, 63], [40, 129, 7, 23, 63]),
        ([5], [5]),
    ],
)
@pytest.mark.parametrize(("topk", "local"), [(1, 1), (2, 1), (3, 2), (3, 0), (16, 1)])
def test_selection_equals_brute_force(paged, query_lens, seq_lens, topk, local):
    case = paged(query_lens, seq_lens, page_size=4)
    index_q = case.randn(case.num_tokens, 2, 8)
    found = index_select(
        index_q, case.pages.index_pages, case.batch, topk_blocks=topk, local_blocks=local
    )
    assert torch.equal(found, brute_force(case, index_q, topk, local))


def one_query(paged, scores: list[float], topk: int, local: int = 1, length: int | None = None):
    """Selected blocks of one decode whose block b scores `scores[b]` (page size 2)."""
    case = paged([1], [length or 2 * len(scores)], page_size=2, num_kv_heads=1, index_dim=1)
    pages = case.batch.page_table_RN[0, : len(scores)].long()
    for page, score in zip(pages.tolist(), scores, strict=True):
        is_written = ~case.pages.index_pages[page].isnan()
        case.pages.index_pages[page][is_written] = score
    blocks = index_select(
        torch.ones(1, 1, 1),
        case.pages.index_pages,
        case.batch,
        topk_blocks=topk,
        local_blocks=local,
    )
    return blocks[0, 0].tolist()


def test_the_local_block_counts_among_the_chosen(paged):
    assert one_query(paged, [5.0, 9.0, 7.0, -50.0], topk=2) == [1, 3]
    assert one_query(paged, [5.0, 9.0, 7.0, -50.0], topk=3, local=2) == [1, 2, 3]
    assert one_query(paged, [5.0, 9.0, 7.0, -50.0], topk=1) == [3]


def test_ties_go_to_the_lower_block(paged):
    assert one_query(paged, [1.0, 1.0, 1.0, 1.0, 1.0], topk=3) == [0, 1, 4]
    assert one_query(paged, [0.0, 1.0, 1.0, 1.0, 1.0], topk=3) == [1, 2, 4]
    assert one_query(paged, [-0.0, 0.0, -1.0, 0.0], topk=2) == [0, 3]


def test_a_score_is_the_maximum_and_not_scaled_away_by_its_sign(paged):
    assert one_query(paged, [-5.0, -9.0, -7.0, -50.0], topk=2) == [0, 3]


def test_fewer_visible_blocks_than_topk_end_in_minus_one(paged):
    assert one_query(paged, [1.0, 2.0], topk=4) == [0, 1, -1, -1]
    assert one_query(paged, [1.0, 2.0], topk=4, length=3) == [0, 1, -1, -1]


def test_overflowing_or_nan_scores_never_cost_the_local_block(paged):
    inf, nan = float("inf"), float("nan")
    assert one_query(paged, [inf, inf, inf, 0.0], topk=2) == [0, 3]
    assert one_query(paged, [nan, 1.0, -inf, nan], topk=3) == [0, 1, 3]


def test_selection_does_not_depend_on_chunks_or_company(paged):
    whole = paged([29], [29], page_size=4)
    index_q = whole.randn(29, 2, 8)
    select = {"topk_blocks": 3, "local_blocks": 1}
    expected = index_select(index_q, whole.pages.index_pages, whole.batch, **select)
    last = 0
    for length in (1, 4, 5, 13, 28, 29):
        chunk = paged([length - last], [length], page_size=4)
        chunk.batch.page_table_RN = whole.batch.page_table_RN
        found = index_select(index_q[last:length], whole.pages.index_pages, chunk.batch, **select)
        assert torch.equal(found, expected[last:length])
        last = length


def test_small_tiles_select_the_same(paged, monkeypatch):
    case = paged([1, 1, 9, 9, 30], [13, 57, 9, 40, 30], page_size=4)
    index_q = case.randn(case.num_tokens, 2, 8)
    args = (index_q, case.pages.index_pages, case.batch)
    expected = index_select(*args, topk_blocks=3, local_blocks=1)
    monkeypatch.setattr(paged_queries, "MAX_TILE_PAIRS", 50)
    assert torch.equal(index_select(*args, topk_blocks=3, local_blocks=1), expected)


# BR-058
@pytest.mark.parametrize("num_tokens", [5, 3])
def test_indexer_and_attention_agree_on_the_layout(paged, num_tokens):
    """Block 100 t + 10 h + b goes in at [t, h, b] and is read at [t, h, b]; T = H = 3 too."""
    num_heads, length = 3, 100 * num_tokens + 30
    case = paged([num_tokens], [length], page_size=1, num_kv_heads=num_heads, index_dim=length)
    pages_S = case.batch.page_table_RN[0, :length].long()
    case.pages.index_pages[pages_S, 0] = torch.eye(length)
    case.pages.k_pages[pages_S] = 0.0
    value_S = torch.arange(length).float()
    case.pages.v_pages[pages_S] = value_S[:, None, None, None].expand(length, 3, 1, 8)
    wanted_THB = (
        100 * torch.arange(num_tokens)[:, None, None]
        + 10 * torch.arange(num_heads)[:, None]
        + torch.arange(2)
    )
    # Positions begin where every wanted block is already visible.
    assert int(case.batch.positions_T[0]) >= int(wanted_THB.max())
    index_q = torch.nn.functional.one_hot(wanted_THB, length).sum(2).float()
    blocks = index_select(
        index_q, case.pages.index_pages, case.batch, topk_blocks=2, local_blocks=0
    )
    assert torch.equal(blocks, wanted_THB.int())
    q = torch.zeros(num_tokens, num_heads, 8)
    out = msa_attention(q, case.pages, blocks, case.batch, scale=1.0)
    # Equal keys: the mean of the two block numbers.
    expected = wanted_THB.float().mean(-1)[..., None].expand(num_tokens, num_heads, 8)
    torch.testing.assert_close(out, expected)


# BR-058
def test_no_block_lies_beyond_the_query(paged):
    case = paged([50, 50], [50, 77], page_size=4)
    blocks = index_select(
        case.randn(100, 2, 8), case.pages.index_pages, case.batch, topk_blocks=4, local_blocks=1
    )
    own_T = (case.batch.positions_T // 4)[:, None, None]
    assert (blocks <= own_T).all()
    assert (blocks == own_T).any(-1).all()
    count = (blocks >= 0).sum(-1)
    assert torch.equal(count, (own_T[..., 0] + 1).clamp(max=4).expand(100, 2))


def test_wrong_arguments_are_refused(paged):
    case = paged([1], [5], page_size=4)
    with pytest.raises(ValueError, match="local_blocks=3 must lie between 0 and topk_blocks=2"):
        index_select(
            torch.zeros(1, 2, 8), case.pages.index_pages, case.batch, topk_blocks=2, local_blocks=3
        )
    with pytest.raises(ValueError, match="index_pages has shape"):
        index_select(
            torch.zeros(1, 2, 9), case.pages.index_pages, case.batch, topk_blocks=2, local_blocks=1
        )
