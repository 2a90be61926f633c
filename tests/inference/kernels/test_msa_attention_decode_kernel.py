"""The decode kernel of `msa_attention` against the reference, by interpreter or on a GPU."""

import pytest
import torch

from inference.kernels.msa_attention import decode_kernel, msa_attention, reference
from inference.kernels.msa_attention.decode_kernel import Launch, msa_attention_decode
from inference.kernels.paging import LayerPages


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


def run(case, q, blocks, device, *, query_len=1, launch=None, fp8=False):
    """(kernel, reference) for a case whose tokens are all decodes."""
    case.batch.num_decodes = len(case.query_lens)
    case.batch.decode_query_len = query_len
    if fp8:
        case.pages = LayerPages(
            case.pages.k_pages.to(torch.float8_e4m3fn),
            case.pages.v_pages.to(torch.float8_e4m3fn),
            None,
        )
    expected = reference.msa_attention(q, case.pages, blocks, case.batch, 0.3)
    there = case.to(device)
    q, blocks = q.to(device), blocks.to(device)
    out = torch.empty_like(q)
    msa_attention_decode(q, there.pages, blocks, there.batch, 0.3, out, launch)
    return out.cpu(), expected


def check(found, wanted, dtype=torch.float32):
    # Products and sums of FP32, or one rounding of the output and of the weights.
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(found.float(), wanted.float(), rtol=tolerance, atol=tolerance)


LAUNCHES = [
    Launch(1, 16, 4, 2),
    Launch(4, 16, 4, 3),
    Launch(3, 16, 4, 2),
    Launch(4, 32, 4, 2),
]


@pytest.mark.parametrize("launch", [None, *LAUNCHES], ids=str)
def test_equals_the_reference_however_the_work_is_cut(paged, kernel_device, launch):
    """Histories shorter than the choice, a padding row, page ends, 3 heads a KV head."""
    case = paged([1, 1, 1, 1], [1, 40, 0, 129], page_size=16)
    q, blocks = case.randn(4, 6, 8), random_blocks(case, 3)
    found, expected = run(case, q, blocks, kernel_device, launch=launch)
    check(found, expected)
    assert (found[2] == 0).all()


@pytest.mark.parametrize(
    ("page_size", "head_dim", "heads", "topk"), [(4, 16, 2, 5), (32, 32, 8, 2)]
)
def test_pages_smaller_and_larger_than_a_tile(
    paged, kernel_device, page_size, head_dim, heads, topk
):
    case = paged([1, 1], [41, 100], page_size, head_dim=head_dim)
    q, blocks = case.randn(2, heads, head_dim), random_blocks(case, topk)
    for launch in (None, Launch(2, 16, 4, 2)):
        check(*run(case, q, blocks, kernel_device, launch=launch))


@pytest.mark.parametrize("query_len", [2, 5])
def test_each_query_token_has_its_own_choice_and_limit(paged, kernel_device, query_len):
    case = paged([query_len] * 3, [query_len, 33, 64], page_size=8)
    q, blocks = case.randn(3 * query_len, 4, 8), random_blocks(case, 3)
    check(*run(case, q, blocks, kernel_device, query_len=query_len))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(paged, kernel_device, dtype):
    if dtype == torch.bfloat16 and kernel_device.type == "cpu":
        pytest.skip("the interpreter's bf16 products are garbage")
    case = paged([1, 1], [40, 100], page_size=16, head_dim=16, dtype=dtype)
    q, blocks = case.randn(2, 4, 16), random_blocks(case, 4)
    for launch in LAUNCHES:
        check(*run(case, q, blocks, kernel_device, launch=launch), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_fp8_pages(paged, kernel_device, dtype):
    case = paged([1, 1], [40, 100], page_size=16, head_dim=32, dtype=dtype)
    q, blocks = case.randn(2, 4, 32), random_blocks(case, 4)
    for launch in LAUNCHES:
        check(*run(case, q, blocks, kernel_device, launch=launch, fp8=True), dtype)
        case.pages = LayerPages(case.pages.k_pages.to(dtype), case.pages.v_pages.to(dtype), None)


def test_a_hole_in_the_choice_and_an_empty_choice(paged, kernel_device):
    case = paged([1, 1], [40, 40], page_size=8)
    blocks = torch.tensor([[[0, -1, 3], [-1, -1, 4]], [[-1, -1, -1]] * 2]).int()
    found, expected = run(case, case.randn(2, 4, 8), blocks, kernel_device)
    check(found, expected)
    assert (found[1] == 0).all()


def test_prefill_tokens_behind_the_decodes_are_left_alone(paged, kernel_device):
    case = paged([1, 1, 5], [9, 17, 5], page_size=8)
    there = case.to(kernel_device)
    q, blocks = case.randn(7, 4, 8).to(kernel_device), random_blocks(case, 2).to(kernel_device)
    out = torch.full_like(q, 7.0)
    msa_attention_decode(q, there.pages, blocks, there.batch, 0.3, out)
    assert (out[2:] == 7.0).all()
    expected = reference.msa_attention(q, there.pages, blocks, there.batch, 0.3)
    check(out[:2].cpu(), expected[:2].cpu())


def test_rows_of_a_larger_tensor_can_be_queries(paged, kernel_device):
    case = paged([1, 1], [9, 17], page_size=8)
    blocks = random_blocks(case, 2)
    qkv = case.randn(2, 12, 8)
    check(*run(case, qkv[:, 2:6], blocks, kernel_device))


def real_case(device, dtype, num_heads, num_kv_heads, num_tokens=6, query_len=1):
    """M3's sizes over a small pool; unwritten places of the last pages are NaN."""
    from inference.kernels.paging import PagedBatch

    generator = torch.Generator(device=device).manual_seed(1)
    num_rows, width = num_tokens // query_len, 20
    seq_len_R = torch.tensor([1, 700, 2048, 2500, 0, 2431][:num_rows], dtype=torch.int32)
    shape = (num_rows * width, num_kv_heads, 128, 128)
    k, v = (torch.randn(shape, generator=generator, device=device).to(dtype) for _ in "kv")
    table = torch.randperm(num_rows * width, generator=generator, device=device)
    table = table.view(num_rows, width).int()
    positions = (seq_len_R.long()[:, None] - query_len + torch.arange(query_len)).clamp(min=0)
    for row, length in enumerate(seq_len_R.tolist()):
        table[row, -(-length // 128) :] = -1
        if length % 128:
            page = int(table[row, length // 128])
            k[page, :, length % 128 :] = torch.nan
            v[page, :, length % 128 :] = torch.nan
    batch = PagedBatch(
        positions_T=positions.flatten().to(device),
        slots_T=torch.full((num_tokens,), -1, device=device),
        query_start_R1=(torch.arange(num_rows + 1) * query_len).int().to(device),
        seq_len_R=seq_len_R.to(device),
        page_table_RN=table,
        page_size=128,
        num_decodes=num_rows,
        max_query_len=query_len,
        max_seq_len=2500,
        decode_query_len=query_len,
    )
    blocks = torch.full((num_tokens, num_kv_heads, 16), -1, dtype=torch.int32, device=device)
    for token in range(num_tokens):
        if not seq_len_R[token // query_len]:
            continue
        own = int(positions.flatten()[token]) // 128
        for head in range(num_kv_heads):
            order = torch.randperm(own, generator=generator, device=device)[:15]
            chosen = torch.cat([order, torch.tensor([own], device=device)]).sort().values
            blocks[token, head, : len(chosen)] = chosen.int()
    q = torch.randn(num_tokens, num_heads, 128, generator=generator, device=device)
    return q.to(torch.bfloat16), LayerPages(k, v, None), blocks, batch


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32])
@pytest.mark.parametrize("heads", [(64, 4), (16, 1), (8, 1)])
@pytest.mark.parametrize("query_len", [1, 2])
def test_real_sizes(cuda, dtype, heads, query_len):
    q, pages, blocks, batch = real_case(cuda, dtype, *heads, 12 // (3 - query_len), query_len)
    if dtype == torch.float32:
        q = q.float()
    wide = LayerPages(pages.k_pages.float(), pages.v_pages.float(), None)
    expected = reference.msa_attention(q.float(), wide, blocks, batch, 128**-0.5)
    found = msa_attention(q, pages, blocks, batch, scale=128**-0.5)
    error = (found.float() - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype == torch.float32 else 5e-3)


@pytest.mark.gpu
def test_a_captured_call_gives_the_same(cuda):
    q, pages, blocks, batch = real_case(cuda, torch.bfloat16, 64, 4)
    eager = msa_attention(q, pages, blocks, batch, scale=0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [msa_attention(q, pages, blocks, batch, scale=0.1) for _ in range(3)]
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, eager) for out in outs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_launch_fills_the_gpu_and_never_has_more_programs_than_tiles(dtype):
    pages = torch.empty(1, 4, 128, 128).to(dtype)
    q = torch.empty(1, 64, 128, dtype=torch.bfloat16)
    for num_tokens, split in ((1, 16), (2, 16), (3, 8), (8, 4), (32, 1), (64, 1), (256, 1)):
        launch = decode_kernel.choose_launch(num_tokens * 4, 16, pages, q)
        assert launch.split == split
        assert launch.split <= 16 * 128 // launch.tile
