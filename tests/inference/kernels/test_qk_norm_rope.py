import pytest
import torch
from torch import Tensor

from inference.kernels.qk_norm_rope import qk_norm_rope


def cos_sin(positions: Tensor, rotary_dim: int, theta: float = 100.0) -> Tensor:
    """The table's rows, in FP64."""
    inverse = theta ** (-torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    angles = positions.double()[:, None] * inverse
    return torch.cat([angles.cos(), angles.sin()], -1)


def by_hand(x_THD: Tensor, weight_D: Tensor, positions: Tensor, rotary_dim: int) -> Tensor:
    """Pairs as complex numbers, turned by exp(i · angle)."""
    x, half = x_THD.double(), rotary_dim // 2
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + weight_D.double())
    cos, sin = cos_sin(positions, rotary_dim)[:, None].split(half, -1)
    pairs = torch.complex(normed[..., :half], normed[..., half:rotary_dim])
    turned = pairs * torch.complex(cos, sin)
    return torch.cat([turned.real, turned.imag, normed[..., rotary_dim:]], -1)


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(8, 4), (8, 8), (12, 6)])
def test_heads_are_normed_and_then_turned_by_their_position(head_dim, rotary_dim):
    positions = torch.tensor([0, 1, 2, 0, 1, 7])
    x, weight = torch.randn(6, 3, head_dim), torch.randn(head_dim)
    found = qk_norm_rope(x, weight, cos_sin(positions, rotary_dim).float(), eps=1e-6)
    expected = by_hand(x, weight, positions, rotary_dim).float()
    torch.testing.assert_close(found, expected)


def test_bf16_is_rounded_once():
    x, weight = torch.randn(33, 2, 8).bfloat16(), torch.randn(8).bfloat16()
    table = cos_sin(torch.arange(33), 4).float()
    expected = qk_norm_rope(x.float(), weight.float(), table, eps=1e-6).bfloat16()
    assert torch.equal(qk_norm_rope(x, weight, table, eps=1e-6), expected)


def test_gradients_in_fp64_are_those_of_differences():
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in [(3, 2, 6), (6,)]]
    table = cos_sin(torch.tensor([0, 5, 2]), 4).float()
    assert torch.autograd.gradcheck(lambda x, w: qk_norm_rope(x, w, table, eps=0.1), leaves)


def test_the_numbers_are_those_of_transformers():
    m3 = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")
    norm = m3.MiniMaxM3VLRMSNorm(16)
    norm.weight.data.normal_()
    x, table = torch.randn(5, 3, 16, requires_grad=True), cos_sin(torch.arange(5) * 3, 8).float()
    cos, sin = (half.repeat(1, 2)[None] for half in table.split(4, -1))
    heads = norm(x)[None].transpose(1, 2)
    expected = m3.apply_rotary_pos_emb(heads, heads, cos, sin)[0].transpose(1, 2)[0]
    found = qk_norm_rope(x, norm.weight, table, eps=norm.eps)
    torch.testing.assert_close(found, expected)
    seed, leaves = torch.randn_like(x), [x, norm.weight]
    gradients = [torch.autograd.grad(out, leaves, seed) for out in (found, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_D": torch.zeros(4)}, r"weight_D has shape \(4,\), needs \(8,\)"),
        ({"cos_sin_TX": torch.zeros(3, 4)}, r"cos_sin_TX has shape \(3, 4\), needs \(2, 4\)"),
        ({"cos_sin_TX": torch.zeros(2, 3)}, "X=3 must be even, above 0 and at most D=8"),
        ({"cos_sin_TX": torch.zeros(2, 0)}, "X=0 must be even, above 0 and at most D=8"),
        ({"cos_sin_TX": torch.zeros(2, 10)}, "X=10 must be even, above 0 and at most D=8"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    args = {"x_THD": torch.zeros(2, 1, 8), "weight_D": torch.zeros(8)}
    args |= {"cos_sin_TX": torch.zeros(2, 4)} | change
    with pytest.raises(ValueError, match=message):
        qk_norm_rope(**args, eps=1e-6)


def test_a_table_that_is_not_fp32_is_refused():
    with pytest.raises(TypeError, match="cos_sin_TX is bfloat16, needs float32"):
        qk_norm_rope(torch.zeros(1, 1, 8), torch.zeros(8), torch.zeros(1, 4).bfloat16(), eps=0.0)
