from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from inference.kernels.experts_mlp import experts_mlp, reference, rows_kernel
from inference.kernels.experts_mlp.choices import Choices
from inference.kernels.experts_mlp.function import ExpertsMLP
from inference.kernels.mxfp8 import dequantize, quantize

ALPHA, LIMIT = 1.702, 2.0
"""A limit that many of these activations reach."""


def random_ids(num_tokens: int, choices: int, experts: int, nobodys: float = 0.3) -> Tensor:
    generator, shape = torch.Generator().manual_seed(num_tokens), (num_tokens, choices)
    ids = torch.randint(0, experts, shape, generator=generator, dtype=torch.int32)
    return torch.where(torch.rand(shape, generator=generator) < nobodys, -1, ids)


IDS = {
    "mixed": (random_ids(37, 3, 5), 5),
    "empty-experts": (random_ids(20, 4, 2, 0.0) * 3 + 1, 9),
    "one-expert": (torch.full((19, 2), 3, dtype=torch.int32), 4),
    "nobody": (torch.full((4, 2), -1, dtype=torch.int32), 3),
    "one-token": (torch.tensor([[2, -1, 0]], dtype=torch.int32), 3),
    "no-token": (torch.zeros(0, 2, dtype=torch.int32), 3),
}


@pytest.fixture(params=IDS)
def ids_and_experts(request, kernel_device) -> tuple[Tensor, int]:
    ids_TA, num_experts = IDS[request.param]
    return ids_TA.to(kernel_device), num_experts


def test_rows_are_the_choices_sorted_by_expert(ids_and_experts):
    check_rows(*ids_and_experts)


def test_more_choices_than_are_compared_at_once_are_sorted_too(kernel_device):
    check_rows(random_ids(1100, 2, 20).to(kernel_device), 20)


def check_rows(ids_TA: Tensor, num_experts: int) -> None:
    choices = Choices.of(ids_TA, num_experts)
    flat_P = ids_TA.flatten()
    wanted_X = flat_P.argsort(stable=True)[int((flat_P < 0).sum()) :]
    assert torch.equal(choices.choice_X.long(), wanted_X)
    rows_X = torch.arange(choices.num_rows, device=ids_TA.device)
    assert torch.equal(choices.row_P[wanted_X].long(), rows_X)
    counts = flat_P[flat_P >= 0].long().bincount(minlength=num_experts)
    assert choices.end_E.tolist() == counts.cumsum(0).tolist()
    ends = [0, *choices.end_E.tolist()]
    spans = [(expert, ends[expert], ends[expert + 1]) for expert in range(num_experts)]
    assert list(choices.hit) == [span for span in spans if span[1] < span[2]]


@pytest.mark.parametrize("width", [8, 44])
def test_scattered_rows_combine_to_a_multiple_of_the_token(ids_and_experts, width):
    ids_TA, num_experts = ids_and_experts
    choices = Choices.of(ids_TA, num_experts)
    x_TC = torch.randn(len(ids_TA), width, device=ids_TA.device)
    x_XC = rows_kernel.scatter(x_TC, choices)
    assert torch.equal(x_XC, x_TC[choices.choice_X.long() // ids_TA.shape[1]])
    wanted_TC = torch.zeros_like(x_TC)
    for a in range(ids_TA.shape[1]):
        wanted_TC += torch.where(ids_TA[:, a, None] >= 0, x_TC, 0)
    assert torch.equal(rows_kernel.combine(x_XC, choices), wanted_TC)


@pytest.mark.parametrize("width", [4, 24])
def test_activation_and_its_gradients_are_those_of_the_reference(ids_and_experts, width):
    ids_TA, num_experts = ids_and_experts
    choices = Choices.of(ids_TA, num_experts)
    gate_up = 2 * torch.randn(choices.num_rows, 2 * width, device=ids_TA.device)
    gate_up[:1, 0], gate_up[:1, -1], gate_up[1:2, -1] = LIMIT, LIMIT, -LIMIT
    weights = torch.rand(ids_TA.shape, device=ids_TA.device)
    grad = torch.randn(choices.num_rows, width, device=ids_TA.device)
    leaves = gate_up.double().requires_grad_(), weights.double().requires_grad_()
    weights_X1 = leaves[1].flatten()[choices.choice_X.long(), None]
    wanted = reference.swiglu_oai(leaves[0], ALPHA, LIMIT, beta=1.0) * weights_X1
    wanted_grads = torch.autograd.grad(wanted, leaves, grad.double())
    found = rows_kernel.activation(gate_up, weights, choices, ALPHA, LIMIT)
    found_grads = rows_kernel.activation_backward(grad, gate_up, weights, choices, ALPHA, LIMIT)
    pairs = zip((found, grad, *found_grads), (wanted, wanted, *wanted_grads), strict=True)
    for a, b in pairs:
        # A dozen operations in FP32, the gradient of a weight summed over a row.
        torch.testing.assert_close(a, b.float(), rtol=2e-5, atol=2e-5)


def test_nan_in_a_gate_or_an_up_stays_nan(kernel_device):
    choices = Choices.of(torch.tensor([[0, 1]], dtype=torch.int32, device=kernel_device), 2)
    # [row, gates and ups of 2]: each row is NaN once.
    gate_up = torch.tensor(
        [[torch.nan, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, torch.nan]], device=kernel_device
    )
    weights, grad = torch.ones(1, 2, device=kernel_device), torch.ones(2, 2, device=kernel_device)
    found = rows_kernel.activation(gate_up, weights, choices, ALPHA, LIMIT)
    assert found.isnan().tolist() == [[True, False], [False, True]]
    _, grad_weights = rows_kernel.activation_backward(grad, gate_up, weights, choices, ALPHA, LIMIT)
    assert grad.isnan().tolist() == [[True, False], [False, True]]  # the result again
    assert grad_weights.isnan().all()


def experts_of(ids_TA: Tensor, num_experts: int, hidden: int, width: int, dtype=torch.float32):
    device = ids_TA.device
    return (
        torch.randn(len(ids_TA), hidden, device=device).to(dtype),
        ids_TA,
        torch.rand(ids_TA.shape, device=device),
        (torch.randn(num_experts, 2 * width, hidden, device=device) / hidden**0.5).to(dtype),
        (torch.randn(num_experts, hidden, width, device=device) / width**0.5).to(dtype),
    )


def outputs(run, x, ids, weights, gate_up, down, frozen=False) -> list[Tensor]:
    """Output and gradients for a gradient that depends on the shape alone."""
    leaves = [x, weights] if frozen else [x, weights, gate_up, down]
    for leaf in leaves:
        leaf.requires_grad_()
    out = run(x, ids, weights, gate_up, down)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    return [out, *torch.autograd.grad(out, leaves, grad.to(out.device, out.dtype))]


def kernels(*arguments) -> Tensor:
    return ExpertsMLP.apply(*arguments, ALPHA, LIMIT)


def by_reference(*arguments) -> Tensor:
    return reference.experts_mlp(*arguments, alpha=ALPHA, limit=LIMIT)


def agree(found: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        a, b = a.double().cpu(), b.double().cpu()
        assert (a - b).norm() <= tolerance * b.norm(), f"tensor {i}"


def test_all_parts_together_are_the_reference(ids_and_experts):
    arguments = experts_of(*ids_and_experts, hidden=16, width=12)
    agree(outputs(kernels, *arguments), outputs(by_reference, *arguments), 1e-6)


def test_what_needs_no_gradient_gets_none(kernel_device):
    arguments = experts_of(random_ids(9, 2, 3).to(kernel_device), 3, hidden=16, width=12)
    wanted = outputs(by_reference, *arguments)[1:]
    leaves = [arguments[i] for i in (0, 2, 3, 4)]
    for i, leaf in enumerate(leaves):
        for other in leaves:
            other.requires_grad_(other is leaf)
        kernels(*arguments).backward(
            torch.randn(9, 16, generator=torch.Generator().manual_seed(3)).to(kernel_device)
        )
        assert [other.grad is not None for other in leaves] == [other is leaf for other in leaves]
        agree([leaf.grad], [wanted[i]], 1e-6)
        leaf.grad = None


def test_rows_in_any_order_in_memory_and_expanded_gradients_are_taken(kernel_device):
    x, ids, *rest = experts_of(random_ids(9, 2, 3).to(kernel_device), 3, hidden=16, width=12)
    wide = torch.cat([x, x], 1).requires_grad_()
    transposed = ids.T.contiguous().T
    x.requires_grad_()
    wanted = torch.autograd.grad(by_reference(x, ids, *rest).sum(), x)
    found = torch.autograd.grad(kernels(wide[:, 16:], transposed, *rest).sum(), wide)
    agree([found[0][:, 16:]], list(wanted), 1e-6)


def test_frozen_mxfp8_is_the_product_with_widened_weights(ids_and_experts):
    *head, gate_up, down = experts_of(*ids_and_experts, hidden=32, width=32)
    frozen = [quantize(weight.bfloat16()) for weight in (gate_up, down)]
    widened = [dequantize(*weight, torch.float32) for weight in frozen]
    found = outputs(kernels, *head, *frozen, frozen=True)
    # A weight's gradient is a sum of terms of both signs.
    agree(found, outputs(by_reference, *head, *widened, frozen=True), 1e-5)


def op(*arguments) -> Tensor:
    return experts_mlp(*arguments, alpha=ALPHA, limit=LIMIT)


@pytest.mark.gpu
@pytest.mark.parametrize("nobodys", [0.0, 0.6])
@pytest.mark.parametrize("num_tokens", [0, 1, 63, 2000])
def test_bf16_on_the_gpu_is_the_reference_rounded(cuda, num_tokens, nobodys):
    ids = random_ids(num_tokens, 4, 12, nobodys)
    ids[ids == 7] = 11  # experts without rows, at the end too
    ids[ids == 11] = 3
    arguments = experts_of(ids.to(cuda), 12, 256, 128, torch.bfloat16)
    wide = [t.detach().float() if t.dtype == torch.bfloat16 else t for t in arguments]

    def far_from_the_limit(run: Callable[..., Tensor]) -> list[Tensor]:
        """A gradient ends at the limit: which side a rounded activation is on would be seen."""
        return outputs(lambda *given: run(*given, alpha=ALPHA, limit=20.0), *arguments_of[run])

    arguments_of = {experts_mlp: arguments, reference.experts_mlp: wide}
    found = far_from_the_limit(experts_mlp)
    # Up to five roundings on the way, each of 2^-9 at most.
    agree(found, far_from_the_limit(reference.experts_mlp), 5 * 2**-9)
    again = far_from_the_limit(experts_mlp)
    assert all(map(torch.equal, found, again))


@pytest.mark.gpu
def test_frozen_mxfp8_on_the_gpu_is_bf16_with_widened_weights(cuda):
    ids = random_ids(300, 4, 12).to(cuda)
    *head, gate_up, down = experts_of(ids, 12, 256, 128, torch.bfloat16)
    frozen = [quantize(weight) for weight in (gate_up, down)]
    widened = [dequantize(*weight, torch.bfloat16) for weight in frozen]
    found = outputs(op, *head, *frozen, frozen=True)
    # The same products in another order: a neighbouring BF16 number here and there.
    agree(found, outputs(op, *head, *widened, frozen=True), 2**-9)


@pytest.mark.gpu
def test_fp32_on_the_gpu_takes_the_reference(cuda):
    arguments = experts_of(random_ids(50, 2, 5).to(cuda), 5, hidden=16, width=12)
    on_cpu = [t.detach().cpu() for t in arguments]
    agree(outputs(op, *arguments), outputs(by_reference, *on_cpu), 1e-5)


@pytest.mark.gpu
def test_widths_that_the_grouped_product_cannot_take_are_refused(cuda):
    arguments = experts_of(random_ids(5, 2, 3).to(cuda), 3, 20, 8, torch.bfloat16)
    with pytest.raises(ValueError, match="C=20 and I=8 must be multiples of 8"):
        op(*arguments)
