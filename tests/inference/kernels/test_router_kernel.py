import pytest
import torch

from inference.kernels.router import kernel, reference, router


def make(num_tokens, hidden, num_experts, dtype, device, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, hidden, generator=g).to(dtype)
    weight = torch.randn(num_experts, hidden, generator=g) / hidden**0.5
    bias = torch.randn(num_experts, generator=g) * 0.1
    return x.to(device), weight.to(device), bias.to(device)


def agree(found, wanted, atol=5e-6):
    """Weights to FP32's last bits; the choice exactly (random scores do not tie)."""
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=atol)
    assert torch.equal(found[1], wanted[1])


@pytest.mark.parametrize(
    ("num_tokens", "hidden", "num_experts", "topk"),
    [(1, 70, 5, 3), (7, 64, 16, 1), (18, 40, 20, 4), (65, 33, 8, 8)],
)
def test_equals_the_reference(kernel_device, num_tokens, hidden, num_experts, topk):
    x, weight, bias = make(num_tokens, hidden, num_experts, torch.float32, kernel_device)
    found = kernel.router(x, weight, bias, topk, 2.0, None)
    agree(found, reference.router(x, weight, bias, topk, 2.0, None))
    assert found[1].dtype == torch.int32


def test_few_and_many_tokens_give_the_choice(kernel_device):
    x, weight, bias = make(kernel.MAX_FEW + 1, 150, 6, torch.float32, kernel_device)
    for num_tokens in (kernel.MAX_FEW, kernel.MAX_FEW + 1):
        found = kernel.router(x[:num_tokens], weight, bias, 2, 1.0, None)
        agree(found, reference.router(x[:num_tokens], weight, bias, 2, 1.0, None))


def test_ties_go_to_the_lower_expert(kernel_device):
    logits = torch.tensor([[0.5, 1.0, 1.0, 1.0, 0.5], [0.0] * 5], device=kernel_device)
    weight = torch.eye(5, device=kernel_device)
    _, ids = kernel.router(logits, weight, torch.zeros(5, device=kernel_device), 4, 1.0, None)
    assert ids.tolist() == [[1, 2, 3, 0], [0, 1, 2, 3]]


def test_the_bias_chooses_and_the_scores_weigh(kernel_device):
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], device=kernel_device)
    weight = torch.eye(4, device=kernel_device)
    bias = torch.tensor([0.0, 0.0, 0.0, 1.0], device=kernel_device)
    weights, ids = kernel.router(logits, weight, bias, 2, 2.0, None)
    assert ids.tolist() == [[3, 0]]
    wanted = torch.tensor([[0.4678, 1.5322]])
    torch.testing.assert_close(weights.cpu(), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_replay_takes_the_given_experts_in_their_order(kernel_device, dtype):
    x, weight, bias = make(5, 40, 7, torch.float32, kernel_device)
    own = kernel.router(x, weight, bias, 3, 2.0, None)
    again = kernel.router(x, weight, bias, 3, 2.0, own[1].to(dtype))
    assert all(torch.equal(a, b) for a, b in zip(own, again, strict=True))
    replay = own[1].flip(-1).to(dtype)
    agree(
        kernel.router(x, weight, bias, 3, 2.0, replay),
        reference.router(x, weight, bias, 3, 2.0, replay),
    )


def test_a_row_of_nan_names_experts_and_spoils_no_other(kernel_device):
    x, weight, bias = make(3, 40, 7, torch.float32, kernel_device)
    wanted = kernel.router(x, weight, bias, 3, 2.0, None)
    x[1] = torch.nan
    found = kernel.router(x, weight, bias, 3, 2.0, None)
    assert ((found[1] >= 0) & (found[1] < 7)).all()
    for row in (0, 2):
        assert torch.equal(found[0][row], wanted[0][row])
        assert torch.equal(found[1][row], wanted[1][row])


def test_no_tokens(kernel_device):
    x, weight, bias = make(0, 40, 7, torch.float32, kernel_device)
    weights, ids = kernel.router(x, weight, bias, 3, 2.0, None)
    assert weights.shape == ids.shape == (0, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 16, 33, 128, 512, 4097])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_are_fp32_at_the_sizes_of_m3(cuda, num_tokens, dtype):
    """Three BF16 products are one of FP32: as near to FP64 as FP32 arithmetic is."""
    x, weight, bias = make(num_tokens, 6144, 128, dtype, cuda)
    found_weights, found_ids = router(x, weight, bias, topk=4, scale=2.0)
    exact = (x.double() @ weight.double().T).sigmoid()
    ranked = (exact + bias.double()).sort(-1, descending=True)
    is_clear_T = (ranked.values[:, :4] - ranked.values[:, 1:5] > 2e-6).all(-1)
    assert is_clear_T.float().mean() > 0.98
    assert torch.equal(found_ids[is_clear_T].long(), ranked.indices[is_clear_T, :4])
    chosen = exact.gather(-1, found_ids.long())
    wanted = 2 * chosen / chosen.sum(-1, keepdim=True)
    torch.testing.assert_close(found_weights.double(), wanted, rtol=3e-6, atol=0)


@pytest.mark.gpu
def test_gradients_flow_on_cuda_with_the_kernels_choice(cuda):
    x, weight, bias = make(65, 256, 16, torch.bfloat16, cuda)
    kernel_ids = router(x, weight, bias, topk=4, scale=2.0)[1]
    weights, ids = router(x, weight.requires_grad_(), bias, topk=4, scale=2.0)
    assert torch.equal(ids, kernel_ids)
    (grad,) = torch.autograd.grad(weights[:, 0].sum(), weight)
    assert grad.abs().sum() > 0
