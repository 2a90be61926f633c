"""The integer mix of `mix64.py` on the GPU."""

import triton
import triton.language as tl

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)


@triton.jit
def mix64(words):
    """The finaliser of splitmix64 on uint64 values."""
    words = (words ^ (words >> 30)) * 0xBF58476D1CE4E5B9
    words = (words ^ (words >> 27)) * 0x94D049BB133111EB
    return words ^ (words >> 31)
