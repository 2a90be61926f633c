"""Prefill rows of the dense kernels against the reference; decode rows belong to another kernel."""

import numpy as np
import pytest
import torch

from inference.kernels.paged_attention import prefill_kernel, reference
from inference.kernels.paged_attention.prefill_tiles import START, prefill_tiles, spread

SHAPES = [
    ([7], [7], 4),
    ([1, 1, 7, 20, 33], [40, 129, 7, 23, 33], 16),
    ([1, 37, 3, 16], [9, 50, 32, 16], 4),
    ([19, 5], [0, 30], 8),
]


def compare(case, q, eps: float, **options) -> None:
    batch, scale = case.batch, 0.3
    out = torch.full_like(q, torch.nan)
    prefill_kernel.paged_attention_prefill(q, case.pages, batch, scale, out, **options)
    expected = reference.paged_attention(q, case.pages, batch, scale)
    first = batch.num_decode_tokens
    assert out[:first].isnan().all()
    torch.testing.assert_close(out[first:], expected[first:], rtol=eps, atol=eps)


@pytest.mark.parametrize(("query_lens", "seq_lens", "page_size"), SHAPES)
def test_equals_the_reference(paged, kernel_device, query_lens, seq_lens, page_size):
    case = paged(query_lens, seq_lens, page_size)
    q = case.randn(case.num_tokens, 4, 8).to(kernel_device)
    compare(case.to(kernel_device), q, 1e-5)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(6, 3, 16), (5, 1, 24)])
def test_other_heads(paged, kernel_device, num_heads, num_kv_heads, head_dim):
    case = paged([1, 21, 9], [30, 40, 9], 16, num_kv_heads=num_kv_heads, head_dim=head_dim)
    q = case.randn(case.num_tokens, num_heads, head_dim).to(kernel_device)
    compare(case.to(kernel_device), q, 1e-5)


def test_small_tiles_over_several_pages(paged, kernel_device):
    case = paged([1, 70], [3, 90], 32)
    q = case.randn(case.num_tokens, 2, 8).to(kernel_device)
    compare(case.to(kernel_device), q, 1e-5, block_m=16, block_n=16)


def test_half_precision(paged, kernel_device):
    case = paged([1, 40], [9, 77], 16, dtype=torch.float16)
    q = case.randn(case.num_tokens, 4, 8).to(kernel_device)
    # The weights are rounded to FP16 as well.
    compare(case.to(kernel_device), q, 4 * torch.finfo(torch.float16).eps)


def test_tokens_of_no_request_get_zeros(paged, kernel_device):
    case = paged([1, 9], [4, 9], 4).to(kernel_device)
    q = torch.randn(14, 2, 8, device=kernel_device)
    out = torch.full_like(q, torch.nan)
    prefill_kernel.paged_attention_prefill(q, case.pages, case.batch, 0.3, out)
    assert (out[10:] == 0).all()
    assert not out[1:].isnan().any()


def test_a_batch_of_decodes_is_left_alone(paged, kernel_device):
    case = paged([1, 1], [4, 9], 4).to(kernel_device)
    out = torch.full((2, 2, 8), torch.nan, device=kernel_device)
    prefill_kernel.paged_attention_prefill(torch.zeros_like(out), case.pages, case.batch, 1.0, out)
    assert out.isnan().all()


def test_tiles_cover_the_prefills_with_the_longest_first(paged):
    case = paged([1, 5, 3], [8, 5, 20], 4)
    tiles_X4 = prefill_tiles(case.batch, 2)
    assert tiles_X4.tolist() == [
        [2, 8, 1, 19],
        [2, 6, 2, 17],
        [1, 5, 1, 4],
        [1, 3, 2, 2],
        [1, 1, 2, 0],
    ]
    assert tiles_X4.dtype == np.int32


def work_of_programs(tiles_X4, num_heads, group, programs):
    """Pages of each program, dealt out as `spread` says, item by item."""
    together, longer = spread(tiles_X4, num_heads, group, 4, programs)
    pages_X = -(-(tiles_X4[:, 2] + tiles_X4[:, 3]) // 4) + START
    items = [
        pages for _ in range(0, num_heads, together) for pages in pages_X for _ in range(together)
    ]
    rounds = len(items) // programs
    shares = [(items, programs)]
    if longer:
        assert longer == len(items) % programs
        cut = rounds * (programs - longer)
        shares = [(items[:cut], programs - longer), (items[cut:], longer)]
    work = []
    for share, width in shares:
        part = [0.0] * width
        for i, pages in enumerate(share):
            part[i % width if i // width % 2 == 0 else width - 1 - i % width] += pages
        work += part
    return work


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "num_heads", "group", "most"),
    [
        # Dealt out alike, the heads of a KV head together, the busiest has 1.08, 1.03, 1.013.
        ([64], [64], 64, 16, 1.03),
        ([64], [4096], 64, 16, 1.03),
        ([64], [256], 64, 16, 1.01),
    ],
)
def test_tiles_are_spread_evenly(paged, query_lens, seq_lens, num_heads, group, most):
    tiles_X4 = prefill_tiles(paged(query_lens, seq_lens, 4).batch, 4)
    work = work_of_programs(tiles_X4, num_heads, group, 33)
    assert max(work) < most * sum(work) / len(work)


def test_few_tiles_have_a_program_each(paged):
    tiles_X4 = prefill_tiles(paged([12], [40], 4).batch, 4)
    assert spread(tiles_X4, 2, 2, 4, 6) == (2, 0)


M3_SHAPES = [
    ([300], [300]),
    ([1, 1, 129, 1000, 64], [700, 33, 129, 1500, 2048]),
    ([20, 256, 77], [0, 1280, 205]),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("query_lens", "seq_lens"), M3_SHAPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(64, 4), (16, 1), (8, 1)])
@pytest.mark.parametrize("use_hopper", [True, False])
def test_shapes_of_m3(
    paged, cuda, monkeypatch, query_lens, seq_lens, num_heads, num_kv_heads, use_hopper
):
    monkeypatch.setattr(prefill_kernel, "USE_HOPPER", use_hopper)
    case = paged(query_lens, seq_lens, 128, num_kv_heads, 128, dtype=torch.bfloat16)
    q = case.randn(case.num_tokens, num_heads, 128).to(cuda)
    # Weights and result are rounded to BF16; values are of size 1.
    compare(case.to(cuda), q, 2 * torch.finfo(torch.bfloat16).eps)


@pytest.mark.gpu
def test_fp8_pages(paged, cuda):
    case = paged([1, 300], [700, 1500], 128, 4, 128, dtype=torch.bfloat16)
    q = case.randn(case.num_tokens, 64, 128).to(cuda)
    case = case.to(cuda)
    case.pages.k_pages = case.pages.k_pages.to(torch.float8_e4m3fn)
    case.pages.v_pages = case.pages.v_pages.to(torch.float8_e4m3fn)
    compare(case, q, 2 * torch.finfo(torch.bfloat16).eps)


@pytest.mark.gpu
@pytest.mark.parametrize("use_hopper", [True, False])
def test_runs_repeat_bitwise(paged, cuda, monkeypatch, use_hopper):
    monkeypatch.setattr(prefill_kernel, "USE_HOPPER", use_hopper)
    case = paged([700, 500], [1700, 3000], 128, 4, 128, dtype=torch.bfloat16)
    q = case.randn(case.num_tokens, 64, 128).to(cuda)
    case = case.to(cuda)
    out = [torch.full_like(q, torch.nan) for _ in range(3)]
    for one in out:
        prefill_kernel.paged_attention_prefill(q, case.pages, case.batch, 0.3, one)
    assert torch.equal(out[0], out[1])
    assert torch.equal(out[0], out[2])
