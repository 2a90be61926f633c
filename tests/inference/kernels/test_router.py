import pytest
import torch

from inference.kernels.router import router


def identity_router(logits: list[list[float]], bias: list[float], **options):
    """Router whose logits are its inputs."""
    num_experts = len(bias)
    return router(torch.tensor(logits), torch.eye(num_experts), torch.tensor(bias), **options)


# BR-068
def test_the_bias_chooses_and_does_not_weigh():
    """Logits 2, 1, 0, -1: sigmoids 0.8808, 0.7311, 0.5, 0.2689."""
    logits = [[2.0, 1.0, 0.0, -1.0]]
    weights, ids = identity_router(logits, [0.0, 0.0, 0.0, 1.0], topk=2, scale=2.0)
    assert ids.tolist() == [[3, 0]]
    torch.testing.assert_close(weights, torch.tensor([[0.4678, 1.5322]]), rtol=0, atol=1e-4)
    weights, ids = identity_router(logits, [0.0] * 4, topk=2, scale=2.0)
    assert ids.tolist() == [[0, 1]]
    torch.testing.assert_close(weights, torch.tensor([[1.0929, 0.9071]]), rtol=0, atol=1e-4)


def test_ties_go_to_the_lower_expert():
    _, ids = identity_router([[0.5, 1.0, 1.0, 1.0, 0.5]], [0.0] * 5, topk=4, scale=1.0)
    assert ids.tolist() == [[1, 2, 3, 0]]


# BR-068
def test_scores_are_fp32_under_bf16_autocast():
    """4.0 and 4.001 are one number in BF16, whose step there is 0.03125."""
    logits, bias = [[4.0, 4.001, 0.0]], [0.0, 0.0, 0.0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weights, ids = identity_router(logits, bias, topk=1, scale=2.0)
        both, _ = identity_router(logits, bias, topk=2, scale=2.0)
    assert ids.tolist() == [[1]]
    assert weights.dtype == torch.float32
    assert both[0, 0] > both[0, 1]


# BR-068
def test_bf16_tokens_are_promoted_not_the_weights_rounded():
    weight = torch.tensor([[1.0], [1.0 + 2.0**-12]])
    _, ids = router(torch.ones(1, 1).bfloat16(), weight, torch.zeros(2), topk=1, scale=1.0)
    assert ids.tolist() == [[1]]


def test_weights_sum_to_the_scale():
    weights, ids = router(
        torch.randn(129, 16), torch.randn(8, 16), torch.randn(8), topk=3, scale=2.5
    )
    torch.testing.assert_close(weights.sum(-1), torch.full((129,), 2.5))
    assert ids.dtype == torch.int32
    assert all(len(set(row)) == 3 for row in ids.tolist())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_replaying_the_own_choice_changes_no_bit(dtype):
    args = (torch.randn(63, 16), torch.randn(8, 16), torch.randn(8))
    weights, ids = router(*args, topk=3, scale=2.0)
    again = router(*args, topk=3, scale=2.0, replay_ids_TA=ids.to(dtype))
    assert torch.equal(again[0], weights)
    assert torch.equal(again[1], ids)


def test_replay_takes_the_given_experts_and_its_own_scores():
    replay = torch.tensor([[3, 1]])
    weights, ids = router(
        torch.tensor([[2.0, 1.0, 0.0, -1.0]]),
        torch.eye(4),
        torch.zeros(4),
        topk=2,
        scale=2.0,
        replay_ids_TA=replay,
    )
    assert ids.tolist() == [[3, 1]]
    # 2 * 0.2689 / (0.2689 + 0.7311) and the rest
    torch.testing.assert_close(weights, torch.tensor([[0.5379, 1.4621]]), rtol=0, atol=1e-4)


def test_gradients_flow_through_the_chosen_scores_alone():
    x, weight = torch.randn(7, 16), torch.randn(8, 16, requires_grad=True)
    bias = torch.randn(8)
    weights, ids = router(x, weight, bias, topk=3, scale=2.0)
    a = torch.randn(7, 3)  # dL/dw
    weights.backward(a)
    with torch.no_grad():
        ids = ids.long()
        s = (x @ weight.T).sigmoid().gather(-1, ids)
        w = s / s.sum(-1, keepdim=True)
        ds = 2 * (a - (w * a).sum(-1, keepdim=True)) / s.sum(-1, keepdim=True)
        d_logits = torch.zeros(7, 8).scatter_(-1, ids, ds * s * (1 - s))
    torch.testing.assert_close(weight.grad, d_logits.T @ x)


def test_unrecorded_replay_rows_are_refused():
    args = (torch.randn(3, 16), torch.randn(8, 16), torch.randn(8))
    for bad in (-1, 8):
        replay = torch.tensor([[0, 1], [2, bad], [4, 5]])
        with pytest.raises(ValueError, match=rf"replay_ids_TA\[1\] = \[2, {bad}\] names no"):
            router(*args, topk=2, scale=2.0, replay_ids_TA=replay)


# BR-068
def test_bf16_router_weights_are_refused():
    x = torch.randn(3, 16)
    with pytest.raises(TypeError, match="weight_EC is bfloat16, needs float32"):
        router(x, torch.randn(8, 16).bfloat16(), torch.randn(8), topk=2, scale=1.0)
    with pytest.raises(TypeError, match="bias_E is bfloat16, needs float32"):
        router(x, torch.randn(8, 16), torch.randn(8).bfloat16(), topk=2, scale=1.0)


def test_no_tokens_route_nowhere():
    weights, ids = router(torch.zeros(0, 16), torch.randn(8, 16), torch.zeros(8), topk=2, scale=1.0)
    assert weights.shape == ids.shape == (0, 2)
