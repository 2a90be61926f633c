from dataclasses import replace

import pytest
import torch

from inference.kernels.expert_gemm import align_kernel, expert_gemm, kernel, reference
from inference.kernels.expert_gemm.kernel import Config, Few, Tiles

M3 = (1.702, 7.0, 1.0)
SMALL = Tiles(cols=32, depth=32, warps=4, stages=2, programs=1, tma=False)
VARIANTS = {
    "plain": Config(16, SMALL, SMALL),
    "swapped": Config(32, *[replace(SMALL, swap=True, group=3, programs=2)] * 2),
    "tails": Config(32, SMALL, SMALL, tail=16),
    "descriptors": Config(16, *[replace(SMALL, cols=16, tma=True, swap=True)] * 2),
}


def make(num_tokens, topk, num_experts, hidden, width, dtype, device, drop=0.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, hidden, generator=g)
    w13 = torch.randn(num_experts, 2 * width, hidden, generator=g) * 2 / hidden**0.5
    w2 = torch.randn(num_experts, hidden, width, generator=g) / width**0.5
    ids = torch.rand(num_tokens, num_experts, generator=g).topk(topk).indices.int()
    weights = torch.rand(num_tokens, topk, generator=g)
    is_dropped = torch.rand(num_tokens, topk, generator=g) < drop
    ids[is_dropped], weights[is_dropped] = -1, torch.nan
    tensors = (x.to(dtype), w13.to(dtype), w2.to(dtype), ids, weights)
    return [tensor.to(device) for tensor in tensors]


def agree(found, wanted, rtol):
    assert found.dtype == wanted.dtype
    error = (found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30)
    assert float(error) <= rtol


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("num_tokens", "topk", "num_experts", "hidden", "width", "drop"),
    [(1, 3, 5, 40, 24, 0.0), (1, 3, 5, 12, 6, 0.5), (33, 3, 5, 40, 24, 0.3), (70, 2, 3, 12, 6, 0)],
)
def test_equals_the_reference(
    kernel_device, variant, num_tokens, topk, num_experts, hidden, width, drop
):
    args = make(num_tokens, topk, num_experts, hidden, width, torch.float32, kernel_device, drop)
    found = kernel.expert_gemm(*args, *M3, config=VARIANTS[variant])
    agree(found, reference.expert_gemm(*args, *M3), 1e-6)


def make_shared(hidden, width, dtype, device):
    g = torch.Generator().manual_seed(7)
    w13 = torch.randn(2 * width, hidden, generator=g) * 2 / hidden**0.5
    w2 = torch.randn(hidden, width, generator=g) / width**0.5
    return w13.to(dtype).to(device), w2.to(dtype).to(device)


@pytest.mark.parametrize("width", [8, 12])
@pytest.mark.parametrize("num_tokens", [1, 3, 17, 33])
def test_the_shared_expert_is_added_whatever_its_width(kernel_device, num_tokens, width):
    args = make(num_tokens, 2, 4, 20, 8, torch.float32, kernel_device, drop=0.3)
    shared = make_shared(20, width, torch.float32, kernel_device)
    wanted = reference.expert_gemm(*args, *M3, shared)
    agree(kernel.expert_gemm(*args, *M3, shared), wanted, 1e-6)


@pytest.mark.parametrize(
    ("num_tokens", "topk", "hidden", "width"), [(1, 3, 40, 24), (5, 4, 12, 50), (32, 4, 40, 6)]
)
@pytest.mark.parametrize("few", [Few(rows=64, depth=32, stages=2), Few(128, 16, 2, programs=3)])
def test_few_tokens_equal_the_reference(kernel_device, few, num_tokens, topk, hidden, width):
    args = make(num_tokens, topk, 6, hidden, width, torch.float32, kernel_device, drop=0.2)
    shared = make_shared(hidden, width, torch.float32, kernel_device)
    wanted = reference.expert_gemm(*args, *M3, shared)
    agree(kernel.expert_gemm(*args, *M3, shared, few=few), wanted, 1e-6)


def test_a_token_may_name_an_expert_twice(kernel_device):
    """As rows of NaN make the router do: more rows of an expert than a tile has."""
    x, w13, w2, ids, weights = make(9, 4, 5, 20, 8, torch.float32, kernel_device)
    ids[:] = 2
    found = kernel.expert_gemm(x, w13, w2, ids, weights, *M3)
    agree(found, reference.expert_gemm(x, w13, w2, ids, weights, *M3), 1e-6)


def check_nan(args, row, **how):
    """With NaN in `row` of an expert's gates and ups, in the tokens that have it and only there."""
    x, w13, w2, ids, weights = args
    w13 = w13.clone()
    w13[2, row] = torch.nan
    found = kernel.expert_gemm(x, w13, w2, ids, weights, *M3, **how)
    is_hit = (ids == 2).any(1)
    assert is_hit.any()
    assert not is_hit.all()
    assert torch.equal(found.isnan().all(1), is_hit)
    agree(found[~is_hit], reference.expert_gemm(*args, *M3)[~is_hit], 1e-6)


@pytest.mark.parametrize("row", [1, 7 + 5], ids=["gate", "up"])
@pytest.mark.parametrize("variant", ["plain", "swapped", "tails"])
def test_nan_in_a_gate_or_an_up_stays_nan(kernel_device, variant, row):
    args = make(33, 1, 3, 12, 7, torch.float32, kernel_device)
    check_nan(args, row, config=VARIANTS[variant])


@pytest.mark.parametrize("row", [1, 7 + 5], ids=["gate", "up"])
def test_nan_stays_nan_for_few_tokens_too(kernel_device, row):
    args = make(5, 2, 5, 12, 7, torch.float32, kernel_device)
    check_nan(args, row, few=Few(rows=64, depth=32, stages=2))


def test_fp16_tokens_are_rounded_once_at_the_end(kernel_device):
    args = make(9, 2, 4, 64, 32, torch.float16, kernel_device)
    agree(kernel.expert_gemm(*args, *M3), reference.expert_gemm(*args, *M3), 1e-3)


@pytest.mark.parametrize("num_tokens", [1, 20])
def test_experts_without_tokens_are_not_read(kernel_device, num_tokens):
    x, w13, w2, ids, weights = make(num_tokens, 2, 6, 20, 8, torch.float32, kernel_device)
    ids %= 3
    ids[:, 1] = -1
    w13[3:], w2[3:] = torch.nan, torch.nan
    found = kernel.expert_gemm(x, w13, w2, ids, weights, *M3)
    agree(found, reference.expert_gemm(x, w13, w2, ids, weights, *M3), 1e-6)


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_nobody_here_gives_zeros(kernel_device, num_tokens):
    x, w13, w2, ids, weights = make(num_tokens, 2, 4, 20, 8, torch.float32, kernel_device)
    found = kernel.expert_gemm(x, w13, w2, torch.full_like(ids, -1), weights, *M3)
    assert torch.equal(found, torch.zeros_like(x))


def test_the_order_of_a_row_changes_no_bit(kernel_device):
    x, w13, w2, ids, weights = make(19, 4, 6, 20, 8, torch.float32, kernel_device)
    found = kernel.expert_gemm(x, w13, w2, ids, weights, *M3)
    assert torch.equal(found, kernel.expert_gemm(x, w13, w2, ids.flip(-1), weights.flip(-1), *M3))


def test_no_tokens(kernel_device):
    args = make(0, 2, 4, 20, 8, torch.float32, kernel_device)
    assert kernel.expert_gemm(*args, *M3).shape == (0, 20)


@pytest.mark.parametrize(
    ("num_pairs", "num_experts", "tile_rows", "tail"),
    [(2, 3, 16, 0), (300, 20, 16, 0), (300, 20, 16, 8), (700, 5, 32, 16), (2100, 5, 32, 16)],
)
def test_a_plan_lists_every_pair_once_sorted_and_in_tiles(
    kernel_device, num_pairs, num_experts, tile_rows, tail
):
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, num_experts, (num_pairs, 1), generator=g).int()
    ids[ids == 1] = -1
    plan = align_kernel.align(ids.to(kernel_device), num_experts, tile_rows, tail, use_pdl=False)
    data = plan.data.tolist()
    flat = ids.flatten()
    wanted = torch.sort(flat, stable=True).indices[int((flat < 0).sum()) :].tolist()
    assert data[plan.order_start : plan.order_start + len(wanted)] == wanted
    places = data[plan.place_start :]
    assert len(places) == num_pairs
    assert [places[pair] for pair in wanted] == list(range(len(wanted)))
    tiles = [tuple(data[4 + 4 * i : 7 + 4 * i]) for i in range(data[0])]
    assert len(tiles) <= plan.max_tiles
    rows = [(expert, row) for expert, first, end in tiles for row in range(first, end)]
    assert rows == [(int(flat[pair]), row) for row, pair in enumerate(wanted)]
    assert all(0 < end - first <= tile_rows + tail for _, first, end in tiles)
    experts = [expert for expert, _, _ in tiles]
    sizes = [(experts.count(expert), int((flat == expert).sum())) for expert in set(experts)]
    assert all(count == max(1, -(-(rows - tail) // tile_rows)) for count, rows in sizes)


def test_a_sum_finds_rows_by_their_places(kernel_device):
    ids = torch.tensor([[2, 0, 1], [-1, 1, -1], [-1, -1, -1]]).int()
    plan = align_kernel.align(ids.to(kernel_device), 3, 16, use_pdl=False)
    # Token 0's of expert 0; tokens 0's and 1's of expert 1; token 0's of expert 2; nobody's.
    y = torch.tensor([[100, 1], [-60, 2], [3, 3], [0.5, 4], *[[torch.nan] * 2] * 5])
    weights = torch.tensor([[2.0, 1, 1], [torch.nan, 10, torch.nan], [torch.nan] * 3])
    add = torch.tensor([[0, 7], [1, 1], [5, 6]]).to(y)
    y, ids, weights, add = (tensor.to(kernel_device) for tensor in (y, ids, weights, add))
    found = kernel.combine(y, ids, add, y.dtype, plan, weights, use_pdl=False)
    assert found.tolist() == [[41, 18], [31, 31], [5, 6]]


def test_long_tiles_end_in_a_tail_where_experts_have_few_rows():
    def tail(num_tokens, num_experts, num_routed=None):
        return kernel.config_for(num_tokens * 4, num_experts, torch.bfloat16, num_routed).tail

    assert tail(4096, 128) > 0
    assert tail(4096, 16) == 0
    assert tail(4096, 16, num_routed=128) > 0
    assert tail(8192, 128, num_routed=128) == tail(8192, 128)


@pytest.mark.gpu
@pytest.mark.parametrize("num_experts", [16, 128])
@pytest.mark.parametrize("num_tokens", [1, 2, 8, 17, 33, 129, 513, 1030, 2050])
def test_equals_the_reference_at_the_sizes_of_m3(cuda, num_tokens, num_experts):
    """BF16 rounds the activation between the products and the result: 2^-9 each."""
    args = make(num_tokens, 4, num_experts, 1024, 768, torch.bfloat16, cuda, drop=0.2)
    shared = make_shared(1024, 768, torch.bfloat16, cuda)
    names = ("alpha", "limit", "beta")
    found = expert_gemm(*args, **dict(zip(names, M3, strict=True)), shared=shared)
    agree(found, reference.expert_gemm(*args, *M3, shared), 6e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 32, 40])
def test_a_captured_call_follows_its_inputs(cuda, num_tokens):
    """Another choice of experts gives other tiles; the graph reads them from the device."""
    first = make(num_tokens, 4, 16, 256, 128, torch.bfloat16, cuda)
    second = make(num_tokens, 4, 16, 256, 128, torch.bfloat16, cuda, drop=0.5, seed=1)
    x, w13, w2, ids, weights = (tensor.clone() for tensor in first)
    shared = make_shared(256, 128, torch.bfloat16, cuda)
    kernel.expert_gemm(x, w13, w2, ids, weights, *M3, shared)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernel.expert_gemm(x, w13, w2, ids, weights, *M3, shared)
    for case in (second, first):
        for buffer, value in zip((x, w13, w2, ids, weights), case, strict=True):
            buffer.copy_(value)
        graph.replay()
        assert torch.equal(found, kernel.expert_gemm(*case, *M3, shared))
