"""The choice among scores by itself."""

import pytest
import torch

from inference.kernels.index_select import reference


@pytest.fixture(params=["PREFILL_ROW", "DECODE_ROW", "WIDE_DECODE_ROW"])
def choose(request, kernel_device, monkeypatch):
    """`select_blocks`, as if each of the shapes were prefill's."""
    from inference.kernels.index_select import select_kernel

    monkeypatch.setattr(select_kernel, "PREFILL_ROW", getattr(select_kernel, request.param))

    def choose(scores, num_blocks, topk, local):
        out = torch.empty((len(num_blocks), topk), dtype=torch.int32, device=scores.device)
        select_kernel.select_blocks(scores, num_blocks, out, topk, local)
        return out

    return choose


@pytest.mark.parametrize("num_columns", [1, 16, 17, 64, 65, 257, 1300, 8500])
@pytest.mark.parametrize(("topk", "local"), [(16, 1), (1, 1), (3, 0), (16, 16)])
def test_selection_of_random_rows_is_the_references(
    choose, kernel_device, num_columns, topk, local
):
    generator = torch.Generator().manual_seed(num_columns)
    scores = torch.randn(4, num_columns, generator=generator)
    num_blocks = torch.tensor([num_columns, num_columns // 2 + 1, 1, 0]).int()
    found = choose(scores.to(kernel_device), num_blocks.to(kernel_device), topk, local)
    assert torch.equal(found.cpu(), reference.choose_blocks(scores, num_blocks, topk, local))


@pytest.mark.parametrize("num_columns", [40, 300, 1200, 8500])
def test_ties_infinities_and_nan_are_the_references(choose, kernel_device, num_columns):
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0, -1.0, 3.4028235e38])
    scores = values[torch.randint(len(values), (6, num_columns), generator=generator)]
    scores[4], scores[5] = torch.nan, 2.0
    num_blocks = torch.full((6,), num_columns).int()
    found = choose(scores.to(kernel_device), num_blocks.to(kernel_device), 16, 1)
    assert torch.equal(found.cpu(), reference.choose_blocks(scores, num_blocks, 16, 1))


def test_the_best_may_all_lie_in_one_progression(choose, kernel_device):
    scores = torch.zeros(2, 2100)
    best = torch.arange(7, 2100, 128)
    scores[:, best] = torch.arange(1.0, len(best) + 1)
    scores[1, :16] = 50.0
    num_blocks = torch.tensor([2100, 2100]).int()
    found = choose(scores.to(kernel_device), num_blocks.to(kernel_device), 16, 0)
    assert found[0].tolist() == best[-16:].tolist()
    assert found[1].tolist() == list(range(16))


def test_columns_beyond_a_rows_blocks_are_not_read(choose, kernel_device):
    wide = torch.full((2, 90), 1e30, device=kernel_device)
    wide[0, :20], wide[1, :3] = -1.0, -2.0
    found = choose(wide, torch.tensor([20, 3]).int().to(kernel_device), 4, 1)
    assert found.tolist() == [[0, 1, 2, 19], [0, 1, 2, -1]]


def test_rows_may_lie_apart(choose, kernel_device):
    wide = torch.rand(3, 100).to(kernel_device)
    num_blocks = torch.full((3,), 70).int().to(kernel_device)
    assert torch.equal(
        choose(wide[:, 10:80], num_blocks, 8, 1),
        choose(wide[:, 10:80].contiguous(), num_blocks, 8, 1),
    )


def test_a_choice_that_no_row_can_hold_is_refused(choose, kernel_device):
    scores, num_blocks = torch.zeros(1, 20), torch.ones(1).int()
    with pytest.raises(ValueError, match="topk_blocks=17 must lie between 1 and 16"):
        choose(scores, num_blocks, 17, 1)
    with pytest.raises(ValueError, match="local_blocks=3 between 0 and it"):
        choose(scores, num_blocks, 2, 3)
