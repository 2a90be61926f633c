from itertools import accumulate, pairwise

import pytest
import torch

from inference.kernels.dense_varlen import dense_varlen, kernel
from inference.kernels.packing import Packing

HEADS, KV_HEADS, DIM, SCALE = 4, 2, 8, 0.4
LENGTHS = [1, 7, 23, 9]


def samples_of(lengths):
    return [slice(*bounds) for bounds in pairwise(accumulate(lengths, initial=0))]


def random_case(lengths, dtype=torch.float64, heads=(HEADS, KV_HEADS), dim=DIM):
    """(q, k, v, gradient of the output)."""
    generator = torch.Generator().manual_seed(0)
    sizes = (heads[0], heads[1], heads[1], heads[0])
    return [torch.randn(sum(lengths), n, dim, generator=generator).to(dtype=dtype) for n in sizes]


def run(q, k, v, grad_out, packing, scale=SCALE):
    """(out, dq, dk, dv)."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = dense_varlen(*leaves, packing, scale=scale)
    out.backward(grad_out)
    return out.detach(), *(leaf.grad for leaf in leaves)


def plain_attention(q, k, v, scale=SCALE):
    """Causal attention of one sample, by the book."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    logits = q.transpose(0, 1) @ k.mT * scale
    is_future = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return (logits.masked_fill(is_future, -torch.inf).softmax(-1) @ v).transpose(0, 1)


def test_equals_causal_attention_sample_by_sample():
    q, k, v, grad_out = random_case(LENGTHS)
    found = run(q, k, v, grad_out, Packing.of(LENGTHS, "cpu"))
    for tokens in samples_of(LENGTHS):
        leaves = [x[tokens].clone().requires_grad_() for x in (q, k, v)]
        out = plain_attention(*leaves)
        out.backward(grad_out[tokens])
        wanted = (out.detach(), *(leaf.grad for leaf in leaves))
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one[tokens], other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cuts", [[0, 20, 40], [0, 1, 9, 10, 40]])
def test_queries_split_over_ranks_give_the_whole(cuts):
    q, k, v, grad_out = random_case(LENGTHS)
    out, dq, dk, dv = run(q, k, v, grad_out, Packing.of(LENGTHS, "cpu"))
    summed = [torch.zeros_like(dk), torch.zeros_like(dv)]
    for first, last in pairwise(cuts):
        own = slice(first, last)
        packing = Packing.of(LENGTHS, "cpu", first, last - first)
        part = run(q[own], k, v, grad_out[own], packing)
        torch.testing.assert_close(part[0], out[own], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(part[1], dq[own], rtol=1e-12, atol=1e-12)
        summed = [total + grad for total, grad in zip(summed, part[2:], strict=True)]
    torch.testing.assert_close(summed, [dk, dv], rtol=1e-12, atol=1e-12)


def test_half_precision_is_rounded_once():
    q, k, v, _ = random_case(LENGTHS, torch.bfloat16)
    packing = Packing.of(LENGTHS, "cpu")
    exact = dense_varlen(q.float(), k.float(), v.float(), packing, scale=SCALE)
    assert torch.equal(dense_varlen(q, k, v, packing, scale=SCALE), exact.bfloat16())


def test_long_samples_are_parts_of_their_own_and_others_run_together(monkeypatch):
    monkeypatch.setattr(kernel, "LONG", 10)
    parts = kernel.parts_of(Packing.of([12, 3, 9, 10, 1], "cpu").seen)
    assert [part.is_long for part in parts] == [True, False, True, False]
    assert [part.samples for part in parts] == [slice(0, 1), slice(1, 3), slice(3, 4), slice(4, 5)]
    assert [part.keys for part in parts] == [
        slice(0, 12),
        slice(12, 24),
        slice(24, 34),
        slice(34, 35),
    ]
    assert all(part.queries == part.keys for part in parts)


def test_a_long_sample_whose_first_queries_are_elsewhere_runs_with_the_short_ones(monkeypatch):
    monkeypatch.setattr(kernel, "LONG", 10)
    parts = kernel.parts_of(Packing.of([20, 11, 20], "cpu", 15, 30).seen)
    # Of the last sample only the first 14 tokens are queries: a sample of 14 tokens.
    assert [part.is_long for part in parts] == [False, True, True]
    assert [part.queries for part in parts] == [slice(0, 5), slice(5, 16), slice(16, 30)]
    assert [part.keys for part in parts] == [slice(0, 20), slice(20, 31), slice(31, 45)]


def test_few_sizes_of_long_samples_exist_and_none_is_much_longer_than_its_sample():
    lengths = range(4096, 1 << 17, 37)
    assert len({kernel.padded_length(length) for length in lengths}) <= 8 * 5 + 1
    assert all(0 <= kernel.padded_length(n) - n < n / 8 for n in lengths)
    assert kernel.padded_length(16384) == 16384


def test_bad_input():
    q, k, v, _ = random_case([5])
    packing = Packing.of([5], "cpu")
    with pytest.raises(ValueError, match="k_TKD has shape"):
        dense_varlen(q, k[:4], v, packing, scale=SCALE)
    with pytest.raises(TypeError, match="k_TKD is float32"):
        dense_varlen(q, k.float(), v, packing, scale=SCALE)
    with pytest.raises(ValueError, match="do not share"):
        dense_varlen(q[:, :3], k, v, packing, scale=SCALE)


@pytest.mark.gpu
@pytest.mark.parametrize(("first", "count"), [(0, None), (300, 1500)])
def test_on_cuda_like_the_reference(cuda, first, count):
    lengths = [700, 1, 1200, 129]
    q, k, v, grad_out = random_case(lengths, torch.bfloat16, (16, 2), 128)
    results = []
    for device in ("cpu", cuda):
        packing = Packing.of(lengths, device, first, count)
        own = slice(first, first + packing.num_queries)
        args = (q[own], k, v, grad_out[own])
        results.append(run(*(x.to(device) for x in args), packing, 128**-0.5))
    for name, wanted, found in zip(("out", "dq", "dk", "dv"), *results, strict=True):
        found, wanted = found.cpu().float(), wanted.float()
        error = float((found - wanted).norm() / wanted.norm())
        # Operands and weights are rounded to BF16, 2^-9 each.
        assert error < 1e-2, f"{name}: {error}"


@pytest.fixture
def set_deterministic():
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_long_samples_among_short_ones_on_cuda(cuda, set_deterministic, is_deterministic):
    lengths, scale = [130, 5000, 300, 1, 4608], 128**-0.5
    q, k, v, grad_out = (x.to(cuda) for x in random_case(lengths, torch.bfloat16, (8, 2), 128))
    packing = Packing.of(lengths, cuda)
    set_deterministic(is_deterministic)
    found = run(q, k, v, grad_out, packing, scale)
    again = run(q, k, v, grad_out, packing, scale)
    set_deterministic(False)
    assert torch.equal(found[0], again[0])
    if is_deterministic:
        assert all(map(torch.equal, found, again))
    errors = {}
    for tokens in samples_of(lengths):
        leaves = [x[tokens].float().requires_grad_() for x in (q, k, v)]
        out = plain_attention(*leaves, scale)
        out.backward(grad_out[tokens].float())
        wanted = (out.detach(), *(leaf.grad for leaf in leaves))
        for name, one, other in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
            error = float((one[tokens].float() - other).norm() / other.norm().clamp(min=1e-6))
            errors[name, tokens.start] = error
    # One key alone has softmax 1, whatever its product: only noise is left of dq and dk.
    del errors["dq", sum(lengths[:3])], errors["dk", sum(lengths[:3])]
    assert max(errors.values()) < 1e-2, errors


@pytest.mark.gpu
def test_whole_samples_of_a_range_of_queries_are_those_of_the_whole_row(cuda):
    lengths, first, count = [700, 4200, 5000], 400, 8000
    q, k, v, grad_out = (x.to(cuda) for x in random_case(lengths, torch.bfloat16, (8, 2), 128))
    own = slice(first, first + count)
    whole = run(q, k, v, grad_out, Packing.of(lengths, cuda), 128**-0.5)
    part = run(q[own], k, v, grad_out[own], Packing.of(lengths, cuda, first, count), 128**-0.5)
    for one, other in zip(part[:2], whole[:2], strict=True):
        torch.testing.assert_close(one, other[own], rtol=2e-2, atol=2e-2)


def test_float32_on_cuda_is_refused(cuda):
    q, k, v, _ = (x.to(cuda) for x in random_case([5], torch.float32))
    with pytest.raises(TypeError, match="needs bfloat16 or float16"):
        dense_varlen(q, k, v, Packing.of([5], cuda), scale=SCALE)
