"""The additive hash: the sum over units of mix64(fold((low ^ key) * LOW) + high * HIGH) mod 2^64.

A unit is a few neighbouring elements, 16 bytes at most: `low` and `high` are its bytes, little
endian, as two 64-bit words. The key is that of its place, which counts units through the global
tensor, so the hashes of disjoint rectangles add up to that of the whole, and trainer and worker
compare without gathering.

For given `high` the term is a bijection of `low`, and the other way round: no change within one
word of a single unit goes unseen, and a change of both words with a chance of 2^-64. `fold` (the
upper half onto the lower one) and HIGH keep what looks alike in both words, as changed signs do,
from cancelling: one or two changed bits of `low`, or any changed signs, are made up for by a
certain change of seven bits or more of `high` only.

The keys, `place * GOLDEN ^ salt`, need no mix of their own. Multiples of GOLDEN that are less than
2^31 (2^46) apart differ by more than 2^32 (2^16): units of four (two) bytes so near to one another
never give the same word, whatever they hold.
"""

import hashlib

import torch
from torch import Tensor

from inference.kernels.mix64 import GOLDEN, as_int64, mix64, xor_shifted

MASK64 = (1 << 64) - 1
LOW, HIGH = 0xD6E8FEB86659FD93, 0xE7037ED1A0B428DB
"""Odd factors without a pattern."""
# Elements hashed at a time: temporaries of half a MiB stay in the cache.
MAX_ELEMENTS = 1 << 16

HASHABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8)
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def salt(name: str, unit: int) -> int:
    """64 bits of the tensor's name and the elements of a unit."""
    digest = hashlib.blake2b(name.encode(), digest_size=8, salt=unit.to_bytes(2, "little"))
    return int.from_bytes(digest.digest(), "little")


def tensor_hash(
    tensor: Tensor, salt: int, offsets: tuple[int, ...], shape: tuple[int, ...], unit: int
) -> int:
    if tensor.numel() == 0:
        return 0
    if tensor.numel() <= max(MAX_ELEMENTS, unit):
        return _hash_piece(tensor, salt, offsets, shape, unit)
    steps = [1] * (tensor.ndim - 1) + [unit]
    dim = max(range(tensor.ndim), key=lambda d: tensor.shape[d] // steps[d])
    half = tensor.shape[dim] // steps[dim] // 2 * steps[dim]
    first, second = tensor.split([half, tensor.shape[dim] - half], dim)
    moved = (*offsets[:dim], offsets[dim] + half, *offsets[dim + 1 :])
    return (
        tensor_hash(first, salt, offsets, shape, unit)
        + tensor_hash(second, salt, moved, shape, unit)
    ) & MASK64


def is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor.float()).all())


def places_of(offsets: tuple[int, ...], shape: tuple[int, ...], unit: int) -> tuple[int, list[int]]:
    """(place of a rectangle's first unit, steps of its dimensions in places)."""
    steps = [1] * len(shape)
    for dim in reversed(range(len(shape) - 1)):
        inner_size = shape[dim + 1] // (unit if dim + 2 == len(shape) else 1)
        steps[dim] = steps[dim + 1] * inner_size
    first = sum(offset * step for offset, step in zip(offsets[:-1], steps[:-1], strict=True))
    return first + (offsets[-1] // unit if offsets else 0), steps


def _hash_piece(
    tensor: Tensor, salt: int, offsets: tuple[int, ...], shape: tuple[int, ...], unit: int
) -> int:
    unit_bytes = unit * tensor.element_size()
    # A copy, for the bytes of a view need not be aligned as words are.
    packed = tensor.detach().clone(memory_format=torch.contiguous_format).view(-1)
    words = packed.view(_WORDS[unit_bytes]).long()
    low = words[::2] if unit_bytes == 16 else words & as_int64((1 << 8 * unit_bytes) - 1)
    keys = _unit_places(tensor, offsets, shape, unit) * as_int64(GOLDEN) ^ as_int64(salt)
    mixed = xor_shifted((low ^ keys) * as_int64(LOW), 32)
    if unit_bytes == 16:
        mixed += words[1::2] * as_int64(HIGH)
    return int(mix64(mixed).sum()) & MASK64


def _unit_places(
    tensor: Tensor, offsets: tuple[int, ...], shape: tuple[int, ...], unit: int
) -> Tensor:
    """Row-major place in the global tensor of each unit of a rectangle of it, flattened."""
    first, steps = places_of(offsets, shape, unit)
    places = torch.tensor(first, device=tensor.device)
    for dim, step in enumerate(steps):
        size = tensor.shape[dim] // (unit if dim + 1 == tensor.ndim else 1)
        places = places[..., None] + torch.arange(size, device=tensor.device) * step
    return places.reshape(-1)
