from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest
import torch
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as m3

import inference.kernels.msa_varlen as op
from inference.kernels.msa_attention.block_kernel import BlockMajor
from inference.kernels.msa_attention.prefill_kernel import QueryMajor, msa_attention_prefill
from inference.kernels.msa_varlen import msa_varlen
from inference.kernels.msa_varlen.forward import msa_varlen_forward
from inference.kernels.packing import Packing, to_pages
from inference.kernels.paging import LayerPages

HEADS, KV_HEADS, DIM, BLOCK, TOPK, SCALE = 4, 2, 8, 4, 3, 0.4
BORDERS = [1, 3, 4, 5, 23, 4]
RULE = {"scale": SCALE, "block_size": BLOCK}


def samples_of(lengths):
    return [slice(*bounds) for bounds in pairwise(accumulate(lengths, initial=0))]


def random_case(lengths, dtype=torch.float64, seed=0, topk=TOPK):
    """(q, k, v, blocks): each query has its own block and others before it, sometimes fewer."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)
    q, k, v = (
        torch.randn(num_tokens, heads, DIM, generator=generator, dtype=dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    blocks = torch.full((num_tokens, KV_HEADS, topk), -1, dtype=torch.int32)
    for tokens, length in zip(samples_of(lengths), lengths, strict=True):
        for position in range(length):
            own = position // BLOCK
            for head in range(KV_HEADS):
                others = torch.randperm(own, generator=generator)[: topk - 1].tolist()
                ids = torch.tensor(sorted([*others, own])).int()
                blocks[tokens.start + position, head, : len(ids)] = ids
    return q, k, v, blocks


def run(q, k, v, blocks, packing, grad_out):
    """(out, dq, dk, dv)."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = msa_varlen(*leaves, blocks, packing, **RULE)
    out.backward(grad_out)
    return out.detach(), *(leaf.grad for leaf in leaves)


def transformers_attention(q, k, v, blocks):
    """One sample through the eager, dense-mask formulation."""
    length = q.shape[0]
    config = SimpleNamespace(num_attention_heads=HEADS)
    positions = torch.arange(length)[None]
    mask = m3.MiniMaxM3VLIndexer.build_block_mask(
        SimpleNamespace(block_size=BLOCK, config=config),
        blocks.transpose(0, 1)[None].long(),
        None,
        length,
        q.dtype,
        q.device,
        positions,
    )
    module = SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, training=False)
    rows = (x.transpose(0, 1)[None] for x in (q, k, v))
    return m3.eager_attention_forward(module, *rows, mask, SCALE)[0][0]


def test_equals_the_dense_mask_formulation_sample_by_sample(monkeypatch):
    # Its softmax is in FP32 by name; here it shall be as exact as the rest.
    softmax = torch.softmax
    monkeypatch.setattr(m3.nn.functional, "softmax", lambda x, dim, dtype: softmax(x, dim))
    q, k, v, blocks = random_case(BORDERS)
    grad_out = torch.randn_like(q)
    found = run(q, k, v, blocks, Packing.of(BORDERS, "cpu"), grad_out)
    for tokens in samples_of(BORDERS):
        leaves = [x[tokens].clone().requires_grad_() for x in (q, k, v)]
        out = transformers_attention(*leaves, blocks[tokens])
        out.backward(grad_out[tokens])
        wanted = (out.detach(), *(leaf.grad for leaf in leaves))
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one[tokens], other, rtol=1e-12, atol=1e-12)


def test_a_sample_alone_and_packed_are_one_in_output_and_gradients():
    q, k, v, blocks = random_case(BORDERS)
    grad_out = torch.randn_like(q)
    packed = run(q, k, v, blocks, Packing.of(BORDERS, "cpu"), grad_out)
    for tokens, length in zip(samples_of(BORDERS), BORDERS, strict=True):
        parts = (x[tokens] for x in (q, k, v, blocks))
        alone = run(*parts, Packing.of([length], "cpu"), grad_out[tokens])
        for one, other in zip(packed, alone, strict=True):
            torch.testing.assert_close(one[tokens], other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cuts", [[0, 20, 40], [0, 7, 9, 10, 31, 40]])
def test_queries_split_over_ranks_give_the_whole(cuts):
    q, k, v, blocks = random_case(BORDERS)
    grad_out = torch.randn_like(q)
    out, dq, dk, dv = run(q, k, v, blocks, Packing.of(BORDERS, "cpu"), grad_out)
    summed = [torch.zeros_like(dk), torch.zeros_like(dv)]
    for first, last in pairwise(cuts):
        packing = Packing.of(BORDERS, "cpu", first, last - first)
        own = slice(first, last)
        part = run(q[own], k, v, blocks[own], packing, grad_out[own])
        torch.testing.assert_close(part[0], out[own], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(part[1], dq[own], rtol=1e-12, atol=1e-12)
        summed = [total + grad for total, grad in zip(summed, part[2:], strict=True)]
    torch.testing.assert_close(summed, [dk, dv], rtol=1e-12, atol=1e-12)


def test_gradients_are_derivatives():
    q, k, v, blocks = random_case([6, 3], topk=2)
    packing = Packing.of([6, 3], "cpu")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(
        lambda *args: msa_varlen(*args, blocks, packing, **RULE), leaves
    )


def test_a_query_that_sees_nothing_gives_zeros_and_takes_no_gradient():
    q, k, v, blocks = random_case([9])
    blocks[5] = -1
    # A block in the future.
    blocks[2] = torch.tensor([1, -1, -1])
    found = run(q, k, v, blocks, Packing.of([9], "cpu"), torch.ones_like(q))
    for row in (2, 5):
        assert not found[0][row].any()
        assert not found[1][row].any()
    assert all(x.isfinite().all() for x in found)


def test_a_block_that_no_sample_has_is_an_error():
    q, k, v, blocks = random_case([9])
    blocks[5, 0, 0] = 3
    with pytest.raises(ValueError, match="block id 3; the longest sample has 3"):
        msa_varlen(q, k, v, blocks, Packing.of([9], "cpu"), **RULE)


def test_bad_input():
    q, k, v, blocks = random_case([9])
    packing = Packing.of([9], "cpu")
    with pytest.raises(ValueError, match="q_QHD has shape"):
        msa_varlen(q[1:], k, v, blocks, packing, **RULE)
    with pytest.raises(TypeError, match="v_TKD is float32"):
        msa_varlen(q, k, v.float(), blocks, packing, **RULE)
    with pytest.raises(TypeError, match="blocks_QKB is int64"):
        msa_varlen(q, k, v, blocks.long(), packing, **RULE)
    with pytest.raises(ValueError, match="do not share"):
        msa_varlen(q[:, :3], k, v, blocks, packing, **RULE)


def log_sum_exps(q, k, blocks, lengths):
    """[T, H], query by query."""
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    for tokens in samples_of(lengths):
        for query in range(tokens.stop - tokens.start):
            for head in range(HEADS):
                kv_head = head // (HEADS // KV_HEADS)
                chosen = blocks[tokens.start + query, kv_head].tolist()
                keys = [s for s in range(query + 1) if s // BLOCK in chosen]
                logits = k[tokens][keys, kv_head].double() @ q[tokens][query, head].double()
                lse[tokens.start + query, head] = (logits * SCALE).logsumexp(0)
    return lse


WAYS = {
    "queries": QueryMajor(tile=16, num_stages=1),
    "queries-split": QueryMajor(split=2, tile=16, num_stages=1),
    "blocks": BlockMajor(slab=16, heads=2, unit=8, rows=16),
}


@pytest.mark.parametrize("launch", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(("first", "count"), [(0, None), (10, 22)])
def test_every_way_gives_outputs_and_log_sum_exps(kernel_device, launch, first, count):
    q, k, v, blocks = random_case(BORDERS, torch.float32)
    blocks[12] = -1
    packing = Packing.of(BORDERS, "cpu", first, count)
    own = slice(first, first + packing.num_queries)
    wanted = msa_varlen(q[own], k, v, blocks[own], packing, **RULE)
    placed = Packing.of(BORDERS, kernel_device, first, count)
    q_own = q[own].to(kernel_device)
    out = torch.empty_like(q_own)
    lse = torch.empty(q_own.shape[:2], device=kernel_device)
    pages = (to_pages(x.to(kernel_device), placed, BLOCK) for x in (k, v))
    msa_attention_prefill(
        q_own,
        LayerPages(*pages, None),
        blocks[own].to(kernel_device),
        placed.pages(BLOCK).batch,
        SCALE,
        out,
        launch,
        lse_TH=lse,
    )
    torch.testing.assert_close(out.cpu(), wanted, rtol=1e-5, atol=1e-5)
    wanted_lse = log_sum_exps(q, k, blocks, BORDERS)[own].float()
    assert (wanted_lse[12 - first] == -torch.inf).all()
    torch.testing.assert_close(lse.cpu(), wanted_lse, rtol=1e-5, atol=1e-5)


def test_the_forward_takes_heads_that_lie_apart(kernel_device):
    q, k, v, blocks = (x.to(kernel_device) for x in random_case(BORDERS, torch.float32))
    packing = Packing.of(BORDERS, kernel_device)
    apart = q.transpose(0, 1).contiguous().transpose(0, 1)
    wanted = msa_varlen_forward(q, k, v, blocks, packing, **RULE)
    found = msa_varlen_forward(apart, k, v, blocks, packing, **RULE)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


@pytest.mark.parametrize(("first", "count"), [(0, None), (10, 22)])
def test_the_kernels_give_gradients_like_the_reference(kernel_device, monkeypatch, first, count):
    q, k, v, blocks = random_case(BORDERS, torch.float32)
    packing = Packing.of(BORDERS, kernel_device, first, count)
    own = slice(first, first + packing.num_queries)
    placed = [x.to(kernel_device) for x in (q[own], k, v, blocks[own])]
    grad_out = torch.randn_like(placed[0])
    monkeypatch.setattr(op, "use_kernel", lambda *_: False)
    wanted = run(*(x.double() for x in placed[:3]), placed[3], packing, grad_out.double())
    monkeypatch.setattr(op, "use_kernel", lambda *_: True)
    found = run(*placed, packing, grad_out)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[700, 1, 2300, 129], [4097]])
def test_on_cuda_like_the_reference(cuda, lengths):
    heads, kv_heads, dim, block = 16, 2, 128, 128
    torch.manual_seed(0)
    num_tokens = sum(lengths)
    on_cpu, placed = Packing.of(lengths, "cpu"), Packing.of(lengths, cuda)
    q, k, v, grad = (
        torch.randn(num_tokens, n, dim).bfloat16() for n in (heads, kv_heads, kv_heads, heads)
    )
    score = torch.rand(num_tokens, kv_heads, -(-max(lengths) // block))
    own_T = on_cpu.positions_T // block
    score.masked_fill_(torch.arange(score.shape[-1]) > own_T[:, None, None], -1.0)
    value, blocks = score.topk(min(4, score.shape[-1]), -1)
    blocks = blocks.masked_fill(value < 0, -1).int()
    results = []
    for device, packing in (("cpu", on_cpu), (cuda, placed)):
        leaves = [x.to(device).detach().requires_grad_() for x in (q, k, v)]
        out = msa_varlen(*leaves, blocks.to(device), packing, scale=dim**-0.5, block_size=block)
        out.backward(grad.to(device))
        results.append([x.detach().cpu().float() for x in (out, *(leaf.grad for leaf in leaves))])
    for name, wanted, found in zip(("out", "dq", "dk", "dv"), *results, strict=True):
        error = float((found - wanted).norm() / wanted.norm())
        # Operands and weights are rounded to BF16, 2^-9 each.
        assert error < 1e-2, f"{name}: {error}"
