import pytest
import torch

from inference.kernels.local_ids import kernel, local_ids, reference


def test_only_experts_held_here_have_a_place():
    ids = torch.tensor([[0, 3, 4], [7, 8, -1]]).int()
    assert local_ids(ids, 4, 4).tolist() == [[-1, -1, 0], [3, -1, -1]]


@pytest.mark.parametrize(("rows", "first", "count"), [(1, 0, 8), (7, 3, 2), (700, 5, 1), (0, 0, 4)])
def test_the_kernel_equals_the_reference(kernel_device, rows, first, count):
    ids = torch.randint(-1, 8, (rows, 3), generator=torch.Generator().manual_seed(rows)).int()
    found = kernel.local_ids(ids.to(kernel_device), first, count)
    assert torch.equal(found.cpu(), reference.local_ids(ids, first, count))


def test_ids_of_another_type_are_refused():
    with pytest.raises(TypeError, match="ids_RA is int64"):
        local_ids(torch.zeros(1, 1, dtype=torch.int64), 0, 1)
