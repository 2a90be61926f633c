"""Kernels where they can run: the GPU, or the CPU through Triton's interpreter."""

import pytest
import torch

from m3rl.grpo import logprob, logprob_kernel, logprob_reference
from m3rl.grpo.logprob import greedy_hits, token_logprobs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(params=[64, 2048])
def block(request, monkeypatch):
    monkeypatch.setattr(logprob_kernel, "BLOCK", request.param)


def make_logits(num_tokens, vocab, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(num_tokens, vocab, generator=generator)
    targets = torch.randint(vocab, (num_tokens,), generator=generator)
    return logits.to(DEVICE), targets.to(DEVICE)


def folded(module, logits, targets, tiles, inverse):
    sums = logprob_reference.new_sums(targets, torch.float32)
    for first, stop in tiles:
        module.fold(sums, logits[:, first:stop].clone(), targets, first, inverse)
    return sums


@pytest.mark.parametrize(
    "tiles", [[(0, 300)], [(0, 128), (128, 256), (256, 300)], [(0, 299), (299, 300)]]
)
@pytest.mark.parametrize("inverse", [1.0, 2.5])
def test_sums_of_the_kernel_are_those_of_the_reference(tiles, inverse, block):
    logits, targets = make_logits(5, 300)
    actual = folded(logprob_kernel, logits, targets, tiles, inverse)
    expected = folded(logprob_reference, logits.double(), targets, [(0, 300)], inverse)
    torch.testing.assert_close(actual, expected.float(), atol=1e-6, rtol=1e-5)


def test_sums_bear_minus_infinity_large_logits_and_nan(block):
    logits, targets = make_logits(5, 300)
    logits[0, :200] = -torch.inf
    logits[1, 250] = 3e38
    logits[2] = -1e30
    logits[3, 70] = torch.nan
    targets[:] = 250
    tiles = [(0, 128), (128, 300)]
    actual = folded(logprob_kernel, logits, targets, tiles, 2.0)
    expected = folded(logprob_reference, logits, targets, tiles, 2.0)
    assert actual[:, [0, 1, 2, 4]].isfinite().all()
    assert actual[logprob_reference.TOTAL, 3].isnan()
    assert actual[logprob_reference.WEIGHTED, 3].isnan()
    finite = [0, 1, 2, 4]
    torch.testing.assert_close(actual[:, finite], expected[:, finite], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("target", [-1, 150, 1 << 40])
def test_a_target_elsewhere_is_left_alone(target, block):
    logits, targets = make_logits(1, 100)
    targets[:] = target
    sums = folded(logprob_kernel, logits, targets, [(0, 100)], 1.0)
    assert sums[logprob_reference.CHOSEN].isnan().all()
    grad = logprob_kernel.logits_gradient(
        logits, targets, 0, 1.0, *sums[:2], sums[0], torch.ones(1, device=DEVICE), None, sums.dtype
    )
    assert (grad <= 0).all()


@pytest.mark.parametrize("has_entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("first", "stop"), [(0, 300), (128, 256), (299, 300)])
def test_gradients_of_the_kernel_are_those_of_the_reference(has_entropy, dtype, first, stop, block):
    logits, targets = make_logits(5, 300)
    logits[0, 140] = -torch.inf
    targets[1], targets[2] = 299, 130
    sums = folded(logprob_reference, logits, targets, [(0, 300)], 2.5)
    log_total = sums[logprob_reference.TOTAL].log()
    entropy = log_total - sums[logprob_reference.WEIGHTED] / sums[logprob_reference.TOTAL]
    grad = torch.linspace(-1, 2, 5, device=DEVICE)
    args = (first, 2.5, sums[logprob_reference.LARGEST], log_total, entropy, grad)
    args += (grad.flip(0) if has_entropy else None, dtype)
    results = [
        module.logits_gradient(logits[:, first:stop].clone(), targets, *args)
        for module in (logprob_kernel, logprob_reference)
    ]
    assert results[0].dtype == dtype
    tolerance = 1e-6 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(results[0], results[1], atol=tolerance, rtol=tolerance)


def test_values_and_gradients_of_the_whole_are_those_of_fp64(block, monkeypatch):
    generator = torch.Generator().manual_seed(1)
    hidden, head = (
        torch.randn(rows, 8, generator=generator).to(DEVICE).requires_grad_() for rows in (6, 300)
    )
    targets = torch.randint(300, (6,), generator=generator).to(DEVICE)
    monkeypatch.setattr(logprob, "_passes", lambda hidden: logprob_kernel)
    actual = token_logprobs(hidden, head, targets, temperature=0.7, entropy_grad=True, tile_ids=128)
    # A sum's gradient is expanded: its memory is one number.
    grads = torch.autograd.grad(sum(part.sum() for part in actual), (hidden, head))
    monkeypatch.undo()
    exact = [x.detach().cpu().double().requires_grad_() for x in (hidden, head)]
    expected = token_logprobs(*exact, targets.cpu(), temperature=0.7, entropy_grad=True)
    expected_grads = torch.autograd.grad(sum(part.sum() for part in expected), exact)
    for found, wanted in zip([*actual, *grads], [*expected, *expected_grads], strict=True):
        torch.testing.assert_close(found.cpu(), wanted.float(), atol=1e-5, rtol=1e-5)


def relative_error(found, wanted):
    return ((found.cpu().double() - wanted).norm() / wanted.norm()).item()


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("head_dtype", [torch.bfloat16, torch.float32])
def test_bf16_products_are_exact_and_gradients_lose_one_rounding(head_dtype):
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(333, 256, generator=generator).bfloat16()
    head = (torch.randn(5000, 256, generator=generator) / 8).to(head_dtype)
    targets = torch.randint(5000, (333,), generator=generator)
    exact = [x.bfloat16().double().requires_grad_() for x in (hidden, head)]
    inputs = [x.cuda().requires_grad_() for x in (hidden, head)]
    options = {"temperature": 0.8, "entropy_grad": True}
    expected = token_logprobs(*exact, targets, **options)
    actual = token_logprobs(*inputs, targets.cuda(), **options, tile_ids=1024)
    for found, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(found.cpu(), wanted.float(), atol=2e-5, rtol=2e-6)
    weights = torch.linspace(-1, 2, 333, dtype=torch.float64)
    sums = [
        (parts[0] * on).sum() + 0.1 * (parts[1] * on).sum()
        for parts, on in ((actual, weights.float().cuda()), (expected, weights))
    ]
    grads = torch.autograd.grad(sums[0], inputs, retain_graph=True)
    expected_grads = torch.autograd.grad(sums[1], exact)
    # BF16 keeps 2^-9 of a logit's gradient, and again of a gradient that is BF16 itself.
    assert relative_error(grads[0], expected_grads[0]) < 2**-8
    assert relative_error(grads[1], expected_grads[1]) < 2**-8
    assert [grad.dtype for grad in grads] == [torch.bfloat16, head_dtype]
    again = torch.autograd.grad(sums[0], inputs)
    assert all(torch.equal(grad, same) for grad, same in zip(grads, again, strict=True))
    best = (hidden.double() @ head.bfloat16().double().T).argmax(1).cuda()
    assert greedy_hits(*inputs, best, tile_ids=1024).all()


@pytest.mark.gpu
@needs_cuda
def test_32k_tokens_of_the_full_vocabulary_take_2_gib():
    num_tokens, channels, vocab = 32768, 6144, 200064
    hidden = torch.randn(num_tokens, channels, dtype=torch.bfloat16, device="cuda")
    head = torch.randn(vocab, channels, dtype=torch.bfloat16, device="cuda") / 64
    targets = torch.randint(vocab, (num_tokens,), device="cuda")
    inputs = (hidden.requires_grad_(), head.requires_grad_())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logprobs, _ = token_logprobs(*inputs, targets, temperature=1.0)
    torch.autograd.grad(logprobs.sum(), inputs)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak - 2 * head.numel() <= 2 << 30


@pytest.mark.gpu
@needs_cuda
def test_fp64_on_cuda_is_refused():
    hidden, head = (torch.zeros(3, 4, dtype=torch.float64, device="cuda") for _ in range(2))
    targets = torch.zeros(3, dtype=torch.int64, device="cuda")
    with pytest.raises(TypeError, match="float64"):
        token_logprobs(hidden, head, targets, temperature=1.0)
