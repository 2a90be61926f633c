"""The hash kernel against the reference, in the interpreter where there is no GPU."""

import random

import pytest
import torch
from torch import Tensor

from inference.kernels.tensor_hash import kernel, reference, tensor_hash

SALT = reference.salt("w")


def hashes(
    tensor: Tensor, offsets: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None
) -> tuple[int, int]:
    """(kernel's, reference's)."""
    offsets = (0,) * tensor.ndim if offsets is None else offsets
    shape = tuple(tensor.shape) if shape is None else shape
    return (
        kernel.tensor_hash(tensor, SALT, offsets, shape),
        reference.tensor_hash(tensor, SALT, offsets, shape),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
def test_every_dtype_hashes_as_the_reference(dtype, kernel_device):
    bits = torch.randint(0, 256, (40, 256), dtype=torch.uint8).to(kernel_device)
    found, wanted = hashes(bits.view(dtype))
    assert found == wanted


@pytest.mark.parametrize("salt", [0, 1 << 63, (1 << 64) - 1])
def test_every_bit_of_the_salt_counts(salt, kernel_device):
    tensor = torch.randn(5, device=kernel_device)
    assert kernel.tensor_hash(tensor, salt, (0,), (5,)) == reference.tensor_hash(
        tensor, salt, (0,), (5,)
    )


@pytest.mark.parametrize("shape", [(), (7,), (1, 1), (13, 9), (5, 6, 7), (1, 8, 1, 3)])
def test_rectangles_and_layouts_hash_as_the_reference(shape, kernel_device):
    rng = random.Random(0)
    tensor = torch.randn(shape).to(kernel_device)
    for _ in range(8):
        cut = tuple(slice(*sorted(rng.choices(range(size + 1), k=2))) for size in shape)
        offsets = tuple(part.start for part in cut)
        found, wanted = hashes(tensor[cut], offsets, shape)
        assert found == wanted
    if shape:
        found, wanted = hashes(tensor.permute(*reversed(range(len(shape)))))
        assert found == wanted


def test_more_dimensions_than_the_kernel_walks(kernel_device):
    tensor = torch.randn(3, 4, 5, 6, 7).to(kernel_device)
    found, wanted = hashes(tensor[:, 1:3, ::2, 1:, :5], (0, 1, 0, 1, 0), (3, 4, 5, 6, 7))
    assert found == wanted


def test_several_tiles_a_program_add_up(kernel_device, monkeypatch):
    monkeypatch.setattr(kernel, "NUM_PROGRAMS", 3)
    monkeypatch.setattr(kernel, "BLOCK", 64)
    tensor = torch.randn(37, 50).to(kernel_device)
    for part, offsets in ((tensor, (0, 0)), (tensor[3:, 7:40], (3, 7))):
        found, wanted = hashes(part, offsets, (37, 50))
        assert found == wanted


def test_places_beyond_32_bits_are_told_apart(kernel_device):
    row = torch.tensor([[1.0, 2.0]], device=kernel_device)
    for at in (0, 1 << 31, (1 << 40) - 1):
        found, wanted = hashes(row, (at, 0), (1 << 40, 2))
        assert found == wanted
    column = torch.randn(3, 1, device=kernel_device)
    found, wanted = hashes(column, (2, 1 << 35), (5, 1 << 36))
    assert found == wanted


def test_an_empty_tensor_hashes_to_0(kernel_device):
    assert kernel.tensor_hash(torch.zeros(0, 5, device=kernel_device), SALT, (0, 0), (0, 5)) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_weight_on_the_gpu(dtype, cuda):
    weight = torch.randn(3001, 6144).to(dtype)
    on_gpu = weight.to(cuda)
    assert tensor_hash(on_gpu, name="w") == tensor_hash(weight, name="w")
    cut = (slice(5, 2000), slice(16, 4000))
    options = {"name": "w", "offsets": (5, 16), "shape": (3001, 6144)}
    assert tensor_hash(on_gpu[cut], **options) == tensor_hash(weight[cut], **options)
