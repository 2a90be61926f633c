import hashlib
import random

import pytest
import torch

from inference.kernels.mix64 import GOLDEN, as_int64, mix64
from inference.kernels.tensor_hash import combine, reference, tensor_hash

MASK = (1 << 64) - 1


def mix_by_hand(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def hash_by_hand(bits: list[int], name: str, places: list[int] | None = None) -> int:
    salt = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    total = 0
    for place, word in zip(places or range(len(bits)), bits, strict=True):
        total += mix_by_hand(mix_by_hand(((2 * place + 1) * GOLDEN + salt) & MASK) ^ word)
    return total & MASK


def test_mix64_is_the_finaliser_of_splitmix64():
    """The published first outputs of the generator seeded with 0."""
    found = mix64(torch.arange(1, 4) * as_int64(GOLDEN)).tolist()
    assert [z & MASK for z in found] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    words = [random.Random(0).getrandbits(64) for _ in range(100)]
    mixed = mix64(torch.tensor([as_int64(w) for w in words])).tolist()
    assert [z & MASK for z in mixed] == [mix_by_hand(w) for w in words]


def test_the_hash_is_the_formula_in_plain_integers():
    values = torch.tensor([[1.0, -2.0, 0.0], [-0.0, float("nan"), 1e-45]])
    bits = [word & 0xFFFFFFFF for word in values.flatten().view(torch.int32).tolist()]
    assert tensor_hash(values, name="a.b") == hash_by_hand(bits, "a.b")
    half = values.bfloat16()
    bits = [word & 0xFFFF for word in half.flatten().view(torch.int16).tolist()]
    assert tensor_hash(half, name="a.b") == hash_by_hand(bits, "a.b")
    codes = torch.arange(250, 256).to(torch.uint8)
    wanted = hash_by_hand(list(range(250, 256)), "a.b")
    assert tensor_hash(codes, name="a.b") == wanted
    assert tensor_hash(codes.view(torch.float8_e4m3fn), name="a.b") == wanted


def test_the_hash_stays_what_it_is():
    """Recorded once: hashes in run directories and on the wire must not change their meaning."""
    assert tensor_hash(torch.arange(6.0).view(2, 3), name="lm_head.weight") == 0x4FA42AE1DE057DE9


def random_cuts(shape: tuple[int, ...], rng: random.Random) -> list[tuple[slice, ...]]:
    """Disjoint rectangles that cover `shape`."""
    pieces = [tuple(slice(0, size) for size in shape)]
    for _ in range(rng.randint(0, 6)):
        piece = pieces.pop(rng.randrange(len(pieces)))
        dim = rng.randrange(len(shape))
        start, stop = piece[dim].start, piece[dim].stop
        cut = rng.randint(start, stop)
        halves = slice(start, cut), slice(cut, stop)
        pieces.extend((*piece[:dim], half, *piece[dim + 1 :]) for half in halves)
    return pieces


@pytest.mark.parametrize("shape", [(7,), (13, 9), (5, 6, 7), (1, 8, 1, 3)])
def test_hashes_of_any_covering_rectangles_add_up(shape):
    rng = random.Random(0)
    tensor = torch.randn(shape)
    whole = tensor_hash(tensor, name="w")
    for _ in range(25):
        parts = [
            tensor_hash(tensor[cut], name="w", offsets=tuple(s.start for s in cut), shape=shape)
            for cut in random_cuts(shape, rng)
        ]
        assert combine(parts) == whole


def test_any_changed_bit_changes_the_hash():
    tensor = torch.randn(8, 16)
    whole = tensor_hash(tensor, name="w")
    rng = random.Random(0)
    for _ in range(200):
        damaged = tensor.clone()
        bit = rng.randrange(32)
        words = damaged.view(-1).view(torch.int32)
        words[rng.randrange(128)] ^= 1 << bit if bit < 31 else -(1 << 31)
        assert tensor_hash(damaged, name="w") != whole


def test_swapped_rows_experts_and_names_are_seen():
    tensor = torch.randn(4, 6, 5)
    whole = tensor_hash(tensor, name="w")
    assert tensor_hash(tensor[[1, 0, 2, 3]], name="w") != whole
    assert tensor_hash(tensor[:, [0, 2, 1, 3, 4, 5]], name="w") != whole
    assert tensor_hash(tensor.mT, name="w") != whole
    assert tensor_hash(tensor, name="w1") != whole
    assert tensor_hash(tensor[:2], name="w", offsets=(1, 0, 0), shape=(4, 6, 5)) != tensor_hash(
        tensor[:2], name="w", offsets=(0, 0, 0), shape=(4, 6, 5)
    )


def test_bits_count_and_not_values():
    assert tensor_hash(torch.tensor([0.0]), name="w") != tensor_hash(torch.tensor([-0.0]), name="w")
    tensor = torch.randn(3)
    assert tensor_hash(tensor, name="w") != tensor_hash(tensor.bfloat16().float(), name="w")


def test_small_pieces_give_the_same_hash(monkeypatch):
    tensor = torch.randn(3, 50, 7)
    part = tensor[1:, 5:45, 2:6]
    kwargs = {"name": "w", "offsets": (1, 5, 2), "shape": (3, 50, 7)}
    expected = tensor_hash(tensor, name="w"), tensor_hash(part, **kwargs)
    for limit in (1, 2, 64, 351):
        monkeypatch.setattr(reference, "MAX_ELEMENTS", limit)
        assert (tensor_hash(tensor, name="w"), tensor_hash(part, **kwargs)) == expected


def test_memory_layout_does_not_matter():
    tensor = torch.randn(6, 10)
    expected = tensor_hash(tensor.contiguous(), name="w")
    assert tensor_hash(tensor.T.contiguous().T, name="w") == expected
    spread = torch.zeros(6, 20)
    spread[:, ::2] = tensor
    assert tensor_hash(spread[:, ::2], name="w") == expected
    assert tensor_hash(tensor.requires_grad_(), name="w") == expected


def test_places_beyond_32_bits_are_told_apart():
    row = torch.tensor([[1.0, 2.0]])
    shape = (1 << 40, 2)
    hashes = {
        tensor_hash(row, name="w", offsets=(at, 0), shape=shape)
        for at in (0, 1 << 31, 1 << 32, (1 << 40) - 1)
    }
    assert len(hashes) == 4
    place = 2 * (1 << 32)
    wanted = hash_by_hand([0x3F800000, 0x40000000], "w", [place, place + 1])
    assert tensor_hash(row, name="w", offsets=(1 << 32, 0), shape=shape) == wanted


def test_scalars_and_empty_tensors_have_hashes():
    assert tensor_hash(torch.tensor(1.0), name="w") == tensor_hash(torch.tensor([1.0]), name="w")
    assert tensor_hash(torch.zeros(0, 5), name="w") == 0
    assert combine([]) == 0
    assert combine([MASK, 2]) == 1


def test_wrong_rectangles_and_dtypes_are_refused():
    with pytest.raises(
        ValueError, match=r"w: a rectangle \(2, 3\) at \(3, 0\) does not lie inside"
    ):
        tensor_hash(torch.zeros(2, 3), name="w", offsets=(3, 0), shape=(4, 3))
    with pytest.raises(ValueError, match="does not lie inside"):
        tensor_hash(torch.zeros(2, 3), name="w", offsets=(0,), shape=(2, 3))
    with pytest.raises(TypeError, match="w is float64, needs float32"):
        tensor_hash(torch.zeros(2).double(), name="w")
