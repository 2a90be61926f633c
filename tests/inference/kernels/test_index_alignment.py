"""The index branch's divergence against a loop over queries, and the kernels against the truth."""

from itertools import accumulate, pairwise

import pytest
import torch

import inference.kernels.index_alignment as op
from inference.kernels.index_alignment import ALIGNMENT_LEVELS, index_alignment, reference
from inference.kernels.index_select_varlen import index_select_varlen
from inference.kernels.packing import Packing

HEADS, KV_HEADS, DIM, INDEX_DIM, BLOCK, TOPK = 4, 2, 8, 16, 4, 3
LENGTHS = [1, 3, 4, 5, 23, 4]
RULE = {"scale": 0.4, "index_scale": 0.3, "block_size": BLOCK}
levels = pytest.mark.parametrize("level", ALIGNMENT_LEVELS)


def samples_of(lengths):
    return [slice(*bounds) for bounds in pairwise(accumulate(lengths, initial=0))]


def random_case(lengths, dtype=torch.float64, seed=0):
    """(index q, index k, q, k, blocks) with the blocks that the index branch chooses."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)
    index_q, index_k, q, k = (
        torch.randn(num_tokens, *shape, generator=generator, dtype=dtype)
        for shape in ((KV_HEADS, INDEX_DIM), (INDEX_DIM,), (HEADS, DIM), (KV_HEADS, DIM))
    )
    packing = Packing.of(lengths, "cpu")
    choice = {"block_size": BLOCK, "topk_blocks": TOPK, "local_blocks": 1}
    return index_q, index_k, q, k, index_select_varlen(index_q, index_k, packing, **choice)


def brute_force(index_q, index_k, q, k, blocks, lengths, level):
    """[T, K]: every query by itself, over all keys of its sample."""
    rows = []
    for tokens in samples_of(lengths):
        for query in range(tokens.stop - tokens.start):
            for head in range(KV_HEADS):
                t = tokens.start + query
                chosen = [b for b in blocks[t, head].tolist() if b >= 0]
                groups = [
                    [tokens.start + s for s in range(b * BLOCK, (b + 1) * BLOCK) if s <= query]
                    for b in chosen
                ]
                groups = [group for group in groups if group]
                if not groups:
                    rows.append(index_q.new_zeros(()))
                    continue
                seen = [s for group in groups for s in group]
                per_head = [
                    (k[seen, head] @ q[t, h] * RULE["scale"]).softmax(0)
                    for h in range(HEADS)
                    if h // (HEADS // KV_HEADS) == head
                ]
                target = torch.stack(per_head).mean(0).detach()
                logits = index_k[seen] @ index_q[t, head] * RULE["index_scale"]
                if level == "block":
                    sizes = [len(group) for group in groups]
                    target = torch.stack([part.sum() for part in target.split(sizes)])
                    logits = torch.stack([part.max() for part in logits.split(sizes)])
                rows.append((target * (target.log() - logits.log_softmax(0))).sum())
    return torch.stack(rows).unflatten(0, (-1, KV_HEADS))


def run(case, packing, level, grad_out):
    """(divergence, gradients of index q and k)."""
    index_q, index_k, q, k, blocks = case
    leaves = [x.detach().clone().requires_grad_() for x in (index_q, index_k)]
    kl = index_alignment(*leaves, q, k, blocks, packing, level=level, **RULE)
    kl.backward(grad_out)
    return kl.detach(), *(leaf.grad for leaf in leaves)


@levels
def test_equals_a_loop_over_queries_in_value_and_gradients(level, monkeypatch):
    case = random_case(LENGTHS)
    case[-1][12] = -1  # a query that sees nothing
    num_keys = KV_HEADS * TOPK * BLOCK * DIM * 8
    monkeypatch.setattr(reference, "CHUNK_BYTES", 7 * num_keys)  # 40 queries, 7 at a time
    grad_out = torch.randn(sum(LENGTHS), KV_HEADS, dtype=torch.float64)
    found = run(case, Packing.of(LENGTHS, "cpu"), level, grad_out)
    leaves = [x.clone().requires_grad_() for x in case[:2]]
    wanted = brute_force(*leaves, *case[2:], LENGTHS, level)
    wanted.backward(grad_out)
    assert not found[0][12].any()
    assert (found[0][20:31] > 0.01).all()
    for one, other in zip(found, (wanted.detach(), *(x.grad for x in leaves)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@levels
def test_gradients_are_derivatives(level):
    index_q, index_k, q, k, blocks = random_case([9, 3])
    packing = Packing.of([9, 3], "cpu")
    assert torch.autograd.gradcheck(
        lambda *args: index_alignment(*args, q, k, blocks, packing, level=level, **RULE),
        [index_q.requires_grad_(), index_k.requires_grad_()],
    )


def test_the_main_branch_gets_no_gradient():
    case = random_case([9])
    leaves = [x.requires_grad_() for x in case[:4]]
    packing = Packing.of([9], "cpu")
    index_alignment(*leaves, case[4], packing, level="token", **RULE).sum().backward()
    assert [leaf.grad is None for leaf in leaves] == [False, False, True, True]


@levels
def test_an_index_branch_that_attends_alike_has_no_divergence(level):
    # One key head, and query heads that are all the index query: both softmaxes are one.
    index_q, index_k, _, _, blocks = random_case(LENGTHS)
    q = index_q[:, :1].expand(-1, HEADS, -1)
    k = index_k[:, None].expand(-1, KV_HEADS, -1)
    index_q = index_q[:, :1].expand(-1, KV_HEADS, -1)
    if level == "block":  # a score stands for its block's mass where all keys are alike
        k, index_k = torch.zeros_like(k), torch.zeros_like(index_k)
        blocks = torch.where(blocks * BLOCK + BLOCK - 1 < position(LENGTHS), blocks, -1)
    rule = RULE | {"index_scale": RULE["scale"]}
    case = (index_q, index_k, q, k, blocks, Packing.of(LENGTHS, "cpu"))
    kl = index_alignment(*case, level=level, **rule)
    torch.testing.assert_close(kl, torch.zeros_like(kl), atol=1e-14, rtol=0)


def position(lengths):
    return Packing.of(lengths, "cpu").positions_T[:, None, None]


@levels
def test_one_query_by_hand(level):
    # Two blocks of two keys. The head gives them 1/2, 1/4 | 1/8, 1/8; the index branch, whose
    # logits are ln 1, ln 1 | ln 2, ln 4, gives 1/8, 1/8 | 2/8, 4/8 of the keys and 1/5, 4/5 of the
    # blocks.
    k = torch.tensor([4.0, 2.0, 1.0, 1.0]).double().log()[:, None, None]
    index_k = torch.tensor([1.0, 1.0, 2.0, 4.0]).double().log()[:, None]
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    blocks = torch.tensor([[[0, 1]]], dtype=torch.int32)
    rule = {"scale": 1.0, "index_scale": 1.0, "block_size": 2, "level": level}
    kl = index_alignment(one, index_k, one, k, blocks, Packing.of([4], "cpu", 3), **rule)
    p, p_index = {
        "token": ([1 / 2, 1 / 4, 1 / 8, 1 / 8], [1 / 8, 1 / 8, 2 / 8, 4 / 8]),
        "block": ([3 / 4, 1 / 4], [1 / 5, 4 / 5]),
    }[level]
    p, p_index = (torch.tensor(x, dtype=torch.float64) for x in (p, p_index))
    torch.testing.assert_close(kl[0, 0], (p * (p / p_index).log()).sum(), rtol=1e-12, atol=0)


@levels
def test_a_sample_alone_and_packed_are_one(level):
    case = random_case(LENGTHS)
    grad_out = torch.randn(sum(LENGTHS), KV_HEADS, dtype=torch.float64)
    packed = run(case, Packing.of(LENGTHS, "cpu"), level, grad_out)
    for tokens, length in zip(samples_of(LENGTHS), LENGTHS, strict=True):
        parts = [x[tokens] for x in case]
        alone = run(parts, Packing.of([length], "cpu"), level, grad_out[tokens])
        for one, other in zip(packed, alone, strict=True):
            torch.testing.assert_close(one[tokens], other, rtol=1e-12, atol=1e-12)


def test_queries_split_over_ranks_give_the_whole():
    index_q, index_k, q, k, blocks = case = random_case(LENGTHS)
    grad_out = torch.randn(40, KV_HEADS, dtype=torch.float64)
    kl, grad_q, grad_k = run(case, Packing.of(LENGTHS, "cpu"), "token", grad_out)
    summed = torch.zeros_like(grad_k)
    for first, last in pairwise([0, 7, 9, 10, 31, 40]):
        own = slice(first, last)
        packing = Packing.of(LENGTHS, "cpu", first, last - first)
        mine = (index_q[own], index_k, q[own], k, blocks[own])
        part = run(mine, packing, "token", grad_out[own])
        torch.testing.assert_close(part[0], kl[own], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(part[1], grad_q[own], rtol=1e-12, atol=1e-12)
        summed += part[2]
    torch.testing.assert_close(summed, grad_k, rtol=1e-12, atol=1e-12)


def test_bad_input():
    index_q, index_k, q, k, blocks = random_case([9])
    packing, rule = Packing.of([9], "cpu"), RULE | {"level": "token"}
    with pytest.raises(ValueError, match="index_k_TD has shape"):
        index_alignment(index_q, index_k[1:], q, k, blocks, packing, **rule)
    with pytest.raises(TypeError, match="k_TKD is float32"):
        index_alignment(index_q, index_k, q, k.float(), blocks, packing, **rule)
    with pytest.raises(TypeError, match="blocks_QKB is int64"):
        index_alignment(index_q, index_k, q, k, blocks.long(), packing, **rule)
    with pytest.raises(ValueError, match="do not share"):
        index_alignment(index_q, index_k, q[:, :3], k, blocks, packing, **rule)
    with pytest.raises(ValueError, match="level='page' is unknown"):
        index_alignment(index_q, index_k, q, k, blocks, packing, **RULE, level="page")


@levels
@pytest.mark.parametrize(("first", "count"), [(0, None), (10, 22)])
def test_the_kernels_are_like_the_reference(kernel_device, monkeypatch, level, first, count):
    index_q, index_k, q, k, blocks = random_case(LENGTHS, torch.float32)
    blocks[12] = -1
    blocks[18] = torch.tensor([2, 0, -1])  # the first of them lies in its future
    blocks[20] = torch.tensor([-1, 1, -1])
    packing = Packing.of(LENGTHS, kernel_device, first, count)
    own = slice(first, first + packing.num_queries)
    case = [x.to(kernel_device) for x in (index_q[own], index_k, q[own], k, blocks[own])]
    grad_out = torch.randn(packing.num_queries, KV_HEADS, device=kernel_device)
    monkeypatch.setattr(op, "use_kernel", lambda *_: False)
    wanted = run([*(x.double() for x in case[:4]), case[4]], packing, level, grad_out.double())
    monkeypatch.setattr(op, "use_kernel", lambda *_: True)
    found = run(case, packing, level, grad_out)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@levels
def test_on_cuda_like_the_reference(cuda, level):
    heads, kv_heads, dim, block = 16, 2, 128, 128
    lengths = [700, 1, 2300, 129]
    torch.manual_seed(0)
    num_tokens = sum(lengths)
    shapes = ((kv_heads, dim), (dim,), (heads, dim), (kv_heads, dim))
    inputs = [torch.randn(num_tokens, *shape).bfloat16() for shape in shapes]
    choice = {"block_size": block, "topk_blocks": 4, "local_blocks": 1}
    blocks = index_select_varlen(*inputs[:2], Packing.of(lengths, "cpu"), **choice)
    grad_out = torch.rand(num_tokens, kv_heads)
    rule = {"scale": dim**-0.5, "index_scale": dim**-0.5, "block_size": block, "level": level}
    results = []
    for device in ("cpu", cuda, cuda):
        index_q, index_k, q, k = (x.to(device) for x in inputs)
        leaves = [x.detach().requires_grad_() for x in (index_q, index_k)]
        packing = Packing.of(lengths, device)
        kl = index_alignment(*leaves, q, k, blocks.to(device), packing, **rule)
        kl.backward(grad_out.to(device))
        results.append([x.detach().cpu().float() for x in (kl, *(leaf.grad for leaf in leaves))])
    wanted, found, again = results
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
    for name, one, other in zip(("kl", "index q", "index k"), found, wanted, strict=True):
        error = float((one - other).norm() / other.norm())
        # Weights and results are rounded to BF16, 2^-9 each.
        assert error < 1e-2, f"{name}: {error}"
