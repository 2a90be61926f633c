"""How far the choice of blocks has moved since the first batch."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from m3rl import block_drift
from m3rl.block_drift import FILE
from m3rl.checkpoint import CheckpointError
from m3rl.train_rank import TrainRank
from tests.m3rl.parallel_process import on_ranks
from tests.m3rl.rank_cases import CONFIG, SETTINGS, random_batch, start
from tests.tiny_models import random_checkpoint

WATCHED = replace(SETTINGS, index_drift_every=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    random_checkpoint(path, CONFIG, seed=0)
    return path


def with_lr(lr, **changes):
    return replace(WATCHED, optimizer=replace(SETTINGS.optimizer, lr=lr), **changes)


def drifts(rank, seeds):
    return [rank.update(random_batch(seed)).get("m3/block_drift") for seed in seeds]


def test_without_updates_there_is_none(model):
    assert drifts(start(model, with_lr(0.0)), [0, 1]) == [0.0, 0.0]


def test_trunk_updates_move_the_choice_of_a_frozen_index_branch(model):
    rank = start(model, with_lr(3e-2))
    before = rank.policy.wire_state()
    first, *_, last = drifts(rank, [0, 1, 2, 3])
    assert 0 < first < 1
    assert 0 < last < 1
    assert not any(
        (t != before[n]).any() for n, t in rank.policy.wire_state().items() if ".indexer." in n
    )


def test_a_choice_turned_round_drifts_by_what_can_be_counted(model):
    """Top-k 2 with a local block: the other block is the best of those before it, or the worst."""
    rank, batch = start(model, with_lr(0.0)), random_batch(0)
    assert drifts(rank, [0]) == [0.0]
    for layer in rank.policy.model.model.layers[1:]:
        layer.self_attn.indexer.q_proj.weight.data.neg_()
    drift = rank.update(batch)["m3/block_drift"]
    # Half of the blocks are local; of the others, some stay where rows of later layers moved.
    assert 0.2 < drift <= 0.5


def test_off_it_notes_nothing(model, tmp_path):
    rank = start(model)
    assert drifts(rank, [0]) == [None]
    assert rank._drift is None
    rank.save(tmp_path)
    assert not (tmp_path / FILE).exists()


def test_it_is_measured_every_so_many_steps(model):
    rank = start(model, replace(WATCHED, index_drift_every=2))
    assert [drift is not None for drift in drifts(rank, range(4))] == [False, True, False, True]


def test_several_steps_of_an_update_do_not_jump_over_a_measurement(model):
    rank = start(model, replace(WATCHED, index_drift_every=2, updates_per_batch=3))
    assert [drift is not None for drift in drifts(rank, range(3))] == [True, True, True]


def test_it_changes_nothing_else(model):
    plain, watched = start(model), start(model, WATCHED)
    for seed in (0, 1):
        expected, found = plain.update(random_batch(seed)), watched.update(random_batch(seed))
        found.pop("m3/block_drift")
        same = {n: v for n, v in expected.items() if not n.startswith("perf/")}
        assert {n: found[n] for n in same} == same
    assert plain.master_hash() == watched.master_hash()


def test_a_resumed_run_goes_on_with_the_blocks_of_its_first_batch(model, tmp_path):
    settings = with_lr(3e-2)
    straight = start(model, settings)
    drifts(straight, [0, 1])
    straight.save(tmp_path)
    expected = drifts(straight, [2, 3])
    resumed = start(model, settings)
    resumed.load(tmp_path)
    assert drifts(resumed, [2, 3]) == expected
    assert all(drift > 0 for drift in expected)


def test_a_checkpoint_without_the_first_choice_is_refused(model, tmp_path):
    rank = start(model)
    rank.update(random_batch(0))
    rank.save(tmp_path)
    with pytest.raises(CheckpointError, match="does not hold the blocks chosen before its 1 steps"):
        start(model, WATCHED).load(tmp_path)


def test_a_checkpoint_from_before_the_first_batch_has_nothing_to_hold(model, tmp_path):
    start(model, WATCHED).save(tmp_path)
    rank = start(model, WATCHED)
    rank.load(tmp_path)
    assert drifts(rank, [0])[0] is not None


def test_samples_too_short_to_have_a_choice_are_said_once_and_give_no_metric(model, caplog):
    rank = start(model, WATCHED)
    for seed in (0, 1):
        batch = random_batch(seed)
        batch.length_B = np.minimum(batch.length_B, 8)  # top-k 2 of blocks of 4
        batch.loss_mask_BS = batch.loss_mask_BS & (np.arange(batch.ids_BS.shape[1]) < 8)
        assert "m3/block_drift" not in rank.update(batch)
    assert caplog.text.count("no sample of the first batch is longer than the 8 tokens") == 1


def test_the_longest_samples_are_watched_at_places_that_have_a_choice(model):
    rank, batch = start(model, WATCHED), random_batch(0, num_rows=7)
    rank.update(batch)
    noted = rank._drift._start
    assert sorted(noted.length_R.tolist()) == sorted(batch.length_B.tolist())[-4:]
    assert noted.place_P.min() == 8
    assert (noted.place_P < noted.length_R[noted.row_P]).all()
    assert len(set(zip(noted.row_P.tolist(), noted.place_P.tolist(), strict=True))) == len(
        noted.row_P
    )
    is_choice = noted.blocks_PLKB >= 0
    assert is_choice.all(), "each of them chooses as many as it may"
    assert (noted.blocks_PLKB[..., -1] == (noted.place_P // 4)[:, None, None]).all()


def watch(rank_id, num_ranks, meet_at, model, settings):
    rank = TrainRank(settings, rank_id, num_ranks, meet_at)
    try:
        rank.load_initial(model)
        told = drifts(rank, [0, 1])
        return told, rank._drift._start.blocks_PLKB
    finally:
        rank.close()


@pytest.mark.parametrize(("ep", "cp"), [(1, 1), (2, 2)])
def test_ranks_measure_what_one_does(model, ep, cp):
    settings = with_lr(3e-2, dtype="float64")
    alone = start(model, settings)
    expected = drifts(alone, [0, 1])
    told = on_ranks(watch, 2, model, replace(settings, ep=ep, cp=cp))
    for found, blocks in told:
        assert np.array_equal(blocks, alone._drift._start.blocks_PLKB)
        assert found == pytest.approx(expected, abs=0.02)


def test_replay_does_not_hide_it(model, monkeypatch):
    """What is measured is the policy's own choice, without any record."""
    seen = []
    real = block_drift._BlockLog.add_blocks
    monkeypatch.setattr(
        block_drift._BlockLog,
        "add_blocks",
        lambda self, layer, own, record: seen.append(record) or real(self, layer, own, record),
    )
    rank = start(model, replace(WATCHED, replay_blocks=True))
    batch = random_batch(0)
    batch.blocks = [np.zeros((n - 1, 2, 2, 2), np.int16) for n in batch.length_B]
    for record in batch.blocks:
        record[..., 1] = -1
    assert "m3/block_drift" in rank.update(batch)
    assert seen
    assert all(record is None for record in seen)
    assert torch.is_grad_enabled()
