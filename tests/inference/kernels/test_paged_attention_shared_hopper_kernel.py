"""The shared units of decodes in Gluon against PyTorch; Gluon has no interpreter, so on a GPU."""

import math

import pytest
import torch

from inference.kernels.decode_plan import SHARED_ROWS, DecodePlan, WorkUnits
from inference.kernels.paging import LayerPages, PagedBatch

pytestmark = pytest.mark.gpu
PAGE, D, SCALE = 128, 128, 0.1


@pytest.fixture
def hopper(cuda):
    if torch.cuda.get_device_capability(cuda)[0] != 9:
        pytest.skip("made for Hopper")
    from inference.kernels.paged_attention import shared_hopper_kernel

    return shared_hopper_kernel


def make_case(device, units, *, dtype=torch.bfloat16, heads=(64, 4), query_len=1, unused=0):
    """(q, pages, batch); logical pages lie in any order, those of no unit hold NaN."""
    num_heads, num_kv_heads = heads
    generator = torch.Generator(device=device).manual_seed(1)
    num_rows = max(first + count for first, count, _, _ in units)
    width = max(first + count for _, _, first, count in units)
    num_pages = num_rows * width + 1
    order = torch.randperm(num_pages - 1, generator=generator, device=device)
    table_RN = order.view(num_rows, width).int()
    shape = (num_pages, num_kv_heads, PAGE, D)
    k, v = (torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in "kv")
    for row, count, first_page, length in units:
        table_RN[row : row + count] = table_RN[row]
        used = table_RN[row, first_page : first_page + length].long()
        for pages in (k, v):
            part = torch.randn((length, *shape[1:]), generator=generator, device=device)
            pages[used] = part.to(dtype)
    num_tokens = num_rows * query_len
    q = torch.randn(num_tokens, num_heads, D, generator=generator, device=device).to(dtype)
    shared_X4 = torch.tensor([*units, *[(0, 0, 0, 0)] * unused], dtype=torch.int32, device=device)
    none = torch.zeros((0, 3), dtype=torch.int32, device=device)
    plan = WorkUnits(none, none, shared_X4, none)
    batch = PagedBatch(
        positions_T=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        slots_T=torch.full((num_tokens,), -1, device=device),
        query_start_R1=(torch.arange(num_rows + 1) * query_len).int().to(device),
        seq_len_R=torch.full((num_rows,), width * PAGE, dtype=torch.int32, device=device),
        page_table_RN=table_RN,
        page_size=PAGE,
        num_decodes=num_rows,
        max_query_len=query_len,
        max_seq_len=width * PAGE,
        decode_query_len=query_len,
        plan=DecodePlan(index=plan, dense=plan),
    )
    return q, LayerPages(k, v, None), batch


def attend(kernel, q, pages, batch):
    """(outputs, log-sum-exps) of all units, NaN where nothing was written."""
    num_units, num_kv_heads = batch.plan.dense.shared_X4.shape[0], pages.k_pages.shape[1]
    num_rows = SHARED_ROWS * batch.decode_query_len * q.shape[1] // num_kv_heads
    lse = torch.full((num_units, num_kv_heads, num_rows), torch.nan, device=q.device)
    part = torch.full((*lse.shape, D), torch.nan, device=q.device)
    assert kernel.serves(q, pages)
    kernel.attend_shared(q, pages, batch, SCALE, part, lse)
    return part, lse


def check(part, lse, q, pages, batch):
    query_len, num_kv_heads = batch.decode_query_len, pages.k_pages.shape[1]
    for x, (row, count, first_page, length) in enumerate(batch.plan.dense.shared_X4.tolist()):
        q_TKGD = q[row * query_len : (row + count) * query_len].float()
        q_TKGD = q_TKGD.unflatten(1, (num_kv_heads, -1))
        # M is (request, query token, head of the KV head).
        q_KMD = q_TKGD.transpose(0, 1).flatten(1, 2)
        num_rows = q_KMD.shape[1] if count else 0
        assert part[x, :, num_rows:].isnan().all()
        assert lse[x, :, num_rows:].isnan().all()
        if count:
            used = batch.page_table_RN[row, first_page : first_page + length].long()
            k_KSD, v_KSD = (
                pages[used].float().transpose(0, 1).flatten(1, 2)
                for pages in (pages.k_pages, pages.v_pages)
            )
            logits_KMS = q_KMD @ k_KSD.transpose(1, 2) * SCALE
            wanted = logits_KMS.softmax(2) @ v_KSD
            found = part[x, :, :num_rows]
            assert (found - wanted).norm() / wanted.norm() < 5e-3
            found = lse[x, :, :num_rows] * math.log(2)
            torch.testing.assert_close(found, logits_KMS.logsumexp(2), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(64, 4), (16, 1), (8, 1), (12, 2)])
@pytest.mark.parametrize("query_len", [1, 3])
def test_units_of_any_size(cuda, hopper, dtype, heads, query_len):
    """Full and small parts of groups, one page and many, units that nobody uses."""
    units = [(0, 16, 0, 5), (0, 16, 5, 4), (16, 2, 0, 1), (18, 9, 2, 7), (27, 8, 1, 2)]
    case = make_case(cuda, units, dtype=dtype, heads=heads, query_len=query_len, unused=3)
    check(*attend(hopper, *case), *case)


@pytest.mark.parametrize("count", [16, 8])
def test_more_units_than_multiprocessors(cuda, hopper, count):
    """A program takes unit after unit; with 8 requests every other tile of rows is empty."""
    units = [(16 * (x % 3), count, 7 * (x // 3), 1 + x % 7) for x in range(60)]
    case = make_case(cuda, units, unused=70)
    check(*attend(hopper, *case), *case)


def test_a_long_unit(cuda, hopper):
    case = make_case(cuda, [(0, 16, 0, 300)], heads=(16, 1))
    check(*attend(hopper, *case), *case)


def test_queries_that_are_a_slice_of_a_wider_tensor(cuda, hopper):
    q, pages, batch = make_case(cuda, [(0, 16, 0, 3), (16, 5, 0, 2)])
    wide = torch.cat([q, torch.full_like(q, torch.nan)], 1)
    case = (wide[:, : q.shape[1]], pages, batch)
    check(*attend(hopper, *case), *case)


def test_runs_and_captured_runs_repeat_bitwise(cuda, hopper):
    q, pages, batch = make_case(cuda, [(0, 16, 4 * x, 4) for x in range(30)], unused=3)
    eager = attend(hopper, q, pages, batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [attend(hopper, q, pages, batch) for _ in range(3)]
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        for part, lse in captured:
            # NaN is where nothing was written.
            torch.testing.assert_close(part, eager[0], rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(lse, eager[1], rtol=0, atol=0, equal_nan=True)


def test_what_it_is_not_made_for(cuda, hopper):
    q, pages, _ = make_case(cuda, [(0, 2, 0, 1)])
    k_low, v_low = (part.to(torch.float8_e4m3fn) for part in (pages.k_pages, pages.v_pages))
    assert hopper.serves(q, pages)
    assert not hopper.serves(q, LayerPages(k_low, v_low, None))
    assert not hopper.serves(q.float(), pages)
    small = LayerPages(pages.k_pages[:, :, :64], pages.v_pages[:, :, :64], None)
    assert not hopper.serves(q, small)
