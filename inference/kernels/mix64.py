"""A 64-bit integer mix on tensors: the randomness of sampling and of the weight hash.

Torch has no unsigned 64-bit arithmetic; int64 wraps modulo 2^64 and carries the same bits.
"""

from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
"""Odd, near 2^64 / golden ratio: multiples of it are spread evenly over the 64-bit words."""


def as_int64(word: int) -> int:
    """The int64 with the bits of `word` modulo 2^64."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


def mix64(words: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): a bijection of the 64-bit words."""
    words = xor_shifted(words, 30).mul_(as_int64(0xBF58476D1CE4E5B9))
    words = xor_shifted(words, 27).mul_(as_int64(0x94D049BB133111EB))
    return xor_shifted(words, 31)


def xor_shifted(words: Tensor, bits: int) -> Tensor:
    """words ^ (words >> bits), a new tensor."""
    # >> on int64 copies the sign bit; the mask makes the shift a logical one.
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1).bitwise_xor_(words)
