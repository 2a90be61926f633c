import hashlib
import itertools
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from inference.kernels.mix64 import GOLDEN, as_int64, mix64
from inference.kernels.tensor_hash import (
    HashTable,
    combine,
    hash_part,
    reference,
    tensor_hash,
    unit_of,
)

MASK = (1 << 64) - 1
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8]
DTYPES_AND_UNITS = [
    (dtype, unit) for dtype in DTYPES for unit in (1, 2, 4, 8, 16) if unit * dtype.itemsize <= 16
]


def mix_by_hand(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def term_by_hand(word: int, key: int) -> int:
    """Of a unit of up to 128 bits."""
    low = ((word & MASK) ^ key) * 0xD6E8FEB86659FD93 & MASK
    return mix_by_hand((low ^ (low >> 32)) + (word >> 64) * 0xE7037ED1A0B428DB & MASK)


def hash_by_hand(words: list[int], name: str, unit: int = 1, first_place: int = 0) -> int:
    salt = hashlib.blake2b(name.encode(), digest_size=8, salt=bytes([unit, 0])).digest()
    keys = [
        (place * GOLDEN & MASK) ^ int.from_bytes(salt, "little")
        for place in range(first_place, first_place + len(words))
    ]
    return sum(map(term_by_hand, words, keys)) & MASK


def words_of(tensor: Tensor, unit: int) -> list[int]:
    """Its units, each as an integer of its bytes, little endian."""
    octets = bytes(tensor.flatten().view(torch.uint8).tolist())
    size = unit * tensor.element_size()
    return [int.from_bytes(octets[i : i + size], "little") for i in range(0, len(octets), size)]


def octets(*shape: int) -> Tensor:
    """Random bytes."""
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def test_mix64_is_the_finaliser_of_splitmix64():
    """The published first outputs of the generator seeded with 0."""
    found = mix64(torch.arange(1, 4) * as_int64(GOLDEN)).tolist()
    assert [z & MASK for z in found] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    words = [random.Random(0).getrandbits(64) for _ in range(100)]
    mixed = mix64(torch.tensor([as_int64(w) for w in words])).tolist()
    assert [z & MASK for z in mixed] == [mix_by_hand(w) for w in words]


@pytest.mark.parametrize(("dtype", "unit"), DTYPES_AND_UNITS)
def test_the_hash_is_the_formula_in_plain_integers(dtype, unit):
    tensor = octets(3, 32 * dtype.itemsize).view(dtype)
    words = words_of(tensor, unit)
    assert tensor_hash(tensor, name="a.b", unit=unit) == hash_by_hand(words, "a.b", unit)
    row = {"offsets": (2, 16), "shape": (5, 64), "unit": unit}
    wanted = hash_by_hand(words_of(tensor[1], unit), "a.b", unit, (2 * 64 + 16) // unit)
    assert tensor_hash(tensor[1:2], name="a.b", **row) == wanted


def test_values_are_hashed_by_their_bits():
    values = torch.tensor([[1.0, -2.0, 0.0], [-0.0, float("nan"), 1e-45]])
    bits = [word & 0xFFFFFFFF for word in values.flatten().view(torch.int32).tolist()]
    assert tensor_hash(values, name="a.b") == hash_by_hand(bits, "a.b")


def test_the_hash_stays_what_it_is():
    """Recorded once: hashes in run directories and on the wire must not change their meaning."""
    weight = torch.arange(8.0).view(2, 4)
    assert tensor_hash(weight, name="lm_head.weight") == 0x9EF42F5801027403
    assert tensor_hash(weight, name="lm_head.weight", unit=4) == 0x4F63764862EBFE1E


def random_cuts(
    shape: tuple[int, ...], rng: random.Random, unit: int = 1
) -> list[tuple[slice, ...]]:
    """Disjoint rectangles that cover `shape` and cut no unit."""
    pieces = [tuple(slice(0, size) for size in shape)]
    for _ in range(rng.randint(0, 6)):
        piece = pieces.pop(rng.randrange(len(pieces)))
        dim = rng.randrange(len(shape))
        start, stop = piece[dim].start, piece[dim].stop
        step = unit if dim == len(shape) - 1 else 1
        cut = rng.randint(start // step, stop // step) * step
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


@pytest.mark.parametrize(("dtype", "unit"), DTYPES_AND_UNITS)
def test_hashes_of_cuts_between_units_add_up(dtype, unit):
    rng = random.Random(unit)
    tensor = octets(4, 5, 6 * unit * dtype.itemsize).view(dtype)
    shape, whole = tuple(tensor.shape), tensor_hash(tensor, name="w", unit=unit)
    for _ in range(10):
        cuts = random_cuts(shape, rng, unit)
        parts = [
            hash_part(
                tensor[cut], name="w", offsets=tuple(s.start for s in cut), shape=shape, unit=unit
            )
            for cut in cuts
        ]
        table = HashTable(parts)
        table.launch(0, len(parts))
        assert combine(table.read()) == whole


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


def test_no_one_or_two_changed_bits_of_a_unit_go_unseen():
    bits = [1 << i for i in range(128)]
    rng = random.Random(0)
    for word in (0, (1 << 128) - 1, rng.getrandbits(128), rng.getrandbits(128)):
        key = rng.getrandbits(64)
        terms = {term_by_hand(word, key)}
        terms |= {term_by_hand(word ^ bit, key) for bit in bits}
        terms |= {term_by_hand(word ^ a ^ b, key) for a, b in itertools.combinations(bits, 2)}
        assert len(terms) == 1 + 128 + 128 * 127 // 2


def damaged_alike(tensor: Tensor) -> dict[str, Tensor]:
    """[4, 6, 32] damaged by mistakes that keep its sum, its set of rows or its magnitudes."""
    damaged = {
        "experts": tensor[[1, 0, 2, 3]],
        "rows": tensor[:, [0, 2, 1, 3, 4, 5]],
        "columns": tensor.roll(1, -1),
        "odd columns before even ones": tensor.view(4, 6, 16, 2).mT.reshape(4, 6, 32),
        "neighbours": tensor.view(4, 6, 16, 2).flip(-1).reshape(4, 6, 32),
        "units": tensor.view(4, 6, 2, 16).flip(-2).reshape(4, 6, 32),
        "words of a unit": tensor.view(4, 6, 8, 2, 2).flip(-2).reshape(4, 6, 32),
        "all by a row": tensor.flatten().roll(32).view(4, 6, 32),
    }
    for name, step in (("neighbours", 1), ("units", 8), ("rows", 32), ("experts", 192)):
        moved = tensor.flatten().clone()
        moved[64] += 1
        moved[64 + step] -= 1
        damaged[f"+1 -1 in {name}"] = moved.view(4, 6, 32)
    for name, columns in (("all", slice(None)), ("odd", slice(1, None, 2)), ("four", slice(4))):
        damaged[f"signs, {name}"] = tensor.clone()
        damaged[f"signs, {name}"][1, 2, columns] *= -1
    for name, columns in (("4 8", [3, 7]), ("2 4 6 8", [1, 3, 5, 7]), ("1 5", [0, 4])):
        damaged[f"signs of a unit, {name}"] = tensor.clone()
        damaged[f"signs of a unit, {name}"][1, 2, columns] *= -1
    return damaged


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("values", ["normal", "counted", "small integers"])
def test_mistakes_that_keep_sums_and_sets_are_seen(dtype, values):
    tensor = {
        "normal": torch.randn(4, 6, 32),
        "counted": torch.arange(1.0, 769.0).view(4, 6, 32),
        "small integers": torch.randint(1, 4, (4, 6, 32)).float(),
    }[values].to(dtype)
    different = {name: t for name, t in damaged_alike(tensor).items() if not torch.equal(t, tensor)}
    assert len(different) >= 14
    for unit in (1, 2, 16 // dtype.itemsize):
        hashes = [tensor_hash(t, name="w", unit=unit) for t in (tensor, *different.values())]
        assert len(set(hashes)) == len(hashes), (unit, list(different))


def test_names_units_and_offsets_are_told_apart():
    tensor = torch.randn(4, 6, 4)
    whole = tensor_hash(tensor, name="w")
    assert tensor_hash(tensor.mT, name="w") != whole
    assert tensor_hash(tensor, name="w1") != whole
    zeros = torch.zeros(4, 8)
    assert len({tensor_hash(zeros, name="w", unit=unit) for unit in (1, 2, 4)}) == 3
    assert tensor_hash(tensor[:2], name="w", offsets=(1, 0, 0), shape=(4, 6, 4)) != tensor_hash(
        tensor[:2], name="w", offsets=(0, 0, 0), shape=(4, 6, 4)
    )


def test_keys_of_places_near_to_one_another_differ_by_more_than_a_unit_holds():
    steps = {
        distance: min(distance * GOLDEN & MASK, -distance * GOLDEN & MASK)
        for distance in best_distances(GOLDEN, 1 << 64)
    }
    assert min(step for distance, step in steps.items() if distance < 1 << 46) > 1 << 16
    assert min(step for distance, step in steps.items() if distance < 1 << 31) > 1 << 32


def best_distances(numerator: int, denominator: int) -> Iterator[int]:
    """Denominators of the convergents: no smaller multiple comes nearer to an integer."""
    before, last = 0, 1
    while numerator:
        quotient, rest = divmod(denominator, numerator)
        yield last
        before, last = last, quotient * last + before
        numerator, denominator = rest, numerator


def test_the_unit_is_what_no_edge_cuts():
    assert unit_of(torch.bfloat16, [0, 3072, 6144]) == 8
    assert unit_of(torch.float32, [0, 128]) == 4
    assert unit_of(torch.uint8, [0, 96, 192]) == 16
    assert unit_of(torch.uint8, [0, 3, 6]) == 1
    assert unit_of(torch.bfloat16, [0, 4, 12]) == 4


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
    wanted = hash_by_hand([0x3F800000, 0x40000000], "w", first_place=2 * (1 << 32))
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
    for unit in (3, 8):
        with pytest.raises(ValueError, match=f"w: unit={unit} of torch.float32, needs a power"):
            tensor_hash(torch.zeros(2, 24), name="w", unit=unit)
    for columns, offset, total in ((4, 2, 8), (6, 0, 8), (4, 0, 6)):
        with pytest.raises(ValueError, match="cuts units of 4; use `unit_of`"):
            tensor_hash(
                torch.zeros(2, columns), name="w", offsets=(0, offset), shape=(2, total), unit=4
            )
    with pytest.raises(ValueError, match="cuts units of 2"):
        tensor_hash(torch.tensor(1.0), name="w", unit=2)
    with pytest.raises(ValueError, match="bytes have no NaN to look for"):
        hash_part(torch.zeros(2, dtype=torch.uint8), name="w", check_finite=True)


def test_a_table_adds_up_what_is_launched():
    tensors = [torch.randn(3, 8), torch.zeros(0, 8), torch.randn(16).bfloat16(), octets(2, 16)]
    parts = [
        hash_part(t, name=f"w{i}", unit=unit_of(t.dtype, t.shape)) for i, t in enumerate(tensors)
    ]
    wanted = [tensor_hash(p.tensor, name=f"w{i}", unit=p.unit) for i, p in enumerate(parts)]
    table = HashTable(parts)
    table.launch(1, 3)
    assert table.read() == [0, wanted[1], wanted[2], 0]
    table.launch(3, 4)
    table.launch(0, 1)
    assert table.read() == wanted
    table.launch(0, 1)
    assert table.read()[0] == 2 * wanted[0] & MASK
    table.reset()
    assert table.read() == [0] * 4


def test_a_table_sees_what_is_not_finite_where_it_is_asked_to():
    bad = torch.tensor([1.0, float("inf")])
    parts = [
        hash_part(tensor, name="w", check_finite=check)
        for tensor in (torch.ones(2), bad, bad.bfloat16(), bad.mul(0).to(torch.float8_e4m3fn))
        for check in (True, False)
    ]
    table = HashTable(parts)
    table.launch(0, 6)
    assert table.flags.tolist() == [0, 0, 1, 0, 1, 0, 0, 0]
    table.launch(6, 8)
    assert table.flags.tolist() == [0, 0, 1, 0, 1, 0, 1, 0]
    table.reset()
    assert table.flags.tolist() == [0] * 8


def test_a_table_refuses_memory_that_has_moved_and_parts_that_are_not_there():
    tensor = torch.randn(4)
    table = HashTable([hash_part(tensor, name="w")])
    with pytest.raises(ValueError, match="no parts 0 to 2; there are 1"):
        table.launch(0, 2)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="the memory of part 0 has moved"):
        table.launch(0, 1)
    with pytest.raises(ValueError, match="at least one part"):
        HashTable([])
