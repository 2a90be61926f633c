import pytest
import torch

from inference.kernels.expert_gemm import expert_gemm
from inference.kernels.mxfp8 import dequantize, quantize
from inference.kernels.mxfp8 import reference as mxfp8_reference

M3 = {"alpha": 1.702, "limit": 7.0}
NUM_EXPERTS, HIDDEN, WIDTH = 5, 12, 6


def weights_of(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    w13 = torch.randn(NUM_EXPERTS, 2 * WIDTH, HIDDEN).to(dtype)
    return w13, torch.randn(NUM_EXPERTS, HIDDEN, WIDTH).to(dtype)


def oracle(x, w13, w2, ids, weights) -> torch.Tensor:
    """Token by token, expert by expert, in FP64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, (row, shares) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
        for expert, share in zip(row, shares, strict=True):
            gate = (w13[expert, :WIDTH].double() @ x[token].double()).clamp(max=7)
            up = (w13[expert, WIDTH:].double() @ x[token].double()).clamp(-7, 7)
            hidden = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            out[token] += share * (w2[expert].double() @ hidden)
    return out


def distinct_ids(num_tokens: int, topk: int, experts: int = NUM_EXPERTS) -> torch.Tensor:
    return torch.stack([torch.randperm(experts)[:topk] for _ in range(num_tokens)]).int()


@pytest.mark.parametrize("num_tokens", [1, 63, 129])
@pytest.mark.parametrize("topk", [1, 3])
def test_equals_the_formula_token_by_token(num_tokens, topk):
    x, (w13, w2) = torch.randn(num_tokens, HIDDEN), weights_of()
    ids, weights = distinct_ids(num_tokens, topk), torch.rand(num_tokens, topk)
    out = expert_gemm(x, w13, w2, ids, weights, **M3)
    expected = oracle(x, w13, w2, ids, weights)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("ids", [[[4]], [[0], [0], [0]], [[3], [1], [3]]])
def test_experts_without_tokens_take_no_part(ids):
    ids = torch.tensor(ids).int()
    x, (w13, w2) = torch.randn(len(ids), HIDDEN), weights_of()
    is_idle = ~torch.isin(torch.arange(NUM_EXPERTS), ids)
    w13[is_idle], w2[is_idle] = torch.nan, torch.nan
    out = expert_gemm(x, w13, w2, ids, torch.ones(len(ids), 1), **M3)
    expected = oracle(x, w13, w2, ids, torch.ones(len(ids), 1))
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)


# BR-065
@pytest.mark.parametrize(
    ("gate", "up", "expected"),
    [(1.0, 0.5, 1.26869), (10.0, -10.0, -41.99972), (-3.0, 2.0, -0.05421)],
)
def test_the_activation_is_m3s_and_not_silu(gate, up, expected):
    out = expert_gemm(
        torch.tensor([[gate, up]]),
        torch.eye(2)[None],
        torch.ones(1, 2, 1),
        torch.zeros(1, 1).int(),
        torch.ones(1, 1),
        **M3,
    )
    torch.testing.assert_close(out, torch.full((1, 2), expected), rtol=2e-5, atol=5e-6)


def test_the_order_of_a_row_changes_no_bit():
    """Experts are summed by id, so an engine's and a trainer's order of the same set agree."""
    x, (w13, w2) = torch.randn(33, HIDDEN), weights_of()
    ids, weights = distinct_ids(33, 4), torch.rand(33, 4)
    out = expert_gemm(x, w13, w2, ids, weights, **M3)
    flipped = expert_gemm(x, w13, w2, ids.flip(-1), weights.flip(-1), **M3)
    assert torch.equal(out, flipped)


def test_minus_one_adds_nothing():
    x, (w13, w2) = torch.randn(9, HIDDEN), weights_of()
    ids, weights = distinct_ids(9, 2), torch.rand(9, 2)
    padded_ids = torch.cat([torch.full((9, 1), -1).int(), ids], -1)
    padded_weights = torch.cat([torch.full((9, 1), torch.nan), weights], -1)
    out = expert_gemm(x, w13, w2, padded_ids, padded_weights, **M3)
    assert torch.equal(out, expert_gemm(x, w13, w2, ids, weights, **M3))
    nobody = expert_gemm(x, w13, w2, torch.full((9, 2), -1).int(), weights, **M3)
    assert torch.equal(nobody, torch.zeros(9, HIDDEN))


def test_two_ranks_of_experts_add_up_to_one():
    x, (w13, w2) = torch.randn(33, HIDDEN), weights_of()
    ids, weights = distinct_ids(33, 3), torch.rand(33, 3)
    whole = expert_gemm(x, w13, w2, ids, weights, **M3)
    low = torch.where(ids < 2, ids, -1)
    high = torch.where(ids >= 2, ids - 2, -1)
    parts = expert_gemm(x, w13[:2], w2[:2], low, weights, **M3) + expert_gemm(
        x, w13[2:], w2[2:], high, weights, **M3
    )
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)


def test_bf16_is_rounded_once():
    x, (w13, w2) = torch.randn(63, HIDDEN).bfloat16(), weights_of(torch.bfloat16)
    ids, weights = distinct_ids(63, 3), torch.rand(63, 3)
    exact = expert_gemm(x.float(), w13.float(), w2.float(), ids, weights, **M3)
    assert torch.equal(expert_gemm(x, w13, w2, ids, weights, **M3), exact.bfloat16())


def test_gradients_equal_those_of_the_formula():
    x, (w13, w2) = torch.randn(17, HIDDEN), weights_of()
    ids, weights = distinct_ids(17, 2), torch.rand(17, 2)
    leaves = [t.requires_grad_() for t in (x, w13, w2, weights)]
    dy = torch.randn(17, HIDDEN)
    found = torch.autograd.grad(expert_gemm(x, w13, w2, ids, weights, **M3), leaves, dy)
    one_hot = torch.nn.functional.one_hot(ids.long(), NUM_EXPERTS).float()
    share_TE = (one_hot * weights[..., None]).sum(1)
    gate, up = torch.einsum("tc,eic->tei", x, w13).chunk(2, -1)
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    hidden = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    dense = torch.einsum("te,tei,eci->tc", share_TE, hidden, w2)
    for got, wanted in zip(found, torch.autograd.grad(dense, leaves, dy), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_no_tokens_cost_nothing():
    w13, w2 = weights_of()
    empty = torch.zeros(0, 2)
    out = expert_gemm(torch.zeros(0, HIDDEN), w13, w2, empty.int(), empty, **M3)
    assert out.shape == (0, HIDDEN)


def test_an_unknown_expert_is_refused():
    w13, w2 = weights_of()
    ids = torch.tensor([[0, 5]]).int()
    with pytest.raises(ValueError, match=r"ids_TA holds 0\.\.5, needs -1\.\.4"):
        expert_gemm(torch.zeros(1, HIDDEN), w13, w2, ids, torch.ones(1, 2), **M3)


def mxfp8_weights():
    """(w13, w2, shared pair) in MXFP8; 3 experts of width 32 on 64 hidden dims."""
    shapes = ((3, 64, 64), (3, 64, 32), (128, 64), (64, 64))
    w13, w2, up, down = (quantize(torch.randn(shape).bfloat16()) for shape in shapes)
    return w13, w2, (up, down)


@pytest.mark.parametrize("shared_is_mxfp8", [True, False])
def test_mxfp8_experts_are_their_dequantised_selves(shared_is_mxfp8):
    w13, w2, shared = mxfp8_weights()
    plain = [dequantize(*weight, torch.float32) for weight in (w13, w2, *shared)]
    x, ids = torch.randn(7, 64), distinct_ids(7, 2, experts=3)
    weights = torch.rand(7, 2)
    given = shared if shared_is_mxfp8 else (plain[2], plain[3])
    found = expert_gemm(x, w13, w2, ids, weights, shared=given, **M3)
    expected = expert_gemm(x, *plain[:2], ids, weights, shared=(plain[2], plain[3]), **M3)
    assert torch.equal(found, expected)


def test_experts_are_widened_one_at_a_time_and_idle_ones_not_at_all(monkeypatch):
    w13, w2, _ = mxfp8_weights()
    sizes, dequantize = [], mxfp8_reference.dequantize

    def recorded(values, scale, dtype):
        sizes.append(tuple(values.shape))
        return dequantize(values, scale, dtype)

    monkeypatch.setattr(mxfp8_reference, "dequantize", recorded)
    ids = torch.tensor([[0, 2], [2, -1]]).int()
    expert_gemm(torch.randn(2, 64), w13, w2, ids, torch.rand(2, 2), **M3)
    assert sizes == [(64, 64), (64, 32)] * 2


def test_formats_that_no_kernel_mixes_are_refused():
    w13, w2, shared = mxfp8_weights()
    plain = [dequantize(*weight, torch.float32) for weight in (w13, w2, *shared)]
    x, ids, weights = torch.randn(1, 64), torch.zeros(1, 1).int(), torch.ones(1, 1)
    for pair, more in (
        ((w13, plain[1]), None),
        ((w13, w2), (shared[0], plain[3])),
        (plain[:2], shared),
    ):
        with pytest.raises(TypeError, match="w13 and w2 have one format"):
            expert_gemm(x, *pair, ids, weights, shared=more, **M3)
