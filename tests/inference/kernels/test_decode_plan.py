"""Every page of every decode is read exactly once, by units of nearly equal size."""

from itertools import pairwise

import numpy as np
import pytest

from inference.kernels.decode_plan import MIN_SHARED_PAGES, SHARED_ROWS, plan_units


def random_groups(rng, num_pages):
    cuts = np.unique(np.concatenate([[0, len(num_pages)], rng.integers(0, len(num_pages) + 1, 3)]))
    shared = [
        int(rng.integers(0, 1 + num_pages[start:stop].min())) for start, stop in pairwise(cuts)
    ]
    return cuts, np.array(shared)


def pages_read(units, num_pages):
    """[R] arrays: how often each page of each decode is read."""
    counts = [np.zeros(count, int) for count in num_pages]
    for row, first, count in units.own_U3:
        counts[row][first : first + count] += 1
    for first_row, num_rows, first, count in units.shared_X4:
        for row in range(first_row, first_row + num_rows):
            counts[row][first : first + count] += 1
    return counts


@pytest.mark.parametrize("seed", range(40))
def test_every_page_is_read_once_and_the_maps_agree(seed):
    rng = np.random.default_rng(seed)
    num_pages = rng.integers(0, 300, rng.integers(1, 60))
    groups = random_groups(rng, num_pages) if seed % 2 else (None, None)
    num_workers = int(rng.integers(1, 300))
    shared_workers = None if seed % 3 else int(rng.integers(1, 40))
    units = plan_units(num_pages, *groups, num_workers, num_shared_workers=shared_workers)
    assert all((count == 1).all() for count in pages_read(units, num_pages))
    assert len(units.own_U3) <= max(num_workers, len(num_pages))
    for row in range(len(num_pages)):
        own = units.own_U3[units.own_start_R1[row] : units.own_start_R1[row + 1]]
        assert (own[:, 0] == row).all()
        first, count, place = units.shared_R3[row]
        for first_row, num_rows, _, _ in units.shared_X4[first : first + count]:
            assert first_row + place == row
            assert place < num_rows <= SHARED_ROWS


def test_equal_rows_get_equal_units():
    units = plan_units(np.full(64, 1024), None, None, 264)
    assert set(units.own_U3[:, 2].tolist()) == {256}


def test_a_few_shared_pages_are_left_to_each_request():
    few, enough = MIN_SHARED_PAGES - 1, MIN_SHARED_PAGES
    assert len(plan_units(np.full(4, 9), np.array([0, 4]), np.array([few]), 8).shared_X4) == 0
    assert len(plan_units(np.full(4, 9), np.array([0, 4]), np.array([enough]), 8).shared_X4) > 0


def test_shared_pages_are_not_cut_into_single_ones():
    units = plan_units(np.full(16, 257), np.array([0, 16]), np.array([256]), 300)
    assert units.shared_X4[:, 3].tolist() == [2] * 128


def test_capacity_pads_with_units_without_pages():
    units = plan_units(np.array([5, 0]), None, None, 4, capacity=12, shared_capacity=7)
    assert units.own_U3.shape == (12, 3)
    assert units.shared_X4.shape == (7, 4)
    assert units.own_U3[:, 2].sum() == 5
    assert (units.shared_X4 == 0).all()
