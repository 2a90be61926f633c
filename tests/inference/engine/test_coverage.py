"""The coverage proof against a count of every element."""

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from inference.engine.coverage import Coverage, PlannedParts, WeightLoadError, WeightSlot

SHAPE = (3, 4)


def slot(name="w", shape=SHAPE):
    bounds = tuple((0, size) for size in shape)
    return WeightSlot(name, "float32", shape, bounds, "pre")


def write(coverage, name, bounds):
    coverage.check(name, bounds)
    coverage.add(name, bounds)


spans = [st.sampled_from(list(itertools.combinations(range(size + 1), 2))) for size in SHAPE]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(*spans), max_size=8))
def test_writes_are_refused_and_reported_as_counting_every_element_says(writes):
    coverage = Coverage([slot()])
    counts = np.zeros(SHAPE, int)
    for (top, bottom), (left, right) in writes:
        place = counts[top:bottom, left:right]
        if place.any():
            with pytest.raises(WeightLoadError, match="written before in the same load"):
                coverage.check("w", ((top, bottom), (left, right)))
        else:
            write(coverage, "w", ((top, bottom), (left, right)))
            place += 1
    report = [] if counts.all() else [f"w ({counts.sum()} of 12 elements written)"]
    assert coverage.missing() == report


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_split_into_rectangles_in_any_order_is_whole(data):
    coverage = Coverage([slot()])
    cut_rows = data.draw(st.integers(1, 2))
    pieces = [((0, cut_rows), (0, 4))]
    cut_columns = data.draw(st.integers(1, 3))
    pieces += [((cut_rows, 3), (0, cut_columns)), ((cut_rows, 3), (cut_columns, 4))]
    for piece in data.draw(st.permutations(pieces)):
        assert coverage.missing()
        write(coverage, "w", piece)
    assert coverage.missing() == []


def test_every_missing_tensor_is_named():
    coverage = Coverage([slot("a"), slot("b", (2,)), slot("c", (5,))])
    write(coverage, "b", ((0, 2),))
    write(coverage, "c", ((1, 3),))
    assert coverage.missing() == [
        "a (0 of 12 elements written)",
        "c (2 of 5 elements written)",
    ]


@pytest.mark.parametrize(
    "bounds", [((0, 4), (0, 4)), ((0, 3), (-1, 2)), ((1, 1), (0, 4)), ((0, 3),)]
)
def test_bounds_outside_the_tensor_are_refused(bounds):
    with pytest.raises(WeightLoadError, match="empty or outside"):
        Coverage([slot()]).check("w", bounds)


def test_an_unknown_name_is_refused():
    with pytest.raises(WeightLoadError, match=r"'language_model\.w' is no tensor of this model"):
        Coverage([slot()]).check("language_model.w", ((0, 3), (0, 4)))


PARTS = [("a", ((0, 1), (0, 4))), ("a", ((1, 3), (0, 4))), ("b", ((0, 5),)), ("c", ((2, 4),))]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(-1, 5), st.integers(-1, 5)), max_size=6))
def test_planned_parts_are_counted_as_a_list_of_them_says(ranges):
    progress, counts = PlannedParts(PARTS), np.zeros(len(PARTS), int)
    for first, last in ranges:
        if not 0 <= first <= last <= len(PARTS):
            with pytest.raises(WeightLoadError, match="are not among the 4 of the plan"):
                progress.add(first, last)
        elif counts[first:last].any():
            twice = first + int(counts[first:last].argmax())
            with pytest.raises(WeightLoadError, match=f"part {twice} of the plan, .* twice"):
                progress.add(first, last)
        else:
            progress.add(first, last)
            counts[first:last] = 1
    sizes = counts * [4, 8, 5, 2]
    written = {"a": (sizes[0] + sizes[1], 12), "b": (sizes[2], 5), "c": (sizes[3], 2)}
    assert progress.missing() == [
        f"{name} ({count} of {total} elements written)"
        for name, (count, total) in written.items()
        if count != total
    ]
