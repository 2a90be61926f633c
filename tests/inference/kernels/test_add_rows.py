import pytest
import torch

from inference.kernels.add_rows import add_rows, kernel, reference


def case(num_tokens, num_ranks, num_rows, num_own, width, dtype, device):
    generator = torch.Generator().manual_seed(num_tokens)
    total = num_rows + num_own
    y, rows, own = (
        torch.randn(n, width, generator=generator).to(device, dtype)
        for n in (num_tokens, num_rows, num_own)
    )
    index = torch.randint(-1, total, (num_tokens, num_ranks), generator=generator)
    return y, rows, own, index.int().to(device)


def test_rows_are_added_in_the_order_of_the_ranks_and_the_token_last():
    # In float32 1e8 + 1 - 1e8 is 0 and 1e8 - 1e8 + 1 is 1: the order shows.
    rows, own = torch.tensor([[1e8], [1.0]]), torch.tensor([[-1e8]])
    y = torch.zeros(3, 1)
    index = torch.tensor([[0, 1, 2], [0, 2, 1], [-1, 1, -1]]).int()
    add_rows(y, rows, own, index)
    assert y.flatten().tolist() == [0, 1, 1]
    y = torch.tensor([[1.0]])
    add_rows(y, rows, own, torch.tensor([[0, 2, -1]]).int())
    assert y.item() == 1


def test_bfloat16_is_rounded_once():
    y = torch.tensor([[1.0]]).bfloat16()
    rows = torch.tensor([[2.0**-9], [2.0**-9], [2.0**-9]]).bfloat16()  # each alone is lost
    add_rows(y, rows, rows[:0], torch.tensor([[0, 1, 2]]).int())
    assert y.item() == 1 + 2.0**-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 0, 4), (5, 4, 7, 3, 36), (3, 2, 0, 4, 1500), (2, 8, 5, 0, 2048)]
)
def test_the_kernel_equals_the_reference(kernel_device, shape, dtype):
    y, rows, own, index = case(*shape, dtype, kernel_device)
    wanted = y.clone()
    reference.add_rows(wanted, rows, own, index)
    kernel.add_rows(y, rows, own, index)
    assert torch.equal(y, wanted)


def test_rows_of_a_wider_matrix_are_changed_in_place(kernel_device):
    _, rows, own, index = case(3, 2, 4, 1, 16, torch.float32, kernel_device)
    wide = torch.zeros(5, 40, device=kernel_device)
    kernel.add_rows(wide[1:4, 8:24], rows, own, index)
    wanted = torch.zeros(3, 16, device=kernel_device)
    reference.add_rows(wanted, rows, own, index)
    assert torch.equal(wide[1:4, 8:24], wanted)
    wide[1:4, 8:24] = 0
    assert not wide.any()


def test_no_tokens(kernel_device):
    kernel.add_rows(*case(0, 2, 4, 1, 16, torch.float32, kernel_device))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": torch.zeros(2, 5)}, "rows_RC has shape"),
        ({"own": torch.zeros(2, 4).half()}, "own_XC is float16, needs float32"),
        ({"index": torch.zeros(3, 2).int()}, "index_SW has shape"),
        ({"index": torch.zeros(2, 2).long()}, "index_SW is int64, needs int32"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change, message):
    given = {"y": torch.zeros(2, 4), "rows": torch.zeros(1, 4), "own": torch.zeros(1, 4)}
    given |= {"index": torch.zeros(2, 2).int()} | change
    with pytest.raises((ValueError, TypeError), match=message):
        add_rows(given["y"], given["rows"], given["own"], given["index"])


@pytest.mark.gpu
def test_equals_the_reference_at_the_width_of_m3(cuda):
    y, rows, own, index = case(257, 8, 900, 200, 6144, torch.bfloat16, cuda)
    wanted = y.clone()
    reference.add_rows(wanted, rows, own, index)
    add_rows(y, rows, own, index)
    assert torch.equal(y, wanted)
