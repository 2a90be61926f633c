"""The kernel against the reference, memory around the written places included."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from inference.kernels.paging import LayerPages, PagedBatch
from inference.kernels.qk_norm_rope_write import QKNorms, kernel, reference


class Shape(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    index_dim: int
    rotary_dim: int
    page_size: int


SHAPES = [
    Shape(4, 2, 8, 8, 4, 4),
    Shape(6, 3, 24, 16, 12, 8),
    Shape(3, 1, 8, 0, 8, 4),
    Shape(18, 1, 16, 32, 6, 16),
]
M3 = Shape(64, 4, 128, 128, 64, 128)


def make(shape: Shape, num_tokens: int, dtype: torch.dtype, device: torch.device):
    """Arguments of the op: scattered positions, a third of the tokens without a slot."""
    torch.manual_seed(num_tokens)
    num_pages = -(-num_tokens // shape.page_size) + 1
    order = torch.randperm(num_pages * shape.page_size)[:num_tokens]
    order[1::3] = -1
    batch = PagedBatch(
        positions_T=torch.randint(50, (num_tokens,)),
        slots_T=order,
        query_start_R1=torch.tensor([0, num_tokens]).int(),
        seq_len_R=torch.tensor([num_tokens]).int(),
        page_table_RN=torch.arange(num_pages)[None].int(),
        page_size=shape.page_size,
        num_decodes=0,
        max_query_len=num_tokens,
        max_seq_len=num_tokens,
    )
    batch = replace(
        batch, positions_T=batch.positions_T.to(device), slots_T=batch.slots_T.to(device)
    )
    angles = torch.rand(50, shape.rotary_dim // 2) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1).to(device)
    dims = (shape.head_dim, shape.head_dim, shape.index_dim, shape.index_dim)
    norms = QKNorms(
        *(torch.randn(dim).to(device, dtype) if dim else None for dim in dims)  # type: ignore
    )
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    width += (shape.num_kv_heads + 1) * shape.index_dim
    # One column more, so that rows are not dense.
    qkv = torch.randn(num_tokens, width + 8).to(device, dtype)[:, :width] * 2
    return qkv, norms, cos_sin, batch


def memory(shape: Shape, num_pages: int, dtype: torch.dtype, device: torch.device) -> LayerPages:
    kv = (num_pages, shape.num_kv_heads, shape.page_size, shape.head_dim)
    index = (num_pages, shape.page_size, shape.index_dim)
    nan = float("nan")
    return LayerPages(
        torch.full(kv, nan, device=device).to(dtype),
        torch.full(kv, nan, device=device).to(dtype),
        torch.full(index, nan, device=device).to(dtype) if shape.index_dim else None,
    )


def agree(found: torch.Tensor, wanted: torch.Tensor) -> None:
    found, wanted, dtype = found.float(), wanted.float(), wanted.dtype
    eps = 2e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, wanted, rtol=eps, atol=eps / 4, equal_nan=True)


def compare(shape: Shape, num_tokens: int, dtype, page_dtype, device) -> None:
    args = make(shape, num_tokens, dtype, device)
    sizes = (shape.num_heads, shape.num_kv_heads, shape.head_dim, 1e-6)
    num_pages = args[3].page_table_RN.shape[1]
    found_pages, pages = (memory(shape, num_pages, page_dtype, device) for _ in range(2))
    found = kernel.qk_norm_rope_write(*args, found_pages, *sizes)
    wanted = reference.qk_norm_rope_write(*args, pages, *sizes)
    assert (found[1] is None) == (wanted[1] is None)
    for a, b in zip(found, wanted, strict=True):
        if b is not None:
            assert not a.isnan().any()
            agree(a, b)
    agree(found_pages.k_pages, pages.k_pages)
    agree(found_pages.v_pages, pages.v_pages)
    if pages.index_pages is not None:
        agree(found_pages.index_pages, pages.index_pages)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_tokens", [1, 13])
def test_equals_the_reference(kernel_device, shape, num_tokens):
    compare(shape, num_tokens, torch.float32, torch.float32, kernel_device)


@pytest.mark.parametrize(("name", "value"), [("HEADS", 2), ("MANY_TOKENS", 12)])
def test_tiles_do_not_change_the_result(kernel_device, monkeypatch, name, value):
    monkeypatch.setattr(kernel, name, value)
    compare(SHAPES[1], 13, torch.float32, torch.float32, kernel_device)


def test_half_precision_is_rounded_once(kernel_device):
    compare(SHAPES[0], 9, torch.float16, torch.float16, kernel_device)


def test_values_and_unrotated_dims_are_bit_copies(kernel_device):
    shape = SHAPES[0]
    qkv, norms, cos_sin, batch = make(shape, 9, torch.bfloat16, kernel_device)
    pages = memory(shape, batch.page_table_RN.shape[1], torch.bfloat16, kernel_device)
    kernel.qk_norm_rope_write(qkv, norms, cos_sin, batch, pages, 4, 2, 8, 1e-6)
    token = int((batch.slots_T >= 0).nonzero()[-1])
    page, place = divmod(int(batch.slots_T[token]), shape.page_size)
    assert torch.equal(pages.v_pages[page, :, place].flatten(), qkv[token, 48:64])


def test_no_tokens_write_nothing(kernel_device):
    shape = SHAPES[0]
    qkv, norms, cos_sin, batch = make(shape, 0, torch.float32, kernel_device)
    pages = memory(shape, 2, torch.float32, kernel_device)
    q, index_q = kernel.qk_norm_rope_write(qkv, norms, cos_sin, batch, pages, 4, 2, 8, 1e-6)
    assert q.shape == (0, 4, 8)
    assert index_q.shape == (0, 2, 8)
    assert pages.k_pages.isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(64, 4), (16, 1), (8, 1)])
@pytest.mark.parametrize("num_tokens", [1, 37, 2048])
@pytest.mark.parametrize("page_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_equals_the_reference_at_the_shapes_of_m3(cuda, heads, num_tokens, page_dtype):
    shape = M3._replace(num_heads=heads[0], num_kv_heads=heads[1])
    compare(shape, num_tokens, torch.bfloat16, page_dtype, cuda)
    compare(shape._replace(index_dim=0), num_tokens, torch.bfloat16, page_dtype, cuda)


@pytest.mark.gpu
def test_fp8_pages_are_clamped(cuda):
    shape = SHAPES[2]
    qkv, norms, cos_sin, batch = make(shape, 4, torch.bfloat16, cuda)
    pages = memory(shape, batch.page_table_RN.shape[1], torch.float8_e4m3fn, cuda)
    kernel.qk_norm_rope_write(qkv * 1000, norms, cos_sin, batch, pages, 3, 1, 8, 1e-6)
    written = pages.v_pages.float()
    assert written[~written.isnan()].abs().max() == 448.0


@pytest.mark.gpu
def test_fp8_pages_keep_nan(cuda):
    shape = SHAPES[0]
    qkv, norms, cos_sin, batch = make(shape, 4, torch.bfloat16, cuda)
    qkv[0], qkv[2] = torch.nan, 1e6
    pages = memory(shape, 2, torch.float8_e4m3fn, cuda)
    for part in (pages.k_pages, pages.v_pages, pages.index_pages):
        part.zero_()
    kernel.qk_norm_rope_write(
        qkv, norms, cos_sin, batch, pages, shape.num_heads, shape.num_kv_heads, shape.head_dim, 1e-6
    )
    page, place = divmod(int(batch.slots_T[0]), shape.page_size)
    assert pages.k_pages[page, :, place].float().isnan().all()
    assert pages.v_pages[page, :, place].float().isnan().all()
    assert pages.index_pages[page, place].float().isnan().all()
    page, place = divmod(int(batch.slots_T[2]), shape.page_size)
    assert (pages.v_pages[page, :, place].float() == 448.0).all()
