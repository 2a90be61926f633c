"""The prefill choice of blocks against its reference, in the interpreter or on the GPU."""

import numpy as np
import pytest
import torch

from inference.kernels.index_select import prefill_kernel as kernel
from inference.kernels.index_select import reference, slabs
from inference.kernels.paging import PagedBatch


def choose(case, index_q, topk: int, local: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """(blocks by the kernel, by the reference) of the prefill tokens."""
    moved = case.to(device)
    blocks = torch.full((*index_q.shape[:2], topk), -7, dtype=torch.int32, device=device)
    kernel.index_select_prefill(
        index_q.to(device), moved.pages.index_pages, moved.batch, blocks, topk, local
    )
    expected = reference.index_select(index_q, case.pages.index_pages, case.batch, topk, local)
    first = case.batch.num_decode_tokens
    assert (blocks[:first] == -7).all(), "rows of decodes are not this kernel's"
    return blocks[first:].cpu(), expected[first:]


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "topk", "local"),
    [
        ([5], [5], 3, 0),
        ([5], [5], 16, 2),
        ([1, 1, 7, 7, 63], [40, 129, 7, 23, 63], 3, 0),
        ([1, 1, 7, 7, 63], [40, 129, 7, 23, 63], 16, 2),
        ([1, 20, 3], [9, 61, 40], 1, 1),
        ([1, 20, 3], [9, 61, 40], 3, 0),
        ([70], [99], 16, 2),
    ],
)
def test_choice_equals_the_reference(paged, kernel_device, query_lens, seq_lens, topk, local):
    case = paged(query_lens, seq_lens, page_size=4)
    index_q = case.randn(case.num_tokens, 2, 8)
    found, expected = choose(case, index_q, topk, local, kernel_device)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("page_size", "num_heads", "index_dim", "dtype"),
    [
        (16, 1, 32, torch.float32),
        (8, 3, 12, torch.float32),
        (16, 4, 16, torch.float16),
    ],
)
def test_other_shapes(paged, kernel_device, page_size, num_heads, index_dim, dtype):
    case = paged([40, 9], [151, 9], page_size=page_size, index_dim=index_dim, dtype=dtype)
    index_q = case.randn(case.num_tokens, num_heads, index_dim)
    found, expected = choose(case, index_q, 4, 1, kernel_device)
    assert torch.equal(found, expected)


def test_slabs_and_shares_of_any_size_choose_the_same(paged, kernel_device, monkeypatch):
    case = paged([1, 24, 5, 17], [30, 45, 5, 24], page_size=4)
    index_q = case.randn(case.num_tokens, 2, 8)
    expected = choose(case, index_q, 3, 1, kernel_device)[1]
    *scorer, rows, _ = kernel._scorer(index_q.to(kernel_device), case.pages.index_pages)
    for scratch_bytes, num_programs in ((1, 1), (1 << 12, 5), (1 << 30, 7)):
        monkeypatch.setattr(slabs, "SCRATCH_BYTES", scratch_bytes)
        monkeypatch.setattr(kernel, "_scorer", lambda *_, n=num_programs: (*scorer, rows, n))
        assert torch.equal(choose(case, index_q, 3, 1, kernel_device)[0], expected)


def test_a_chunk_chooses_as_the_whole_prompt_does(paged, kernel_device):
    whole = paged([61], [61], page_size=4)
    index_q = whole.randn(61, 2, 8)
    expected = choose(whole, index_q, 3, 1, kernel_device)[0]
    last = 0
    for length in (2, 7, 20, 61):
        chunk = paged([length - last], [length], page_size=4)
        chunk.batch.page_table_RN = whole.batch.page_table_RN
        chunk.pages = whole.pages
        found = choose(chunk, index_q[last:length], 3, 1, kernel_device)[0]
        assert torch.equal(found, expected[last:length])
        last = length


def test_padding_chooses_nothing(paged, kernel_device):
    case = paged([1, 6, 10, 3], [9, 6, 0, 11], page_size=4)
    index_q = case.randn(case.num_tokens + 5, 2, 8)
    case.batch.positions_T = torch.nn.functional.pad(case.batch.positions_T, (0, 5))
    found, expected = choose(case, index_q, 3, 1, kernel_device)
    assert torch.equal(found, expected)
    assert (found[6:16] == -1).all()
    assert (found[-5:] == -1).all()


def test_no_prefill_leaves_all_rows_alone(paged, kernel_device):
    case = paged([1, 1], [9, 6], page_size=4)
    assert choose(case, case.randn(2, 2, 8), 3, 1, kernel_device)[0].shape == (0, 2, 3)


def test_a_tie_goes_to_the_lower_block(paged, kernel_device):
    case = paged([10], [40], page_size=4)
    written = ~case.pages.index_pages.isnan()
    case.pages.index_pages[written] = 1.0
    found, expected = choose(case, torch.ones(10, 2, 8), 3, 1, kernel_device)
    assert torch.equal(found, expected)
    assert found[-1, 0].tolist() == [0, 1, 9]


def test_pages_are_dealt_once_and_evenly(paged):
    case = paged([1, 90, 5, 40], [30, 141, 5, 60], page_size=4)
    tiles = slabs.lay_tiles(case.batch, 16)
    assert tiles.num_tokens_L.tolist() == [16, 16, 16, 16, 16, 10, 5, 16, 16, 8]
    assert tiles.position_L[:2].tolist() == [51, 67]
    (slab,) = slabs.lay_slabs(tiles, 2, 6)
    pages_P = [
        int(slab.segment_S6[first:last, 5].sum())
        for first, last in zip(slab.start_P1, slab.start_P1[1:], strict=False)
    ]
    assert sum(pages_P) == tiles.num_pages_L.sum()
    assert max(pages_P) - min(pages_P) <= 1
    seen = [
        (int(row), int(page) + place)
        for _, row, _, _, page, count in slab.segment_S6
        for place in range(count)
    ]
    wanted = [
        (int(token) * 2, page)
        for token, count in zip(tiles.token_L, tiles.num_pages_L, strict=True)
        for page in range(count)
    ]
    assert sorted(seen) == sorted(wanted)


def test_topk_above_sixteen_is_refused(paged, kernel_device):
    case = paged([5], [5], page_size=4)
    with pytest.raises(ValueError, match="topk_blocks=17 must lie between 1 and 16"):
        choose(case, case.randn(5, 2, 8), 17, 1, kernel_device)


def differing_rows(index_q, pages, batch: PagedBatch, blocks) -> tuple[int, float]:
    """(rows whose choice is not the reference's, largest relative gap of their chosen scores).

    A row may differ where scores tie within the rounding of an FP32 sum.
    """
    expected = reference.index_select(index_q, pages, batch, blocks.shape[-1], 1)
    gap, rows = 0.0, (blocks != expected).any(-1).nonzero().tolist()
    starts = batch.query_start_R1.tolist()
    for token, head in rows:
        request = int(np.searchsorted(starts, token, side="right")) - 1
        keys = pages[batch.page_table_RN[request].clamp(min=0).long()].float().flatten(0, 1)
        scores = keys @ index_q[token, head].float()
        place = torch.arange(len(scores), device=scores.device)
        scores = scores.where(place <= batch.positions_T[token], -torch.inf)
        scores_N = scores.view(-1, batch.page_size).amax(-1)
        mine, theirs = (
            scores_N[choice[token, head].long()].sort().values for choice in (blocks, expected)
        )
        gap = max(gap, float(((mine - theirs).abs() / theirs.abs().clamp(min=1e-3)).max()))
    return len(rows), gap


@pytest.mark.gpu
@pytest.mark.parametrize("pages_dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("num_heads", [4, 1])
def test_m3_shapes_on_the_gpu(paged, cuda, pages_dtype, num_heads):
    lens = [1, 700, 64, 1, 300, 1000], [900, 5000, 64, 1, 2333, 9999]
    lens[0][3], lens[1][3] = 2, 2
    case = paged(*lens, page_size=128, num_kv_heads=1, index_dim=128, dtype=torch.bfloat16)
    if pages_dtype == torch.float16:
        case.pages.index_pages = case.pages.index_pages.half()
    elif pages_dtype == torch.float8_e4m3fn:
        case.pages.index_pages = case.pages.index_pages.to(pages_dtype)
    dtype = torch.float16 if pages_dtype == torch.float16 else torch.bfloat16
    index_q = case.randn(case.num_tokens, num_heads, 128).to(dtype).to(cuda)
    case = case.to(cuda)
    blocks = torch.full((case.num_tokens, num_heads, 16), -7, dtype=torch.int32, device=cuda)
    kernel.index_select_prefill(index_q, case.pages.index_pages, case.batch, blocks, 16, 1)
    first = case.batch.num_decode_tokens
    blocks[:first] = reference.index_select(index_q, case.pages.index_pages, case.batch, 16, 1)[
        :first
    ]
    count, gap = differing_rows(index_q, case.pages.index_pages, case.batch, blocks)
    assert gap <= 1e-3
    assert count <= 0.01 * case.num_tokens * num_heads
