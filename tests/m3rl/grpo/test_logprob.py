import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from m3rl.grpo import logprob
from m3rl.grpo.logprob import greedy_hits, token_logprobs


def make(num_tokens, hidden=16, vocab=50, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, hidden, dtype=dtype, generator=generator, requires_grad=True)
    head = torch.randn(vocab, hidden, dtype=dtype, generator=generator, requires_grad=True)
    targets = torch.randint(vocab, (num_tokens,), generator=generator)
    return x, head, targets


def whole(hidden_TC, head_VC, targets_T, temperature):
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
@pytest.mark.parametrize("num_tokens", [1, 7, 20])
@pytest.mark.parametrize("tile_ids", [1, 16, 49, 1000, None])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tiles_give_the_values_and_gradients_of_the_whole(num_tokens, tile_ids, temperature):
    hidden, head, targets = make(num_tokens)
    weights = torch.linspace(-1, 2, num_tokens, dtype=torch.float64)
    expected, expected_entropy = whole(hidden, head, targets, temperature)
    expected_grads = torch.autograd.grad(expected @ weights, (hidden, head), retain_graph=True)
    actual, entropy = token_logprobs(
        hidden, head, targets, temperature=temperature, tile_ids=tile_ids
    )
    assert not entropy.requires_grad
    grads = torch.autograd.grad(actual @ weights, (hidden, head))
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(entropy, expected_entropy.detach())
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad)


@pytest.mark.parametrize("tile_ids", [7, None])
@pytest.mark.parametrize(("of_logprob", "of_entropy"), [(0.0, 1.0), (1.0, -0.3)])
def test_the_entropy_has_the_gradient_of_autograd(tile_ids, of_logprob, of_entropy):
    hidden, head, targets = make(9)
    weights = torch.linspace(-1, 2, 9, dtype=torch.float64)
    expected, expected_entropy = whole(hidden, head, targets, 0.7)
    loss = of_logprob * (expected @ weights) + of_entropy * (expected_entropy @ weights.flip(0))
    expected_grads = torch.autograd.grad(loss, (hidden, head))
    actual, entropy = token_logprobs(
        hidden, head, targets, temperature=0.7, entropy_grad=True, tile_ids=tile_ids
    )
    loss = of_logprob * (actual @ weights) + of_entropy * (entropy @ weights.flip(0))
    for grad, expected_grad in zip(
        torch.autograd.grad(loss, (hidden, head)), expected_grads, strict=True
    ):
        torch.testing.assert_close(grad, expected_grad)


def test_the_entropy_alone_may_be_differentiated():
    hidden, head, targets = make(4)
    _, entropy = token_logprobs(hidden, head, targets, temperature=1.0, entropy_grad=True)
    (grad,) = torch.autograd.grad(entropy.sum(), head)
    (expected,) = torch.autograd.grad(whole(hidden, head, targets, 1.0)[1].sum(), head)
    torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_gradients_pass_a_finite_difference_check(entropy_grad):
    hidden, head, targets = make(5, hidden=3, vocab=4)

    def outputs(h, w):
        both = token_logprobs(h, w, targets, temperature=0.8, entropy_grad=entropy_grad, tile_ids=3)
        return both if entropy_grad else both[0]

    assert torch.autograd.gradcheck(outputs, (hidden, head))


@pytest.mark.parametrize("needed", [0, 1])
def test_a_frozen_side_gets_no_gradient(needed):
    hidden, head, targets = make(5)
    inputs = [x.detach().requires_grad_(at == needed) for at, x in enumerate((hidden, head))]
    token_logprobs(*inputs, targets, temperature=1.0)[0].sum().backward()
    expected = torch.autograd.grad(whole(hidden, head, targets, 1.0)[0].sum(), (hidden, head))
    torch.testing.assert_close(inputs[needed].grad, expected[needed])
    assert inputs[1 - needed].grad is None


# BR-073
def test_no_tokens_give_empty_logprobs_and_zero_gradients():
    hidden, head, targets = make(0)
    logprobs, entropy = token_logprobs(hidden, head, targets, temperature=1.0)
    assert logprobs.tolist() == entropy.tolist() == []
    grads = torch.autograd.grad(logprobs.sum(), (hidden, head))
    assert grads[0].shape == hidden.shape
    assert grads[1].shape == head.shape
    assert grads[1].abs().max().item() == 0.0


@pytest.mark.parametrize("tile_ids", [1, 2, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_logits_give_finite_values_and_gradients(tile_ids, dtype):
    # The largest logit comes first, in the middle, last; all equal; one far above all others.
    rows = [[3e4, 0, -3e4], [0, 3e4, 1], [-3e4, 0, 3e4], [-3e4] * 3, [1e-3, 100, 0]]
    logits = torch.tensor(rows, dtype=dtype, requires_grad=True)
    targets = torch.tensor([2, 0, 2, 1, 1])
    head = torch.eye(3, dtype=dtype)
    actual = token_logprobs(
        logits, head, targets, temperature=0.5, entropy_grad=True, tile_ids=tile_ids
    )
    expected = whole(logits, head, targets, 0.5)
    torch.testing.assert_close(actual, expected)
    (grad,) = torch.autograd.grad(sum(part.sum() for part in actual), logits)
    (expected_grad,) = torch.autograd.grad(sum(part.sum() for part in expected), logits)
    assert grad.isfinite().all()
    torch.testing.assert_close(grad, expected_grad)


@pytest.mark.parametrize("tile_ids", [1, None])
def test_an_id_of_probability_zero_changes_nothing_and_nan_stays_nan(tile_ids):
    head = torch.tensor([[-torch.inf], [1.0], [0.0]])
    hidden = torch.tensor([[1.0], [torch.nan]], requires_grad=True)
    targets = torch.tensor([1, 1])
    logprobs, entropy = token_logprobs(
        hidden, head, targets, temperature=1.0, entropy_grad=True, tile_ids=tile_ids
    )
    p = torch.tensor([1.0, 0.0]).softmax(0)
    assert logprobs[0].item() == pytest.approx(p[0].log().item(), rel=1e-6)
    assert entropy[0].item() == pytest.approx(-(p * p.log()).sum().item(), rel=1e-6)
    assert logprobs[1].isnan()
    assert entropy[1].isnan()
    (grad,) = torch.autograd.grad((logprobs + entropy).sum(), hidden)
    assert grad[1].isnan()


@pytest.mark.parametrize("target", [-1, 50])
def test_a_target_outside_the_vocabulary_has_logprob_nan(target):
    hidden, head, targets = make(2)
    targets[0] = target
    logprobs, entropy = token_logprobs(hidden, head, targets, temperature=1.0, tile_ids=20)
    assert logprobs.isnan().tolist() == [True, False]
    assert entropy.isfinite().all()


def test_bf16_hidden_states_and_head_are_computed_in_fp32():
    hidden, head, targets = make(6, dtype=torch.float32)
    hidden16, head16 = hidden.detach().bfloat16(), head.detach().bfloat16()
    logprobs, _ = token_logprobs(hidden16, head16, targets, temperature=1.0)
    expected, _ = whole(hidden16.float(), head16.float(), targets, 1.0)
    torch.testing.assert_close(logprobs, expected, atol=1e-6, rtol=0)
    assert logprobs.dtype == torch.float32


def test_fp32_masters_of_the_head_enter_rounded_and_get_fp32_gradients():
    hidden, head, targets = make(6, dtype=torch.float32)
    hidden16 = hidden.detach().bfloat16().requires_grad_()
    rounded = head.detach().bfloat16().float().requires_grad_()
    logprobs, _ = token_logprobs(hidden16, head, targets, temperature=1.0, tile_ids=16)
    expected, _ = whole(hidden16.float(), rounded, targets, 1.0)
    torch.testing.assert_close(logprobs, expected, atol=1e-6, rtol=0)
    grads = torch.autograd.grad(logprobs.sum(), (hidden16, head))
    expected_grads = torch.autograd.grad(expected.sum(), (hidden16, rounded))
    assert [grad.dtype for grad in grads] == [torch.bfloat16, torch.float32]
    torch.testing.assert_close(grads[1], expected_grads[1], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(grads[0], expected_grads[0])


@pytest.mark.parametrize("tile_ids", [1, 16, None])
def test_greedy_decoding_takes_the_lowest_id_of_equal_logits(tile_ids):
    hidden, head, targets = make(20)
    with torch.no_grad():
        # Whole numbers: equal logits are equal in any order of addition.
        for x in (hidden, head):
            x.mul_(100).round_()
        head[20:40] = head[:20]
        best = (hidden @ head.T).argmax(-1)
        targets[::2] = best[::2]
        targets[1::4] = best[1::4] + 20
        hits = greedy_hits(hidden, head, targets, tile_ids=tile_ids)
    assert torch.equal(hits, targets == best)
    assert greedy_hits(*make(0)).tolist() == []


class LiveBytes(TorchDispatchMode):
    """Remembers the most bytes that results of operations took at a time, beside `inputs`."""

    def __init__(self, *inputs):
        super().__init__()
        self.inputs = {x.untyped_storage()._cdata for x in inputs}
        self.live, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self.live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.live = {
            key: of
            for key, of in self.live.items()
            if key not in self.inputs and not of[0].expired()
        }
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return out


# BR-073
@pytest.mark.parametrize("num_ids", [64, 100])
def test_forward_and_backward_hold_the_logits_of_one_tile(num_ids):
    num_tokens, vocab, channels = 512, 5000, 32
    hidden, head, targets = make(num_tokens, channels, vocab, torch.float32)
    with LiveBytes(hidden, head, targets) as memory:
        logprobs, entropy = token_logprobs(
            hidden, head, targets, temperature=1.0, entropy_grad=True, tile_ids=num_ids
        )
        grads = torch.autograd.grad((logprobs + entropy).sum(), (hidden, head))
    gradients = 4 * channels * (num_tokens + vocab)
    # Logits, their gradients, a mask, the ids' part of the head's gradient, sums of tokens.
    tile = num_tokens * num_ids * (4 + 4 + 1) + num_ids * channels * 4
    assert gradients < memory.peak <= gradients + tile + 20 * 8 * num_tokens
    expected, expected_entropy = whole(hidden, head, targets, 1.0)
    expected_grads = torch.autograd.grad((expected + expected_entropy).sum(), (hidden, head))
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, atol=1e-5, rtol=1e-5)


def test_default_tiles_of_32k_tokens_fit_in_2_gib():
    num_tokens, channels, vocab = 32768, 6144, 200064
    tiles = logprob._tiles(num_tokens, vocab, None)
    assert [tile.start for tile in tiles] == [0, *(tile.stop for tile in tiles[:-1])]
    assert tiles[-1].stop == vocab
    num_ids = max(tile.stop - tile.start for tile in tiles)
    # FP32 logits and BF16 gradients; a BF16 tile of FP32 masters and its FP32 gradient; FP32
    # gradient of the hidden states, which is rounded when the tiles are gone.
    of_tile = num_tokens * num_ids * (4 + 2) + num_ids * channels * (2 + 4)
    assert 4 * num_tokens * channels + of_tile <= 2 << 30


@pytest.mark.parametrize(
    ("num_tokens", "num_ids"),
    [(1, 200064), (1000, 134144), (32768, 4096), (65536, 2048), (1 << 20, 2048)],
)
def test_default_tiles_narrow_with_the_number_of_tokens(num_tokens, num_ids):
    assert logprob._tiles(num_tokens, 200064, None)[0] == slice(0, num_ids)


# BR-073
def test_nothing_but_inputs_is_kept_for_the_backward():
    hidden, head, targets = make(64, vocab=1000, dtype=torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t, lambda t: t
    ):
        token_logprobs(hidden, head, targets, temperature=1.0, tile_ids=8)
    assert sorted(kept)[-2:] == [hidden.numel(), head.numel()]
    assert sum(kept) == hidden.numel() + head.numel() + 4 * 64


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.0, "tile_ids": 0}])
def test_impossible_options_are_refused(options):
    with pytest.raises(ValueError, match="must be"):
        token_logprobs(*make(2), **options)
