import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from m3rl.grpo.logprob import token_logprobs


def make(num_tokens, hidden=16, vocab=50, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, hidden, dtype=dtype, generator=generator, requires_grad=True)
    head = torch.randn(vocab, hidden, dtype=dtype, generator=generator, requires_grad=True)
    targets = torch.randint(vocab, (num_tokens,), generator=generator)
    return x, head, targets


def unchunked(hidden_TC, head_VC, targets_T, temperature):
    log_p = torch.log_softmax(hidden_TC @ head_VC.T / temperature, -1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, targets_T[:, None]).squeeze(-1), entropy


# BR-020
def test_temperature_divides_logits_not_logprobs():
    # Logits [2, 1, 0] at temperature 0.5: -0.1429; raw -0.4076; dividing the logprob gives -0.8152.
    hidden = torch.tensor([[1.0]])
    head = torch.tensor([[2.0], [1.0], [0.0]])
    at_half, _ = token_logprobs(hidden, head, torch.tensor([0]), temperature=0.5)
    raw, entropy = token_logprobs(hidden, head, torch.tensor([0]), temperature=1.0)
    assert at_half.item() == pytest.approx(-0.1429, abs=5e-5)
    assert raw.item() == pytest.approx(-0.4076, abs=5e-5)
    p = torch.tensor([2.0, 1.0, 0.0]).softmax(0)
    assert entropy.item() == pytest.approx(-(p * p.log()).sum().item(), rel=1e-6)


# BR-073
@pytest.mark.parametrize("num_tokens", [1, 7, 8, 20])
@pytest.mark.parametrize("chunk_size", [1, 8, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunks_give_the_values_and_gradients_of_the_whole(num_tokens, chunk_size, temperature):
    hidden, head, targets = make(num_tokens)
    weights = torch.linspace(-1, 2, num_tokens, dtype=torch.float64)
    expected, expected_entropy = unchunked(hidden, head, targets, temperature)
    expected_grads = torch.autograd.grad(expected @ weights, (hidden, head))
    actual, entropy = token_logprobs(
        hidden, head, targets, temperature=temperature, chunk_size=chunk_size
    )
    grads = torch.autograd.grad(actual @ weights, (hidden, head))
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(entropy, expected_entropy.detach())
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad)


def test_gradients_pass_a_finite_difference_check():
    hidden, head, targets = make(5, hidden=3, vocab=4)

    def logprobs(h, w):
        return token_logprobs(h, w, targets, temperature=0.8, chunk_size=2)[0]

    assert torch.autograd.gradcheck(logprobs, (hidden, head))


# BR-073
def test_no_tokens_give_empty_logprobs_and_zero_gradients():
    hidden, head, targets = make(0)
    logprobs, _ = token_logprobs(hidden, head, targets, temperature=1.0)
    assert logprobs.tolist() == []
    grads = torch.autograd.grad(logprobs.sum(), (hidden, head))
    assert grads[1].abs().max().item() == 0.0


def test_bf16_hidden_states_and_head_are_computed_in_fp32():
    hidden, head, targets = make(6, dtype=torch.float32)
    hidden16, head16 = hidden.detach().bfloat16(), head.detach().bfloat16()
    logprobs, _ = token_logprobs(hidden16, head16, targets, temperature=1.0)
    expected, _ = unchunked(hidden16.float(), head16.float(), targets, 1.0)
    assert torch.equal(logprobs, expected) or torch.allclose(logprobs, expected, atol=1e-6)
    assert logprobs.dtype == torch.float32


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.numel = max(self.numel, leaf.numel())
        return out


# BR-073
@pytest.mark.parametrize("num_tokens", [512, 500])
def test_no_tensor_is_larger_than_a_chunk_of_logits_in_forward_or_backward(num_tokens):
    vocab, chunk = 5000, 64
    hidden, head, targets = make(num_tokens, hidden=32, vocab=vocab, dtype=torch.float32)
    with LargestTensor() as largest:
        logprobs, _ = token_logprobs(hidden, head, targets, temperature=1.0, chunk_size=chunk)
        grads = torch.autograd.grad(logprobs.sum(), (hidden, head))
    assert largest.numel <= chunk * vocab
    expected, _ = unchunked(hidden, head, targets, 1.0)
    expected_grads = torch.autograd.grad(expected.sum(), (hidden, head))
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, atol=1e-5, rtol=1e-5)


# BR-073
def test_nothing_but_inputs_is_kept_for_the_backward():
    hidden, head, targets = make(64, vocab=1000, dtype=torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t, lambda t: t
    ):
        token_logprobs(hidden, head, targets, temperature=1.0, chunk_size=8)
    assert max(kept) == head.numel()


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.0, "chunk_size": 0}])
def test_impossible_options_are_refused(options):
    with pytest.raises(ValueError, match="must be"):
        token_logprobs(*make(2), **options)
