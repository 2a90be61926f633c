"""The additive hash: Σ mix64(2i + 1, bits_i, salt(name)) mod 2^64 over global places i.

A sum over places, so the hashes of disjoint rectangles that cover a tensor add up to its own, and
trainer and worker compare without gathering. At a fixed place the term is a bijection of the bits:
no single changed element goes unseen. The place enters the term, so swapped rows are seen too.
"""

import hashlib

import torch
from torch import Tensor

from inference.kernels.mix64 import GOLDEN, as_int64, mix64

MASK64 = (1 << 64) - 1
# Elements hashed at a time: temporaries of half a MiB stay in the cache.
MAX_ELEMENTS = 1 << 16

_BITS = {
    torch.float32: (torch.int32, 0xFFFFFFFF),
    torch.bfloat16: (torch.int16, 0xFFFF),
    torch.float8_e4m3fn: (torch.uint8, 0xFF),
    torch.uint8: (torch.uint8, 0xFF),
}
HASHABLE_DTYPES = tuple(_BITS)


def salt(name: str) -> int:
    """64 bits of the tensor's name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def tensor_hash(tensor: Tensor, salt: int, offsets: tuple[int, ...], shape: tuple[int, ...]) -> int:
    if tensor.numel() == 0:
        return 0
    if tensor.numel() <= MAX_ELEMENTS:
        return _hash_piece(tensor, salt, offsets, shape)
    dim = max(range(tensor.ndim), key=lambda d: tensor.shape[d])
    half = tensor.shape[dim] // 2
    first, second = tensor.split([half, tensor.shape[dim] - half], dim)
    moved = (*offsets[:dim], offsets[dim] + half, *offsets[dim + 1 :])
    return (
        tensor_hash(first, salt, offsets, shape) + tensor_hash(second, salt, moved, shape)
    ) & MASK64


def _hash_piece(tensor: Tensor, salt: int, offsets: tuple[int, ...], shape: tuple[int, ...]) -> int:
    view, mask = _BITS[tensor.dtype]
    bits = tensor.detach().reshape(-1).view(view).long() & mask
    place = _global_places(tuple(tensor.shape), offsets, shape, tensor.device)
    keys = mix64((2 * place + 1) * as_int64(GOLDEN) + as_int64(salt))
    return int(mix64(keys ^ bits).sum()) & MASK64


def _global_places(
    local_shape: tuple[int, ...],
    offsets: tuple[int, ...],
    shape: tuple[int, ...],
    device: torch.device,
) -> Tensor:
    """Row-major place in the global tensor of each element of a rectangle of it, flattened."""
    rest = torch.arange(_product(local_shape), device=device)
    place = torch.zeros_like(rest)
    stride = 1
    (_, first_offset, _), *inner = _fold(local_shape, offsets, shape)
    for size, offset, global_size in reversed(inner):
        place += (rest % size + offset) * stride
        rest = rest // size
        stride *= global_size
    return place + (rest + first_offset) * stride


def _fold(
    local_shape: tuple[int, ...], offsets: tuple[int, ...], shape: tuple[int, ...]
) -> list[tuple[int, int, int]]:
    """Join each dimension held whole to the one before it: fewer divisions, the same places."""
    folded: list[tuple[int, int, int]] = []
    for size, offset, global_size in zip(local_shape, offsets, shape, strict=True):
        if folded and size == global_size:
            before = folded.pop()
            folded.append((before[0] * size, before[1] * size, before[2] * size))
        else:
            folded.append((size, offset, global_size))
    return folded or [(1, 0, 1)]


def _product(sizes: tuple[int, ...]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
