"""The decode kernels of `paged_attention` against the reference, by interpreter or on a GPU."""

import numpy as np
import pytest
import torch

from inference.kernels.decode_plan import DecodePlan, plan_units
from inference.kernels.paged_attention import paged_attention, reference
from inference.kernels.paged_attention.decode_kernel import (
    Launch,
    num_shared_workers,
    num_workers,
    paged_attention_decode,
)
from inference.kernels.paged_attention.shared_kernel import SharedLaunch
from inference.kernels.paging import LayerPages, PagedBatch


def run(case, q, device, *, workers=8, groups=None, query_len=1, own=None, shared=None, fp8=False):
    """(kernel, reference) for a case whose tokens are all decodes; groups share their pages."""
    case.batch.num_decodes = len(case.query_lens)
    case.batch.decode_query_len = query_len
    if groups is not None:
        for first, stop, count in zip(groups[0][:-1], groups[0][1:], groups[1], strict=True):
            case.batch.page_table_RN[first:stop, :count] = case.batch.page_table_RN[first, :count]
    if fp8:
        case.pages = LayerPages(
            case.pages.k_pages.to(torch.float8_e4m3fn),
            case.pages.v_pages.to(torch.float8_e4m3fn),
            None,
        )
    expected = reference.paged_attention(q, case.pages, case.batch, 0.3)
    there = case.to(device)
    there.plan(workers, groups)
    q = q.to(device)
    out = torch.empty_like(q)
    paged_attention_decode(q, there.pages, there.batch, 0.3, out, own, shared)
    return out.cpu(), expected


def check(found, wanted, dtype=torch.float32):
    # Products and sums of FP32, or one rounding of the output and of the weights.
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(found.float(), wanted.float(), rtol=tolerance, atol=tolerance)


OWN = [None, Launch(2, 16, 4, 2), Launch(3, 16, 4, 2)]


@pytest.mark.parametrize("own", OWN, ids=str)
@pytest.mark.parametrize("workers", [1, 8])
def test_equals_the_reference_however_the_work_is_cut(paged, kernel_device, workers, own):
    """Units of many and of single pages, a padding row, page ends, 3 heads a KV head."""
    case = paged([1, 1, 1, 1], [1, 40, 0, 129], page_size=16)
    found, expected = run(case, case.randn(4, 6, 8), kernel_device, workers=workers, own=own)
    check(found, expected)
    assert (found[2] == 0).all()


@pytest.mark.parametrize(("page_size", "head_dim", "heads"), [(4, 16, 2), (32, 32, 8)])
def test_pages_smaller_and_larger_than_a_tile(paged, kernel_device, page_size, head_dim, heads):
    case = paged([1, 1], [41, 90], page_size, head_dim=head_dim)
    q = case.randn(2, heads, head_dim)
    for own in (None, Launch(2, 16, 4, 2)):
        check(*run(case, q, kernel_device, workers=4, own=own))


@pytest.mark.parametrize("query_len", [2, 5])
def test_each_query_token_has_its_own_limit(paged, kernel_device, query_len):
    """The newest page may hold keys that the earlier query tokens do not see, or nothing else."""
    case = paged([query_len] * 3, [query_len, 33, 64], page_size=8)
    q = case.randn(3 * query_len, 4, 8)
    check(*run(case, q, kernel_device, query_len=query_len))


@pytest.mark.parametrize("query_len", [1, 3])
def test_groups_read_their_shared_pages_together(paged, kernel_device, query_len):
    """A group of three and one of two, a request alone, and one of padding between them."""
    lens = [50, 41, 63, 30, 0, 40, 57]
    case = paged([query_len] * 7, lens, page_size=8)
    groups = ([0, 3, 4, 5, 7], [4, 0, 0, 4])
    q = case.randn(7 * query_len, 4, 8)
    for shared in (None, SharedLaunch(16, 16, 4, 2)):
        found, expected = run(
            case, q, kernel_device, groups=groups, query_len=query_len, shared=shared
        )
        check(found, expected)
        assert (found[4 * query_len : 5 * query_len] == 0).all()


def test_a_large_group_is_read_in_parts(paged, kernel_device):
    case = paged([1] * 18, [40] * 18, page_size=8, num_kv_heads=1)
    check(*run(case, case.randn(18, 2, 8), kernel_device, groups=([0, 18], [4])))


@pytest.mark.parametrize(("num_requests", "heads"), [(17, 2), (65, 4)])
def test_many_requests_are_merged_several_heads_at_a_time(
    paged, kernel_device, num_requests, heads
):
    """The first have more parts, own ones and shared ones, than the merge adds at a time."""
    lens = [40, 44, 41, 45, *[3] * (num_requests - 4)]
    case = paged([1] * num_requests, lens, page_size=4, num_kv_heads=1)
    q = case.randn(num_requests, heads, 8)
    groups = ([0, 3, *range(4, num_requests + 1)], [4] + [0] * (num_requests - 3))
    found, expected = run(case, q, kernel_device, workers=3 * num_requests, groups=groups)
    check(found, expected)


def test_a_request_that_is_wholly_shared_but_for_its_newest_page(paged, kernel_device):
    case = paged([1, 1], [33, 33], page_size=8)
    q = case.randn(2, 4, 8)
    check(*run(case, q, kernel_device, workers=1, groups=([0, 2], [4])))


def test_unused_units_change_nothing(paged, kernel_device):
    case = paged([1, 1], [40, 17], page_size=8)
    q = case.randn(2, 4, 8)
    there = case.to(kernel_device)
    outs = []
    for own, shared in ((None, None), (20, 3)):
        units = plan_units(
            np.array([5, 3]), None, None, 4, capacity=own, shared_capacity=shared
        ).to(kernel_device)
        there.batch.plan = DecodePlan(index=units, dense=units)
        outs.append(torch.empty_like(q.to(kernel_device)))
        launch = Launch(2, 16, 4, 2)
        paged_attention_decode(q.to(kernel_device), there.pages, there.batch, 0.3, outs[-1], launch)
    assert torch.equal(*outs)


def test_shared_units_of_another_number_than_own_ones(paged, kernel_device):
    """Both with unused units at the end, as in a captured step."""
    case = paged([1] * 4, [70, 75, 80, 9], page_size=8)
    case.batch.page_table_RN[1:3, :8] = case.batch.page_table_RN[0, :8]
    q = case.randn(4, 4, 8)
    expected = reference.paged_attention(q, case.pages, case.batch, 0.3)
    there = case.to(kernel_device)
    bounds, shared_pages = np.array([0, 3, 4]), np.array([8, 0])
    units = plan_units(
        np.array([9, 10, 10, 2]),
        bounds,
        shared_pages,
        9,
        num_shared_workers=2,
        capacity=12,
        shared_capacity=5,
    ).to(kernel_device)
    assert (units.shared_X4[:, 3] > 0).sum() == 2
    there.batch.num_decodes = 4
    there.batch.plan = DecodePlan(index=units, dense=units)
    found = torch.empty_like(q.to(kernel_device))
    paged_attention_decode(q.to(kernel_device), there.pages, there.batch, 0.3, found)
    check(found.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(paged, kernel_device, dtype):
    if dtype == torch.bfloat16 and kernel_device.type == "cpu":
        pytest.skip("the interpreter's bf16 products are garbage")
    case = paged([1, 1, 1], [60, 70, 33], page_size=8, head_dim=16, dtype=dtype)
    q = case.randn(3, 4, 16)
    for own in OWN:
        check(*run(case, q, kernel_device, own=own, groups=([0, 2, 3], [5, 0])), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_fp8_pages(paged, kernel_device, dtype):
    case = paged([1, 1, 1], [60, 70, 33], page_size=8, head_dim=32, dtype=dtype)
    q = case.randn(3, 4, 32)
    found, expected = run(case, q, kernel_device, groups=([0, 2, 3], [5, 0]), fp8=True)
    check(found, expected, dtype)


def test_prefill_tokens_behind_the_decodes_are_left_alone(paged, kernel_device):
    case = paged([1, 1, 5], [9, 17, 5], page_size=8)
    there = case.to(kernel_device)
    there.plan(4)
    q = case.randn(7, 4, 8).to(kernel_device)
    out = torch.full_like(q, 7.0)
    paged_attention_decode(q, there.pages, there.batch, 0.3, out)
    assert (out[2:] == 7.0).all()
    expected = reference.paged_attention(q, there.pages, there.batch, 0.3)
    check(out[:2].cpu(), expected[:2].cpu())


def test_decodes_without_a_plan_are_an_error(paged):
    case = paged([1], [9], page_size=8)
    q = case.randn(1, 4, 8)
    with pytest.raises(ValueError, match=r"need batch\.plan"):
        paged_attention_decode(q, case.pages, case.batch, 0.3, torch.empty_like(q))


def test_four_kv_heads_need_a_quarter_of_the_units():
    assert num_workers(132, 4) == 33
    assert num_workers(2, 4) == 1


def test_a_shared_unit_is_two_programs_a_kv_head_at_sixteen_query_heads_each():
    assert num_shared_workers(132, 4) == 16
    assert num_shared_workers(132, 1) == 66
    assert num_shared_workers(132, 1, group=8) == 132
    assert num_shared_workers(2, 4) == 1


def real_case(device, dtype, num_heads, num_kv_heads, query_len):
    """M3's sizes: a group of 18 on a shared prompt, five requests alone, a padding row."""
    generator = torch.Generator(device=device).manual_seed(1)
    lens = [1900 + 37 * i for i in range(18)] + [query_len, 128, 700, 2049, 2560, 0]
    num_rows, width = len(lens), 21
    shape = (num_rows * width, num_kv_heads, 128, 128)
    k, v = (torch.randn(shape, generator=generator, device=device).to(dtype) for _ in "kv")
    table = torch.randperm(num_rows * width, generator=generator, device=device)
    table = table.view(num_rows, width).int()
    table[:18, :14] = table[0, :14]
    for row, length in enumerate(lens):
        table[row, -(-length // 128) :] = -1
        if length % 128:
            page = int(table[row, length // 128])
            k[page, :, length % 128 :] = torch.nan
            v[page, :, length % 128 :] = torch.nan
    seq_len_R = torch.tensor(lens, dtype=torch.int32)
    positions = (seq_len_R.long()[:, None] - query_len + torch.arange(query_len)).clamp(min=0)
    num_pages_R = -(-np.array(lens) // 128)
    units = plan_units(
        num_pages_R,
        np.array([0, 18, *range(19, num_rows + 1)]),
        np.array([14] + [0] * (num_rows - 18)),
        num_workers(132, num_kv_heads),
        num_shared_workers=num_shared_workers(132, num_kv_heads),
    ).to(device)
    batch = PagedBatch(
        positions_T=positions.flatten().to(device),
        slots_T=torch.full((num_rows * query_len,), -1, device=device),
        query_start_R1=(torch.arange(num_rows + 1) * query_len).int().to(device),
        seq_len_R=seq_len_R.to(device),
        page_table_RN=table,
        page_size=128,
        num_decodes=num_rows,
        max_query_len=query_len,
        max_seq_len=max(lens),
        decode_query_len=query_len,
        plan=DecodePlan(index=units, dense=units),
    )
    q = torch.randn(num_rows * query_len, num_heads, 128, generator=generator, device=device)
    return q.to(torch.bfloat16), LayerPages(k, v, None), batch


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32])
@pytest.mark.parametrize("heads", [(64, 4), (16, 1), (8, 1)])
@pytest.mark.parametrize("query_len", [1, 2, 8])
def test_real_sizes(cuda, dtype, heads, query_len):
    q, pages, batch = real_case(cuda, dtype, *heads, query_len)
    if dtype == torch.float32:
        q = q.float()
    wide = LayerPages(pages.k_pages.float(), pages.v_pages.float(), None)
    expected = reference.paged_attention(q.float(), wide, batch, 128**-0.5)
    found = paged_attention(q, pages, batch, scale=128**-0.5)
    error = (found.float() - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype == torch.float32 else 5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(64, 4), (16, 1), (8, 1)])
@pytest.mark.parametrize("query_len", [1, 2, 8])
@pytest.mark.parametrize("shared", [None, SharedLaunch(64, 64, 4, 2)], ids=["default", "triton"])
def test_both_kernels_of_shared_pages(cuda, heads, query_len, shared):
    q, pages, batch = real_case(cuda, torch.bfloat16, *heads, query_len)
    wide = LayerPages(pages.k_pages.float(), pages.v_pages.float(), None)
    expected = reference.paged_attention(q.float(), wide, batch, 128**-0.5)
    found = torch.empty_like(q)
    paged_attention_decode(q, pages, batch, 128**-0.5, found, shared=shared)
    assert (found.float() - expected).norm() / expected.norm() < 5e-3


@pytest.mark.gpu
def test_a_captured_call_gives_the_same(cuda):
    q, pages, batch = real_case(cuda, torch.bfloat16, 64, 4, 1)
    eager = paged_attention(q, pages, batch, scale=0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [paged_attention(q, pages, batch, scale=0.1) for _ in range(3)]
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, eager) for out in outs)


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [None, SharedLaunch(64, 64, 4, 2)], ids=["default", "triton"])
@pytest.mark.parametrize("heads", [(64, 4), (8, 1)])
def test_a_call_sees_what_the_one_before_wrote(cuda, heads, shared):
    """Queries are the output of the call before, whose last kernel is still at work."""
    q, pages, batch = real_case(cuda, torch.bfloat16, *heads, 1)
    outs = [q * 8, *(torch.full_like(q, torch.nan) for _ in range(6))]

    def attend(i):
        paged_attention_decode(outs[i], pages, batch, 2.0, outs[i + 1], shared=shared)

    for i in range(6):
        attend(i)
        torch.cuda.synchronize()
    wanted = [out.clone() for out in outs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(6):
            attend(i)
    for _ in range(20):
        for out in outs[1:]:
            out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(*pair) for pair in zip(outs, wanted, strict=True))
