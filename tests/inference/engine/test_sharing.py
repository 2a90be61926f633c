"""Who shares pages with whom, found from the running rows."""

import numpy as np
import torch

from inference.engine.request import Request, SamplingParams, make_live
from inference.engine.scheduler import Scheduler
from inference.engine.sharing import DecodePlanner, Workers
from inference.engine.staging import offsets, views

PAGE = 4


def running(*requests: tuple[str | None, int], prompt: int = 26) -> Scheduler:
    """(group, first token of its prompt) of each request, all prefilled and with one token more."""
    scheduler = Scheduler(
        num_pages=200,
        page_size=PAGE,
        max_running_requests=16,
        max_tokens_per_step=1000,
        enable_prefix_cache=False,
    )
    for i, (group, first) in enumerate(requests):
        params = SamplingParams(max_tokens=9, seed=i)
        ids = [first, *range(prompt - 1)]
        scheduler.add(make_live(Request(str(i), ids, params, group), ()))
    schedule = scheduler.schedule()
    scheduler.advance(schedule)
    scheduler.rows.append_pending(schedule.rows_R)
    return scheduler


def plan_of(scheduler: Scheduler, planner: DecodePlanner, **options):
    schedule = scheduler.schedule()
    assert schedule.num_decodes == len(schedule.rows_R)
    rows = scheduler.rows
    seq_len_R = rows.num_computed[schedule.rows_R] + 1
    return planner.plan(rows, schedule.rows_R, seq_len_R, **options)


def test_members_of_a_group_share_the_full_pages_of_their_prompt():
    scheduler = running(("a", 1), ("a", 1), ("a", 1), (None, 2), ("b", 3))
    planner = DecodePlanner(PAGE, Workers(4, 4), Workers(2, 2))
    plan = plan_of(scheduler, planner)
    bounds, shared = planner.groups(scheduler.rows, np.arange(5))
    assert bounds.tolist() == [0, 3, 4, 5]
    assert shared[0] == 26 // PAGE
    assert plan.index.shared_X4[:, 3].sum() == 26 // PAGE
    assert plan.index.shared_R3[:, 1].tolist()[3:] == [0, 0]
    # What is not shared: the last page of each member, all 7 of the others.
    own = np.zeros(5, int)
    np.add.at(own, plan.index.own_U3[:, 0], plan.index.own_U3[:, 2])
    assert own.tolist() == [1, 1, 1, 7, 7]


def test_nobody_shares_without_groups():
    scheduler = running((None, 1), (None, 1))
    planner = DecodePlanner(PAGE, Workers(4, 4), Workers(2, 2))
    assert planner.groups(scheduler.rows, np.arange(2)) is None
    assert len(plan_of(scheduler, planner).dense.shared_X4) == 0


def test_a_row_that_changes_hands_is_looked_at_again():
    scheduler = running(("a", 1), ("a", 1), ("b", 2))
    planner, rows = DecodePlanner(PAGE, Workers(4, 4), Workers(2, 2)), np.arange(3)
    assert planner.groups(scheduler.rows, rows)[0].tolist() == [0, 2, 3]
    scheduler.preempt(scheduler.running[-1])
    scheduler.preempt(scheduler.running[-1])
    scheduler.finish(scheduler.waiting[-1])
    params = SamplingParams(max_tokens=9, seed=9)
    scheduler.add(make_live(Request("new", [1, *range(25)], params, "a"), ()))
    scheduler.schedule()
    assert planner.groups(scheduler.rows, rows)[0].tolist() == [0, 3]


def test_padding_rows_and_capacity_are_those_of_a_captured_step():
    scheduler = running(("a", 1), ("a", 1), (None, 2))
    plan = plan_of(scheduler, DecodePlanner(PAGE, Workers(6, 6), Workers(5, 12)), num_rows=8)
    assert plan.index.own_U3.shape == plan.index.shared_X4[:, :3].shape == (8, 3)
    assert plan.dense.own_U3.shape == (8, 3)
    assert plan.dense.shared_X4.shape == (12, 4)
    assert plan.dense.own_start_R1.shape == (9,)
    assert (plan.dense.own_start_R1[3:] == plan.dense.own_start_R1[3]).all()
    assert plan.dense.shared_R3.shape == (8, 3)


def test_packed_arrays_are_found_again():
    arrays = [
        np.arange(3, dtype=np.int64),
        np.zeros((0, 4), np.int32),
        np.array([[1.5, 2.5]], np.float32),
        np.arange(5, dtype=np.int32),
    ]
    starts = offsets(arrays)
    packed = np.zeros(starts[-1], np.uint8)
    for start, array in zip(starts, arrays, strict=False):
        packed[start : start + array.nbytes] = array.ravel().view(np.uint8)
    for tensor, array in zip(views(torch.from_numpy(packed), arrays), arrays, strict=True):
        assert tensor.dtype == torch.from_numpy(array).dtype
        assert tensor.data_ptr() % 16 == packed.ctypes.data % 16 or not array.size
        assert np.array_equal(tensor.numpy(), array)
