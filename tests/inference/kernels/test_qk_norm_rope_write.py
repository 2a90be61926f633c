import math

import pytest
import torch

from inference.kernels.paging import LayerPages, PagedBatch
from inference.kernels.qk_norm_rope_write import QKNorms, qk_norm_rope_write

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, INDEX_DIM, PAGE_SIZE = 4, 2, 8, 8, 4
SIZES = {"num_heads": NUM_HEADS, "num_kv_heads": NUM_KV_HEADS, "head_dim": HEAD_DIM, "eps": 1e-6}
WIDTHS = [NUM_HEADS * 8, NUM_KV_HEADS * 8, NUM_KV_HEADS * 8, NUM_KV_HEADS * 8, 8]


def table(rotary_dim: int, theta: float = 100.0, num_positions: int = 32) -> torch.Tensor:
    inverse = theta ** (-torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    angles = torch.arange(num_positions).double()[:, None] * inverse
    return torch.cat([angles.cos(), angles.sin()], -1).float()


def zero_norms(index: bool = True) -> QKNorms:
    zeros = torch.zeros(8)
    return QKNorms(zeros, zeros, zeros, zeros) if index else QKNorms(zeros, zeros)


def memory(num_pages: int = 3, index: bool = True) -> LayerPages:
    kv = (num_pages, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM)
    pages = torch.full((num_pages, PAGE_SIZE, INDEX_DIM), torch.nan) if index else None
    return LayerPages(torch.full(kv, torch.nan), torch.full(kv, torch.nan), pages)


def step(positions: list[int], slots: list[int]) -> PagedBatch:
    return PagedBatch(
        positions_T=torch.tensor(positions, dtype=torch.int64),
        slots_T=torch.tensor(slots, dtype=torch.int64),
        query_start_R1=torch.tensor([0, len(positions)]).int(),
        seq_len_R=torch.tensor([max(positions, default=-1) + 1]).int(),
        page_table_RN=torch.tensor([[2, 0, 1]]).int(),
        page_size=PAGE_SIZE,
        num_decodes=0,
        max_query_len=len(positions),
        max_seq_len=max(positions, default=-1) + 1,
    )


# BR-067
def test_half_of_each_head_is_rotated_in_pairs_of_halves():
    """head_dim 8, rotary_dim 4, position 5: pairs (0, 2) and (1, 3); dims 4..7 stay."""
    qkv = torch.randn(1, sum(WIDTHS))
    cos_sin = table(4)
    q_at_0, index_q_at_0 = qk_norm_rope_write(
        qkv, zero_norms(), cos_sin, step([0], [0]), memory(), **SIZES
    )
    pages = memory()
    q_at_5, index_q_at_5 = qk_norm_rope_write(
        qkv, zero_norms(), cos_sin, step([5], [5]), pages, **SIZES
    )
    head = qkv[0, :8].double()
    normed = head / (head.square().mean() + 1e-6).sqrt()
    a, b = 5.0, 5.0 / math.sqrt(100.0)  # 100^(-0/4) and 100^(-2/4)
    rotated = [
        normed[0] * math.cos(a) - normed[2] * math.sin(a),
        normed[1] * math.cos(b) - normed[3] * math.sin(b),
        normed[2] * math.cos(a) + normed[0] * math.sin(a),
        normed[3] * math.cos(b) + normed[1] * math.sin(b),
    ]
    expected = torch.stack([*rotated, *normed[4:]]).float()
    torch.testing.assert_close(q_at_5[0, 0], expected)
    for at_5, at_0 in ((q_at_5, q_at_0), (index_q_at_5, index_q_at_0)):
        assert torch.equal(at_5[..., 4:], at_0[..., 4:])
        assert (at_5[..., :4] != at_0[..., :4]).all()


def test_rows_are_q_k_v_index_q_index_k():
    qkv = torch.randn(1, sum(WIDTHS))
    pages = memory()
    cos_sin = table(4)
    q, index_q = qk_norm_rope_write(qkv, zero_norms(), cos_sin, step([0], [6]), pages, **SIZES)
    parts = [part.view(-1, 8) for part in qkv[0].split(WIDTHS)]
    normed = [p * (p.square().mean(-1, keepdim=True) + 1e-6).rsqrt() for p in parts]
    torch.testing.assert_close(q[0], normed[0])
    torch.testing.assert_close(pages.k_pages[1, :, 2], normed[1])
    assert torch.equal(pages.v_pages[1, :, 2], parts[2])  # neither normed nor rotated
    torch.testing.assert_close(index_q[0], normed[3])
    torch.testing.assert_close(pages.index_pages[1, 2], normed[4][0])


def test_each_kind_of_head_has_its_own_norm():
    qkv = torch.ones(1, sum(WIDTHS))
    norms = QKNorms(*(torch.full((8,), w) for w in (0.0, 1.0, 2.0, 3.0)))
    pages = memory()
    q, index_q = qk_norm_rope_write(qkv, norms, table(4), step([0], [0]), pages, **SIZES)
    for found, gain in (
        (q, 1.0),
        (pages.k_pages[0, :, 0], 2.0),
        (pages.v_pages[0, :, 0], 1.0),
        (index_q, 3.0),
        (pages.index_pages[0, 0], 4.0),
    ):
        torch.testing.assert_close(found, torch.full_like(found, gain))


def test_the_norm_comes_before_the_rotation():
    """A weight that differs inside a pair does not commute with the rotation."""
    qkv = torch.ones(1, sum(WIDTHS))
    weight = torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 0])
    norms = QKNorms(weight, weight, weight, weight)
    q, _ = qk_norm_rope_write(qkv, norms, table(4), step([5], [0]), memory(), **SIZES)
    torch.testing.assert_close(q[0, 0, 0], torch.tensor(2 * math.cos(5.0) - math.sin(5.0)))
    torch.testing.assert_close(q[0, 0, 2], torch.tensor(math.cos(5.0) + 2 * math.sin(5.0)))


def test_only_the_given_slots_are_written():
    qkv = torch.randn(4, sum(WIDTHS))
    pages = memory()
    qk_norm_rope_write(
        qkv, zero_norms(), table(4), step([3, 4, 0, 5], [11, -1, 0, -1]), pages, **SIZES
    )
    is_written = torch.zeros(3, PAGE_SIZE, dtype=torch.bool)
    is_written[2, 3] = is_written[0, 0] = True
    assert torch.equal(~pages.k_pages.isnan().any(-1), is_written[:, None].expand(3, 2, 4))
    assert torch.equal(~pages.v_pages.isnan().any(-1), is_written[:, None].expand(3, 2, 4))
    assert torch.equal(~pages.index_pages.isnan().any(-1), is_written)


def test_a_full_attention_layer_has_no_index_part():
    qkv = torch.randn(3, sum(WIDTHS[:3]))
    pages = memory(index=False)
    q, index_q = qk_norm_rope_write(
        qkv, zero_norms(index=False), table(4), step([0, 1, 2], [0, 1, 2]), pages, **SIZES
    )
    assert index_q is None
    assert not q.isnan().any()
    with pytest.raises(ValueError, match="must be given together"):
        qk_norm_rope_write(qkv, zero_norms(), table(4), step([0, 1, 2], [0, 1, 2]), pages, **SIZES)


def test_bf16_is_rounded_once_after_the_rotation():
    qkv = torch.randn(9, sum(WIDTHS)).bfloat16()
    batch = step(list(range(9)), list(range(9)))
    exact, _ = qk_norm_rope_write(qkv.float(), zero_norms(), table(4), batch, memory(), **SIZES)
    rounded, _ = qk_norm_rope_write(qkv, zero_norms(), table(4), batch, memory(), **SIZES)
    assert torch.equal(rounded, exact.bfloat16())


def test_no_tokens_write_nothing():
    pages = memory()
    q, index_q = qk_norm_rope_write(
        torch.zeros(0, sum(WIDTHS)), zero_norms(), table(4), step([], []), pages, **SIZES
    )
    assert q.shape == (0, 4, 8)
    assert index_q.shape == (0, 2, 8)
    assert pages.k_pages.isnan().all()


@pytest.mark.parametrize(
    ("width", "rotary_dim", "message"),
    [
        (sum(WIDTHS) - 1, 4, r"qkv_TX has shape \(1, 87\), needs \(1, 88\)"),
        (sum(WIDTHS), 10, "rotary_dim=10 must be even and at most"),
    ],
)
def test_wrong_shapes_are_refused(width: int, rotary_dim: int, message: str):
    with pytest.raises(ValueError, match=message):
        qk_norm_rope_write(
            torch.zeros(1, width),
            zero_norms(),
            table(rotary_dim),
            step([0], [0]),
            memory(),
            **SIZES,
        )
