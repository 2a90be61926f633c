"""The choice of the kernel, and the one for few rows an expert on Hopper."""

import pytest
import torch

from inference.kernels.expert_gemm import expert_gemm, kernel, mxfp8_kernel, reference
from inference.kernels.mxfp8 import MXFP8Tensor, dequantize, quantize

M3 = (1.702, 7.0, 1.0)
NAMES = ("alpha", "limit", "beta")
HIDDEN, WIDTH = 1024, 1536
CUTS = [(32, 4, 8, 4, 3), (32, 8, 8, 2, 2), (64, 2, 16, 3, 3), (64, 4, 8, 3, 2), (128, 1, 16, 4, 3)]


def weight(*shape, seed, device):
    g = torch.Generator().manual_seed(seed)
    wide = torch.randn(*shape, generator=g) * 2 / shape[-1] ** 0.5
    return MXFP8Tensor(*(part.to(device) for part in quantize(wide.bfloat16())))


def make(num_tokens, topk, num_experts, hidden, width, dtype, device, drop=0.0, seed=0):
    """[x, w13, w2, ids, weights]; weights of pairs without an expert are NaN."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, hidden, generator=g).to(dtype)
    ids = torch.rand(num_tokens, num_experts, generator=g).topk(topk).indices.int()
    weights = torch.rand(num_tokens, topk, generator=g)
    is_dropped = torch.rand(num_tokens, topk, generator=g) < drop
    ids[is_dropped], weights[is_dropped] = -1, torch.nan
    w13 = weight(num_experts, 2 * width, hidden, seed=seed + 1, device=device)
    w2 = weight(num_experts, hidden, width, seed=seed + 2, device=device)
    return [x.to(device), w13, w2, ids.to(device), weights.to(device)]


def make_shared(hidden, width, device):
    w13 = weight(2 * width, hidden, seed=8, device=device)
    return w13, weight(hidden, width, seed=9, device=device)


def in_bf16(weights):
    return tuple(dequantize(*w, torch.bfloat16) for w in weights)


def agree(found, wanted, rtol):
    assert found.dtype == wanted.dtype
    error = (found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30)
    assert float(error) <= rtol


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 19])
def test_equals_the_reference(kernel_device, num_tokens):
    args = make(num_tokens, 2, 4, 64, 32, torch.float32, kernel_device, drop=0.3)
    shared = make_shared(64, 32, kernel_device)
    found = mxfp8_kernel.expert_gemm(*args, *M3, shared)
    agree(found, reference.expert_gemm(*args, *M3, shared), 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [None, "mxfp8", "bf16"])
@pytest.mark.parametrize("num_tokens", [1, 2, 8, 17, 33, 70, 200])
def test_few_rows_equal_the_reference(cuda, num_tokens, shared):
    """BF16 rounds the activation between the products and the result: 2^-9 each."""
    args = make(num_tokens, 4, 16, HIDDEN, WIDTH, torch.bfloat16, cuda, drop=0.2)
    own = None if shared is None else make_shared(HIDDEN, WIDTH, cuda)
    own = in_bf16(own) if shared == "bf16" else own
    options = dict(zip(NAMES, M3, strict=True)) | {"shared": own, "num_routed": 128}
    found = expert_gemm(*args, **options)
    agree(found, reference.expert_gemm(*args, *M3, own), 6e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("num_tokens", [1, 7, 21])
def test_every_cut_equals_the_reference(cuda, cut, num_tokens):
    args = make(num_tokens, 4, 6, 2048, 1024, torch.bfloat16, cuda, drop=0.2)
    shared = make_shared(2048, 1024, cuda)
    found = mxfp8_kernel.expert_gemm(*args, *M3, shared, config=cut)
    agree(found, reference.expert_gemm(*args, *M3, shared), 6e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("half", [0, 1], ids=["gate", "up"])
@pytest.mark.parametrize("num_tokens", [1, 20])
def test_nan_in_a_gate_or_an_up_stays_nan(cuda, num_tokens, half):
    """As 0 · inf: values of a weight are finite. The other half is infinite."""
    x, w13, *rest = make(num_tokens, 2, 4, HIDDEN, WIDTH, torch.bfloat16, cuda)
    x[0, 0] = torch.inf
    values = w13.values.view(torch.uint8)
    values[:, :, 0] = 0x38  # 1.0
    values[:, half * WIDTH : (half + 1) * WIDTH, 0] = 0
    found = mxfp8_kernel.expert_gemm(x, w13, *rest, *M3)
    assert found.isnan().all(1).nonzero().tolist() == [[0]]
    assert not found[1:].isnan().any()


@pytest.mark.gpu
def test_widening_is_exact(cuda):
    """One-hot tokens read columns of the weight: e4m3 numbers under scales from end to end."""
    g = torch.Generator().manual_seed(0)
    size = 1024
    values = torch.randint(0, 256, (size, size), dtype=torch.uint8, generator=g)
    values[values & 0x7F == 0x7F] = 0  # NaN
    # The least product is 2^-120, which FP32 sums exactly.
    scale = torch.randint(16, 135, (1, size, size // 32), generator=g)
    w2 = MXFP8Tensor(
        values[None].view(torch.float8_e4m3fn).to(cuda), scale.to(torch.uint8).to(cuda)
    )
    columns = torch.arange(0, size, size // 8, device=cuda) + 5
    # Gates and ups of a token are those of one column: h is e there, 0 elsewhere.
    w13 = torch.zeros(1, 2 * size, size)
    w13[0, torch.arange(size), torch.arange(size)] = 1.0
    w13 = MXFP8Tensor(*(part.to(cuda) for part in quantize(w13.bfloat16())))
    x = torch.zeros(8, size, dtype=torch.bfloat16, device=cuda)
    x[torch.arange(8), columns] = 4.0
    ids = torch.zeros(8, 1, dtype=torch.int32, device=cuda)
    ones = torch.ones(8, 1, device=cuda)
    alpha, limit, beta = 128.0, 1.0, 1.0  # swiglu_oai(4, 0) = 1 · sigmoid(128) · 1 = 1
    found = mxfp8_kernel.expert_gemm(
        x, w13, w2, ids, ones, alpha, limit, beta, config=(32, 4, 8, 4, 3)
    )
    wanted = dequantize(*w2, torch.float32)[0, :, columns].T.to(torch.bfloat16)
    assert torch.equal(found, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [8, 9])
def test_a_token_may_name_an_expert_twice(cuda, num_tokens):
    """As rows of NaN make the router do: more rows of an expert than a tile has."""
    x, w13, w2, ids, weights = make(num_tokens, 4, 5, HIDDEN, WIDTH, torch.bfloat16, cuda)
    ids[:] = 2
    found = mxfp8_kernel.expert_gemm(x, w13, w2, ids, weights, *M3, None, 128)
    agree(found, reference.expert_gemm(x, w13, w2, ids, weights, *M3), 6e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 20])
def test_experts_without_tokens_are_not_read(cuda, num_tokens):
    x, w13, w2, ids, weights = make(num_tokens, 2, 6, HIDDEN, WIDTH, torch.bfloat16, cuda)
    ids %= 3
    ids[:, 1] = -1
    wanted = reference.expert_gemm(x, w13, w2, ids, weights, *M3)
    for part in (w13, w2):
        part.values[3:] = torch.nan
    found = mxfp8_kernel.expert_gemm(x, w13, w2, ids, weights, *M3, None, 128)
    agree(found, wanted, 6e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_nobody_here_gives_zeros(cuda, num_tokens):
    x, w13, w2, ids, weights = make(num_tokens, 2, 4, HIDDEN, WIDTH, torch.bfloat16, cuda)
    found = mxfp8_kernel.expert_gemm(x, w13, w2, torch.full_like(ids, -1), weights, *M3, None, 128)
    assert torch.equal(found, torch.zeros_like(x))


@pytest.mark.gpu
def test_the_order_of_a_row_changes_no_bit(cuda):
    x, w13, w2, ids, weights = make(19, 4, 6, HIDDEN, WIDTH, torch.bfloat16, cuda)
    found = mxfp8_kernel.expert_gemm(x, w13, w2, ids, weights, *M3, None, 128)
    flipped = ids.flip(-1), weights.flip(-1)
    assert torch.equal(found, mxfp8_kernel.expert_gemm(x, w13, w2, *flipped, *M3, None, 128))


@pytest.mark.gpu
def test_equals_bf16_experts_with_the_widened_weights(cuda):
    """The same numbers in another order of summing; the activation is rounded in both."""
    x, w13, w2, ids, weights = make(8, 4, 6, HIDDEN, WIDTH, torch.bfloat16, cuda)
    wide = in_bf16((w13, w2))
    found = mxfp8_kernel.expert_gemm(x, w13, w2, ids, weights, *M3, None, 128)
    agree(found, kernel.expert_gemm(x, *wide, ids, weights, *M3), 2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 32, 40])
def test_a_captured_call_follows_its_inputs(cuda, num_tokens):
    """Another choice of experts gives other tiles; the graph reads them from the device."""
    size = (num_tokens, 4, 16, HIDDEN, WIDTH, torch.bfloat16, cuda)
    first, second = make(*size), make(*size, drop=0.5, seed=1)
    shared = make_shared(HIDDEN, WIDTH, cuda)
    x, w13, w2, ids, weights = first
    x, ids, weights = x.clone(), ids.clone(), weights.clone()
    mxfp8_kernel.expert_gemm(x, w13, w2, ids, weights, *M3, shared, 128)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = mxfp8_kernel.expert_gemm(x, w13, w2, ids, weights, *M3, shared, 128)
    for new_x, _, _, new_ids, new_weights in (second, first):
        for buffer, value in ((x, new_x), (ids, new_ids), (weights, new_weights)):
            buffer.copy_(value)
        graph.replay()
        args = new_x, w13, w2, new_ids, new_weights
        assert torch.equal(found, mxfp8_kernel.expert_gemm(*args, *M3, shared, 128))
