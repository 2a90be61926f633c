import pytest
import torch
from torch import Tensor

from inference.kernels.expert_gemm import align_kernel, reference
from inference.kernels.expert_gemm.mxfp8_gemm_kernel import grouped
from inference.kernels.expert_gemm.mxfp8_operands_kernel import ordered
from inference.kernels.mxfp8 import MXFP8Tensor, dequantize

M3 = 1.702, 7.0, 1.0
BYTES = torch.tensor([byte for byte in range(256) if byte & 0x7F != 0x7F], dtype=torch.uint8)
"""All e4m3 values but the NaNs."""


def make_weight(*shape: int, seed: int = 0, first_scale: int = 117) -> MXFP8Tensor:
    """Every byte, and scales of four sizes; a block's values reach about 2."""
    g = torch.Generator().manual_seed(seed)
    values = BYTES[torch.randint(len(BYTES), shape, generator=g)].view(torch.float8_e4m3fn)
    scales = torch.randint(
        first_scale, first_scale + 4, (*shape[:-1], shape[-1] // 32), generator=g
    )
    return MXFP8Tensor(values, scales.to(torch.uint8))


def wide(weight: MXFP8Tensor) -> Tensor:
    return dequantize(weight.values.cpu(), weight.scale.cpu(), torch.float32)


def to(weight: MXFP8Tensor, device: torch.device) -> MXFP8Tensor:
    return MXFP8Tensor(weight.values.to(device), weight.scale.to(device))


def make(
    num_tokens: int,
    topk: int,
    num_experts: int,
    hidden: int,
    width: int,
    dtype: torch.dtype,
    drop: float = 0.0,
    seed: int = 0,
) -> tuple[Tensor, MXFP8Tensor, MXFP8Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, hidden, generator=g).to(dtype)
    w13 = make_weight(num_experts, 2 * width, hidden, seed=seed)
    w2 = make_weight(num_experts, hidden, width, seed=seed + 1)
    ids = torch.rand(num_tokens, num_experts, generator=g).topk(topk).indices.int()
    ids[torch.rand(ids.shape, generator=g) < drop] = -1
    return x / hidden**0.5, w13, w2, ids, torch.rand(num_tokens, topk, generator=g)


def wanted(case, shared=None) -> Tensor:
    """By the reference on the CPU, over weights widened in FP32."""
    x, w13, w2, ids, weights = case
    pair = None if shared is None else tuple(wide(weight) for weight in shared)
    return reference.expert_gemm(x.float(), wide(w13), wide(w2), ids, weights, *M3, pair)


def found(case, device: torch.device, shared=None, num_routed: int | None = None) -> Tensor:
    x, w13, w2, ids, weights = case
    if shared is not None:
        shared = tuple(to(weight, device) for weight in shared)
    w13, w2 = to(w13, device), to(w2, device)
    ids, weights = ids.to(device), weights.to(device)
    return grouped(x.to(device), w13, w2, ids, weights, *M3, shared, num_routed).cpu()


def agree(out: Tensor, expected: Tensor, rtol: float) -> None:
    error = (out.double() - expected.double()).norm() / expected.double().norm()
    assert error < rtol, f"relative error {error}"


@pytest.mark.parametrize("num_tokens", [1, 17, 70])
@pytest.mark.parametrize(("hidden", "width"), [(32, 32), (96, 64)])
def test_equals_the_reference_over_the_wide_weights(kernel_device, num_tokens, hidden, width):
    case = make(num_tokens, 2, 4, hidden, width, torch.float32, drop=0.2)
    agree(found(case, kernel_device), wanted(case), 1e-6)


def poisoned(x: Tensor, weight: MXFP8Tensor, half: int) -> tuple[Tensor, MXFP8Tensor]:
    """Token 0 has NaN in all gates (`half` 0) or ups (1) and infinity in the others.

    As 0 · inf: values of a weight are finite.
    """
    x, values = x.clone(), weight.values.clone().view(torch.uint8)
    x[0, 0] = torch.inf
    values.unflatten(-2, (2, -1))[..., :, 0] = 0x38  # 1.0
    values.unflatten(-2, (2, -1))[..., half, :, 0] = 0
    return x, MXFP8Tensor(values.view(torch.float8_e4m3fn), weight.scale)


@pytest.mark.parametrize("half", [0, 1], ids=["gate", "up"])
def test_nan_in_a_gate_or_an_up_stays_nan(kernel_device, half):
    x, w13, *rest = make(9, 2, 4, 32, 32, torch.float32)
    x, w13 = poisoned(x, w13, half)
    out = found((x, w13, *rest), kernel_device)
    assert out.isnan().all(1).tolist() == [True] + 8 * [False]
    agree(out[1:], wanted((x, w13, *rest))[1:], 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("half", [0, 1], ids=["gate", "up"])
@pytest.mark.parametrize("num_tokens", [33, 300, 1030])
def test_nan_in_a_gate_or_an_up_stays_nan_in_bf16(cuda, num_tokens, half):
    x, w13, *rest = make(num_tokens, 4, 8, 512, 384, torch.bfloat16)
    out = found((*poisoned(x, w13, half), *rest), cuda)
    assert out.isnan().all(1).nonzero().tolist() == [[0]]
    assert not out[1:].isnan().any()


def test_the_shared_expert_may_be_mxfp8_too(kernel_device):
    case = make(19, 2, 4, 64, 32, torch.float32)
    shared = make_weight(2 * 96, 64, seed=7), make_weight(64, 96, seed=8)
    agree(found(case, kernel_device, shared), wanted(case, shared), 1e-6)


def test_experts_without_tokens_are_not_read(kernel_device):
    x, w13, w2, ids, weights = make(20, 2, 6, 32, 32, torch.float32)
    ids %= 3
    ids[:, 1] = -1
    expected = wanted((x, w13, w2, ids, weights))
    for weight in (w13, w2):
        weight.values.view(torch.uint8)[3:] = 0x7F  # NaN
    agree(found((x, w13, w2, ids, weights), kernel_device), expected, 1e-6)


def test_nobody_here_gives_zeros(kernel_device):
    x, w13, w2, ids, weights = make(5, 2, 4, 32, 32, torch.float32)
    out = found((x, w13, w2, torch.full_like(ids, -1), weights), kernel_device)
    assert torch.equal(out, torch.zeros_like(x))


def test_the_order_of_a_row_changes_no_bit(kernel_device):
    x, w13, w2, ids, weights = make(19, 4, 6, 32, 32, torch.float32)
    out = found((x, w13, w2, ids, weights), kernel_device)
    flipped = found((x, w13, w2, ids.flip(-1), weights.flip(-1)), kernel_device)
    assert torch.equal(out, flipped)


def test_a_right_operand_has_its_columns_in_the_order_of_the_left(kernel_device):
    """Bits t t j j j e h of a column's number in its 128 become j j j h t t e."""
    x = torch.arange(3 * 256, dtype=torch.float32).reshape(3, 256)
    out = ordered(x.to(kernel_device), use_pdl=False).cpu()
    for row, k in ((0, 0), (0, 1), (1, 2), (2, 4), (1, 32), (2, 128 + 127), (0, 128 + 64 + 5)):
        t, j, e, h = k % 128 // 32, k // 4 % 8, k // 2 % 2, k % 2
        assert out[row, k // 128 * 128 + 16 * j + 8 * h + 2 * t + e] == x[row, k]
    assert torch.equal(out.sort(-1).values, x)


def test_right_operands_are_sorted_as_the_plan_is(kernel_device):
    x = torch.arange(6.0)[:, None] + torch.arange(256.0) / 256
    x[2] = torch.nan
    ids = torch.tensor([[2, 0], [-1, 2], [-1, -1], [0, 1], [1, -1], [2, 0]]).int()
    x, ids = x.to(kernel_device), ids.to(kernel_device)
    plan = align_kernel.align(ids, 3, 32, use_pdl=False)
    out = ordered(x, plan, ids, use_pdl=False)[:8]
    assert torch.equal(out, ordered(x, use_pdl=False)[[0, 3, 5, 3, 4, 0, 1, 5]])


@pytest.mark.gpu
@pytest.mark.parametrize("num_experts", [4, 16])
@pytest.mark.parametrize("num_tokens", [1, 33, 129, 240, 300, 1030])
@pytest.mark.parametrize(("hidden", "width"), [(512, 384), (640, 128)])
def test_bf16_equals_the_reference(cuda, num_tokens, num_experts, hidden, width):
    """BF16 rounds the activation between the products and the result: 2^-9 each.

    Tiles of 32, 64 and 128 tokens with and without a tail, experts of several tiles, rows that do
    not fill a program's.
    """
    case = make(num_tokens, 4, num_experts, hidden, width, torch.bfloat16, drop=0.2)
    shared = make_weight(2 * 256, hidden, seed=7), make_weight(hidden, 256, seed=8)
    agree(found(case, cuda, shared), wanted(case, shared), 6e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("is_skewed", [False, True])
@pytest.mark.parametrize("num_tokens", [101, 403, 701, 1501])
def test_a_program_takes_several_tiles(cuda, num_tokens, is_skewed):
    """More tiles than multiprocessors, of all four cuts; skewed, one expert has most of them."""
    case = make(num_tokens, 4, 48, 1152, 384, torch.bfloat16, drop=0.2)
    if is_skewed:
        case[3][:, 0] = 0
    out = found(case, cuda)
    agree(out, wanted(case), 6e-3)
    assert torch.equal(out, found(case, cuda))


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [40, 300])
def test_nobody_here_leaves_the_shared_expert(cuda, num_tokens):
    x, w13, w2, ids, weights = make(num_tokens, 4, 16, 512, 256, torch.bfloat16)
    case = x, w13, w2, torch.full_like(ids, -1), weights
    assert not found(case, cuda).any()
    shared = make_weight(2 * 256, 512, seed=7), make_weight(512, 256, seed=8)
    agree(found(case, cuda, shared), wanted(case, shared), 6e-3)


@pytest.mark.gpu
def test_the_shared_expert_may_be_bf16(cuda):
    case = x, w13, w2, ids, weights = make(150, 4, 16, 512, 256, torch.bfloat16, drop=0.2)
    shared = make_weight(2 * 384, 512, seed=7), make_weight(512, 384, seed=8)
    # Few bits of a value and a power of two: BF16 holds it.
    pair = tuple(wide(weight).bfloat16().to(cuda) for weight in shared)
    ids, weights = ids.to(cuda), weights.to(cuda)
    out = grouped(x.to(cuda), to(w13, cuda), to(w2, cuda), ids, weights, *M3, pair)
    agree(out.cpu(), wanted(case, shared), 6e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("num_routed", [8, 16, 32, 256])
def test_all_tile_lengths_give_the_same(cuda, num_routed):
    """How the work is cut depends on `num_routed`, what is computed does not."""
    case = make(256, 4, 8, 512, 256, torch.bfloat16)
    assert torch.equal(found(case, cuda, num_routed=num_routed), found(case, cuda))


@pytest.mark.gpu
def test_every_value_and_scale_is_widened_exactly(cuda):
    """Every token picks a column of w13 and w2 is the identity: out is gate / 2 · up."""
    hidden, width = 128, 128
    x = torch.zeros(128, hidden, dtype=torch.bfloat16)
    x[torch.arange(128), torch.arange(128)] = 1
    weight = make_weight(1, 2 * width, hidden, first_scale=124)
    weight.scale[:, :, 0] = torch.arange(2 * width) % 135
    eye = torch.eye(hidden, width).to(torch.float8_e4m3fn)[None]
    down = MXFP8Tensor(eye, torch.full((1, hidden, width // 32), 127, dtype=torch.uint8))
    ids, shares = torch.zeros(128, 1).int(), torch.ones(128, 1)
    # alpha 0: swiglu_oai is gate / 2 · (up + 0).
    gate_up = wide(weight)[0].T
    expected = (gate_up[:, :width] * 0.5 * gate_up[:, width:]).bfloat16()
    weight, down = to(weight, cuda), to(down, cuda)
    args = x.to(cuda), weight, down, ids.to(cuda), shares.to(cuda)
    out = grouped(*args, 0.0, float("inf"), 0.0)
    # Gates below 2^-126 are no normal FP32 numbers, and the activation rounds them to zero.
    torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=1e-37)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [70, 600])
def test_a_captured_call_follows_its_inputs(cuda, num_tokens):
    """Another choice of experts gives other tiles; the graph reads them from the device."""
    x, w13, w2, ids, weights = make(num_tokens, 4, 16, 256, 128, torch.bfloat16)
    other = make(num_tokens, 4, 16, 256, 128, torch.bfloat16, drop=0.5, seed=1)[3].to(cuda)
    x, ids, weights, w13, w2 = (
        x.to(cuda),
        ids.to(cuda),
        weights.to(cuda),
        to(w13, cuda),
        to(w2, cuda),
    )
    plain = [grouped(x, w13, w2, choice, weights, *M3) for choice in (ids, other)]
    graph, buffer = torch.cuda.CUDAGraph(), ids.clone()
    with torch.cuda.graph(graph):
        out = grouped(x, w13, w2, buffer, weights, *M3)
    for choice, expected in zip((other, ids), plain[::-1], strict=True):
        buffer.copy_(choice)
        graph.replay()
        assert torch.equal(out, expected)
