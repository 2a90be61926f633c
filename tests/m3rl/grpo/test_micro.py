import numpy as np
import pytest
import torch

from m3rl.grpo.micro import MicroBatch

CPU = torch.device("cpu")
IDS = np.array([[5, 6, 7, 0], [8, 9, 0, 0], [1, 2, 3, 4]])
LENGTHS = np.array([3, 2, 4])
MASK = np.array([[0, 0, 1, 0], [0, 1, 0, 0], [0, 1, 0, 1]], bool)


def micro(rows, mask=MASK):
    return MicroBatch.of(np.asarray(rows), IDS, LENGTHS, mask, CPU)


def test_rows_lie_one_after_the_other_and_targets_are_found_among_them():
    packed = micro([0, 2])
    assert packed.ids_T.tolist() == [5, 6, 7, 1, 2, 3, 4]
    assert packed.packing.lengths == (3, 4)
    assert packed.packing.positions_T.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert packed.targets_M.tolist() == [2, 4, 6]


def test_values_come_from_their_places_and_go_back_there():
    packed = micro([2, 1])
    values_BS = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert packed.tokens(values_BS).tolist() == [9.0, 11.0, 5.0]
    assert packed.per_token(np.array([10.0, 20.0, 30.0])).tolist() == [30.0, 30.0, 20.0]
    into_BS = np.zeros((3, 4), np.float32)
    packed.put(packed.tokens(values_BS), into_BS)
    np.testing.assert_array_equal(into_BS, np.where(MASK & [[False], [True], [True]], values_BS, 0))


def test_a_micro_batch_without_rows_is_one_token_and_no_target():
    empty = micro(np.zeros(0, np.int64))
    assert empty.ids_T.tolist() == [0]
    assert empty.packing.lengths == (1,)
    assert len(empty.targets_M) == len(empty.tokens(np.ones((3, 4)))) == 0
    into_BS = np.ones((3, 4))
    empty.put(torch.zeros(0), into_BS)
    assert into_BS.all()


@pytest.mark.parametrize(
    ("place", "message"), [((1, 2), "covers padding"), ((2, 0), "first token of a row")]
)
def test_masks_that_cannot_be_are_refused(place, message):
    mask = MASK.copy()
    mask[place] = True
    with pytest.raises(ValueError, match=message):
        micro([0, 1, 2], mask)
