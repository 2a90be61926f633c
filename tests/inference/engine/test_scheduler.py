"""The scheduler, by hand and against a simulated memory over random histories."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from inference.engine.request import Request, SamplingParams, make_live
from tests.inference.engine.simulated_engine import SimulatedEngine, expected_tokens


def test_a_long_prompt_is_cut_into_chunks_of_the_budget():
    engine = SimulatedEngine(max_tokens_per_step=8)
    engine.add(range(19), max_tokens=2)
    assert [engine.step().num_new_R.tolist() for _ in range(4)] == [[8], [8], [3], [1]]


def test_decodes_come_first_and_prefills_take_the_rest_of_the_budget():
    engine = SimulatedEngine(max_tokens_per_step=8)
    engine.add(range(3))
    engine.step()
    engine.add(range(20))
    schedule = engine.step()
    assert schedule.num_new_R.tolist() == [1, 7]
    assert schedule.num_decodes == 1
    assert schedule.is_last_R.tolist() == [True, False]


def test_a_request_holds_the_pages_of_its_tokens_and_no_more():
    engine = SimulatedEngine()
    live = engine.add(range(4), max_tokens=6)
    held = []
    for _ in range(5):
        engine.step()
        held.append(int(engine.scheduler.rows.num_pages[live.row]))
    # After step i the request has 4 + i tokens; the newest has no keys yet.
    assert held == [1, 2, 2, 2, 2]


def test_members_of_a_group_compute_only_what_follows_the_full_pages_of_the_prompt():
    engine = SimulatedEngine(max_tokens_per_step=100, enable_prefix_cache=False)
    for _ in range(3):
        engine.add(range(11), group_id="g")
    schedule = engine.step()
    assert schedule.num_new_R.tolist() == [11, 3, 3]
    assert engine.scheduler.pool.num_owned == 2 + 3


def test_a_prompt_of_whole_pages_leaves_its_last_page_to_every_member():
    engine = SimulatedEngine(max_tokens_per_step=100, enable_prefix_cache=False)
    for _ in range(2):
        engine.add(range(8), group_id="g")
    assert engine.step().num_new_R.tolist() == [8, 4]


def test_members_wait_for_the_prefill_of_their_group():
    engine = SimulatedEngine(max_tokens_per_step=8, enable_prefix_cache=False)
    engine.add(range(14), group_id="g")
    engine.add(range(14), group_id="g")
    assert engine.step().num_new_R.tolist() == [8]
    assert engine.step().num_new_R.tolist() == [6, 2]
    assert engine.admitted == ["r1", "r2"]


def test_members_join_a_running_member_after_the_first_one_has_left():
    engine = SimulatedEngine(max_running_requests=2, enable_prefix_cache=False)
    engine.add(range(6), group_id="g", max_tokens=1)
    engine.add(range(6), group_id="g", max_tokens=9)
    third = engine.add(range(6), group_id="g")
    engine.run()
    assert third.num_cached_tokens == 4


def test_a_group_takes_one_prompt_only():
    engine = SimulatedEngine()
    engine.add([1, 2], group_id="g")
    with pytest.raises(ValueError, match="'r2' has another prompt than group 'g'"):
        engine.add([1, 3], group_id="g")


# BR-025
def test_a_group_takes_a_seed_only_once_unless_greedy():
    scheduler = SimulatedEngine().scheduler
    greedy = SamplingParams(temperature=0.0, seed=7)
    sampled = SamplingParams(seed=7)
    scheduler.add(make_live(Request("a", [1], greedy, "greedy"), ()))
    scheduler.add(make_live(Request("b", [1], greedy, "greedy"), ()))
    scheduler.add(make_live(Request("c", [1], sampled, "sampled"), ()))
    with pytest.raises(ValueError, match=r"'d' has seed 7 of request 'c' .* own seed"):
        scheduler.add(make_live(Request("d", [1], sampled, "sampled"), ()))


def test_the_cache_gives_full_pages_and_leaves_the_last_token_to_compute():
    engine = SimulatedEngine(max_tokens_per_step=100)
    cached = []
    for length in range(1, 14):
        engine.add(range(13), max_tokens=1)
        engine.run()
        live = engine.add(range(length), max_tokens=1)
        engine.run()
        cached.append(live.num_cached_tokens)
    assert cached == [0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12]


def test_the_cache_knows_the_completion_too():
    engine = SimulatedEngine(max_tokens_per_step=100)
    engine.add(range(5), max_tokens=8)
    engine.run()
    turn = engine.finished["r1"]
    assert len(turn) == 13
    live = engine.add([*turn, 1, 2])
    engine.run()
    assert live.num_cached_tokens == 12


def test_a_request_may_keep_out_of_the_cache():
    engine = SimulatedEngine()
    engine.add(range(9), use_prefix_cache=False)
    engine.run()
    second = engine.add(range(9))
    engine.run()
    third = engine.add(range(9), use_prefix_cache=False)
    engine.run()
    assert (second.num_cached_tokens, third.num_cached_tokens) == (0, 0)


def test_when_pages_run_out_the_latest_admitted_gives_way_and_still_gets_its_tokens():
    engine = SimulatedEngine(num_pages=7, enable_prefix_cache=False, max_tokens_per_step=100)
    prompts = [[i] * 4 for i in range(3)]
    for prompt in prompts:
        engine.add(prompt, max_tokens=16)
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    assert list(engine.finished) == ["r1", "r2", "r3"]
    assert engine.finished == {
        f"r{i + 1}": expected_tokens(prompt, 16) for i, prompt in enumerate(prompts)
    }


def test_a_preempted_request_is_the_first_in_line_again():
    engine = SimulatedEngine(num_pages=6, max_running_requests=3)
    first, second = engine.add([1] * 4), engine.add([2] * 4)
    engine.step()
    third = engine.add([3] * 4)
    assert engine.scheduler.running == [first, second]
    engine.scheduler.preempt(second)
    assert list(engine.scheduler.waiting) == [second, third]


def test_a_page_stays_in_reserve_for_every_running_request():
    engine = SimulatedEngine(num_pages=4, enable_prefix_cache=False, max_tokens_per_step=100)
    for i in range(3):
        engine.add([i] * 4)
    engine.step()
    # Two prompts take a page each; the third would leave no room for the next page of both.
    assert len(engine.scheduler.running) == 2


# BR-010
def test_a_new_version_finds_nothing_of_the_old_and_spares_who_decodes():
    engine = SimulatedEngine(max_tokens_per_step=8)
    decoding = engine.add(range(6), max_tokens=5, group_id="g")
    engine.step()
    prefilling = engine.add(range(20, 40))
    late = engine.add(range(6), max_tokens=2, group_id="g")
    engine.step()
    engine.version = 1
    engine.scheduler.start_version(1)
    assert engine.scheduler.running == [decoding]
    assert decoding.has_stale_pages
    assert list(engine.scheduler.waiting) == [prefilling, late]
    engine.run()
    assert late.num_cached_tokens == 0
    again = engine.add(range(6), max_tokens=1)
    engine.run()
    assert again.num_cached_tokens == 4  # from `late`, written by the new version


def test_what_is_recomputed_for_a_new_version_is_found_there():
    engine = SimulatedEngine()
    live = engine.add(range(9), max_tokens=8)
    engine.step()
    engine.step()
    engine.scheduler.preempt_all()
    engine.scheduler.start_version(1)
    engine.version = 1
    engine.run()
    again = engine.add(range(9))
    engine.run()
    assert (live.num_cached_tokens, again.num_cached_tokens) == (0, 8)


# BR-010
def test_stale_pages_never_enter_the_cache():
    engine = SimulatedEngine()
    engine.add(range(9), max_tokens=8)
    engine.step()
    engine.step()
    engine.scheduler.start_version(1)
    engine.version = 1
    engine.run()
    again = engine.add(range(9))
    engine.run()
    assert again.num_cached_tokens == 0


def test_pages_of_unsound_numbers_are_not_found_again():
    engine = SimulatedEngine()
    live = engine.add(range(6), max_tokens=1)
    schedule = engine.scheduler.schedule()
    engine.scheduler.advance(schedule)
    engine.scheduler.remember_prompts(schedule, np.zeros(1, bool))
    engine.scheduler.finish(live, keep_in_cache=False)
    again = engine.add(range(6))
    engine.run()
    assert again.num_cached_tokens == 0


def test_keys_computed_ahead_are_not_found_by_others():
    engine = SimulatedEngine()
    scheduler, rows = engine.scheduler, engine.scheduler.rows
    live = engine.add(range(7))
    prefill = scheduler.schedule()
    scheduler.advance(prefill)
    places = rows.append_pending(prefill.rows_R)
    scheduler.advance(scheduler.schedule())
    # The step ahead has written the eighth key, which fills the second page of 4.
    assert rows.num_computed[live.row] == 8
    rows.fill_tokens(prefill.rows_R, places, np.array([5]), np.zeros(1), np.zeros(1))
    scheduler.remember_prompts(prefill, np.ones(1, bool))
    assert len(scheduler.prefix_cache.pages) == 1
    scheduler.finish(live)
    assert len(scheduler.prefix_cache.pages) == 1


requests = st.tuples(
    st.just("add"),
    st.integers(0, 2),  # prompt family: a shared head of tokens
    st.integers(1, 20),  # prompt length
    st.integers(1, 12),  # max_tokens
    st.sampled_from([None, "g"]),
    st.booleans(),
)
events = st.one_of(
    requests,
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("abort"), st.integers(0, 7)),
    st.tuples(st.just("commit"), st.booleans()),
)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(events, max_size=25),
    st.integers(8, 20),
    st.integers(1, 24),
    st.integers(1, 5),
    st.booleans(),
)
def test_any_history_reads_its_own_keys_and_ends_with_the_right_tokens(
    history, num_pages, budget, max_running, use_cache
):
    engine = SimulatedEngine(
        num_pages=num_pages,
        max_tokens_per_step=budget,
        max_running_requests=max_running,
        enable_prefix_cache=use_cache,
    )
    asked: dict[str, tuple[list[int], int]] = {}
    for event in history:
        if event[0] == "add":
            _, family, length, max_tokens, group, caches = event
            prompt = [family] * length
            group_id = None if group is None else f"{family}-{length}"
            live = engine.add(
                prompt, max_tokens=max_tokens, group_id=group_id, use_prefix_cache=caches
            )
            asked[live.request_id] = (prompt, max_tokens)
        elif event[0] == "step":
            for _ in range(event[1]):
                engine.step()
        elif event[0] == "abort":
            everyone = [*engine.scheduler.running, *engine.scheduler.waiting]
            if everyone:
                live = everyone[event[1] % len(everyone)]
                engine.scheduler.finish(live)
                del asked[live.request_id]
        else:
            if event[1]:
                engine.scheduler.preempt_all()
            engine.version += 1
            engine.scheduler.start_version(engine.version)
        engine.scheduler.check()
    engine.run()
    assert engine.finished == {
        name: expected_tokens(prompt, max_tokens) for name, (prompt, max_tokens) in asked.items()
    }
    assert engine.scheduler.pool.num_owned == 0


@settings(max_examples=40, deadline=None)
@given(st.lists(requests, min_size=2, max_size=12), st.integers(8, 24))
def test_requests_are_first_admitted_in_the_order_they_were_added(adds, budget):
    engine = SimulatedEngine(num_pages=12, max_tokens_per_step=budget)
    for _, family, length, max_tokens, group, caches in adds:
        group_id = None if group is None else f"{family}-{length}"
        engine.add(
            [family] * length, max_tokens=max_tokens, group_id=group_id, use_prefix_cache=caches
        )
    engine.run()
    first = list(dict.fromkeys(engine.admitted))
    assert first == [f"r{i + 1}" for i in range(len(adds))]
