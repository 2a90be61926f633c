"""Which tokens of which requests the next step computes, and in which pages.

            admit                          finish, abort
    waiting ------> running (prefill, decode) ----------> gone
        ^             |
        +-------------+  preempt: pages given back, tokens kept, recomputed later

Requests run in the order they were added. The earlier one always wins: a request that needs a page
when none is left takes those of the latest admitted one. A request holds the pages of the tokens it
has and no more; at least its last token is computed by itself, whatever was found in the cache.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from inference.engine.page_pool import PagePool
from inference.engine.prefix_cache import PrefixCache
from inference.engine.request import LiveRequest
from inference.engine.rows import RunningRows


@dataclass(slots=True)
class Schedule:
    """One step's work, in batch order: rows with one new token first, each part by admission."""

    rows_R: np.ndarray
    """[R] int64: rows of `RunningRows`."""
    num_new_R: np.ndarray
    """[R] int64: tokens to compute of each row, at least 1."""
    is_last_R: np.ndarray
    """[R] bool: the step reaches the row's last token, so the row samples its next one."""
    ends_prompt_R: np.ndarray
    """[R] bool: with this step all keys of the row's prompt are there."""
    num_decodes: int
    """Leading rows with exactly one new token."""


def empty_schedule() -> Schedule:
    """Of a step without requests."""
    no_rows, nobody = np.zeros(0, np.int64), np.zeros(0, bool)
    return Schedule(no_rows, no_rows, nobody, nobody, 0)


@dataclass(slots=True, eq=False)
class Group:
    """The live requests of one group: same prompt, so one copy of its full pages is enough."""

    number: int
    prompt_ids: np.ndarray
    members: list[LiveRequest] = field(default_factory=list)


class Scheduler:
    """First come, first served, over one page pool."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_running_requests: int,
        max_tokens_per_step: int,
        enable_prefix_cache: bool,
    ) -> None:
        if max_running_requests < 1 or max_tokens_per_step < 1:
            raise ValueError(
                f"max_running_requests={max_running_requests} and "
                f"max_tokens_per_step={max_tokens_per_step} must be at least 1"
            )
        self.pool = PagePool(num_pages)
        self.prefix_cache = PrefixCache(self.pool, page_size)
        self.rows = RunningRows(max_running_requests, page_size)
        self.waiting: deque[LiveRequest] = deque()
        self.running: list[LiveRequest] = []
        """In order of admission."""
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        """Of all first admissions."""
        self.num_cached_tokens = 0
        """How many of them had their keys already."""
        self._page_size = page_size
        self._max_tokens_per_step = max_tokens_per_step
        self._enable_prefix_cache = enable_prefix_cache
        self._groups: dict[str, Group] = {}
        self._group_numbers = itertools.count()
        self._order = np.zeros(0, np.int64)
        """Rows of `running`, in the same order."""

    def add(self, live: LiveRequest) -> None:
        """Append to the line. ValueError when its group has another prompt or the same seed."""
        request = live.request
        if request.group_id is not None:
            group = self._groups.get(request.group_id)
            if group is None:
                group = Group(next(self._group_numbers), request.prompt_ids)
                self._groups[request.group_id] = group
            _check_member(group, live)
            group.members.append(live)
            live.group = group
        self.waiting.append(live)

    def schedule(self, *, admit_new: bool = True) -> Schedule | None:
        """Plan a step, taking pages and rows; None when there is nothing to compute.

        With `admit_new` off only preempted requests, which have sampled tokens, are admitted.
        """
        self.rows.num_planned[self._order] = 0
        self._take_pages_for_sampled_tokens()
        budget = self._plan_running(self._max_tokens_per_step)
        self._admit(budget, admit_new=admit_new)
        rows_R = self._order[self.rows.num_planned[self._order] > 0]
        if len(rows_R) == 0:
            return None
        is_single_R = self.rows.num_planned[rows_R] == 1
        rows_R = np.concatenate([rows_R[is_single_R], rows_R[~is_single_R]])
        num_new_R = self.rows.num_planned[rows_R]
        is_last_R = self.rows.num_computed[rows_R] + num_new_R == self.rows.num_tokens[rows_R]
        is_prefill_R = self.rows.num_computed[rows_R] < self.rows.num_prompt[rows_R]
        return Schedule(
            rows_R, num_new_R, is_last_R, is_last_R & is_prefill_R, int(is_single_R.sum())
        )

    @property
    def is_short_of_pages(self) -> bool:
        """Whether the next `schedule` would preempt: all sampled tokens must be known by then."""
        return len(self._rows_without_page()) > self.pool.num_available

    def _rows_without_page(self) -> np.ndarray:
        """Running rows whose newest token needs a page that they do not have yet."""
        rows, order = self.rows, self._order
        has_too_few = rows.num_tokens[order] > rows.num_pages[order] * self._page_size
        return order[has_too_few & ~rows.is_complete(order)]

    def _take_pages_for_sampled_tokens(self) -> None:
        while len(short := self._rows_without_page()) > self.pool.num_available:
            self.preempt(self.running[-1])
        if len(short):
            self.rows.add_page(short, self.pool.allocate(len(short)))

    def _plan_running(self, budget: int) -> int:
        """Decodes first, then prefills go on in order of admission; returns the tokens left.

        Every running request had a token of the budget when it was admitted, so all decodes fit.
        """
        rows = self.rows
        order = self._order[~rows.is_complete(self._order)]
        remaining = rows.num_tokens[order] - rows.num_computed[order]
        rows.num_planned[order[remaining == 1]] = 1
        budget -= int((remaining == 1).sum())
        for row in order[remaining > 1].tolist():
            chunk = min(budget, int(rows.num_tokens[row] - rows.num_computed[row]))
            rows.num_planned[row] = chunk
            budget -= chunk
        return budget

    def _admit(self, budget: int, *, admit_new: bool) -> None:
        while self.waiting and budget > 0 and self.rows.has_free:
            live = self.waiting[0]
            if not admit_new and not live.has_sampled:
                break
            if not self._place(live, self._reusable_pages(live)):
                break
            self.waiting.popleft()
            self.running.append(live)
            count = min(budget, len(live.tokens) - int(self.rows.num_computed[live.row]))
            self.rows.num_planned[live.row] = count
            budget -= count
            self._order = np.append(self._order, live.row)
        assert self.running or not self.waiting or not admit_new, (
            f"request {self.waiting[0].request_id!r} does not fit into an empty pool"
        )

    def _reusable_pages(self, live: LiveRequest) -> list[int]:
        """Pages that hold the head of `live`'s tokens by the end of this step."""
        most = (len(live.tokens) - 1) // self._page_size
        shared: list[int] = []
        if live.group is not None and most:
            shared = self._pages_of_group(live, (live.num_prompt - 1) // self._page_size)
        if len(shared) < most and self._uses_cache(live):
            self.prefix_cache.extend_keys(live.page_keys, live.tokens, most)
            cached = self.prefix_cache.match(live.page_keys[:most])
            shared = max(shared, cached, key=len)
        return shared

    def _pages_of_group(self, live: LiveRequest, num_pages: int) -> list[int]:
        """The full prompt pages of a running member; none when no member runs.

        They are written by the end of this step: a prefill that does not end in it has used up the
        budget, and then nobody is admitted. That is soon enough, as a layer writes all keys of a
        step before it reads any.
        """
        rows = self.rows
        assert live.group is not None, "the caller has checked"
        for member in live.group.members:
            if member.row >= 0 and not member.has_stale_pages:
                written = rows.num_computed[member.row] + rows.num_planned[member.row]
                assert written >= num_pages * self._page_size, "admitted before its group's prefill"
                if self._uses_cache(live) and len(member.page_keys) > len(live.page_keys):
                    live.page_keys = member.page_keys[:num_pages]
                return rows.pages(member.row, num_pages)
        return []

    def _place(self, live: LiveRequest, shared: list[int]) -> bool:
        """Give `live` a row and pages for all its tokens; False when too few pages are left.

        One page stays in reserve for each running request: its next one.
        """
        needed = -(-len(live.tokens) // self._page_size) - len(shared)
        available = self.pool.num_available - self.pool.num_cached(shared)
        if needed + len(self.running) > available:
            return False
        self.pool.share(shared)
        num_cached = len(shared) * self._page_size
        self.rows.place(live, shared + self.pool.allocate(needed), num_cached)
        if live.num_cached_tokens < 0:
            live.num_cached_tokens = num_cached
            self.num_cached_tokens += num_cached
            self.num_prompt_tokens += live.num_prompt
        return True

    def advance(self, schedule: Schedule) -> None:
        """The step is under way: whatever runs after it finds the keys of its tokens."""
        self.rows.num_computed[schedule.rows_R] += schedule.num_new_R

    def remember_prompts(self, schedule: Schedule, is_sound_R: np.ndarray) -> None:
        """Prompts that became whole in a step are known to the cache from now on.

        `is_sound_R` [R] bool is False where the step's numbers were not finite, or where the row
        has another request by now: those pages are not to be found by others.
        """
        for row in schedule.rows_R[schedule.ends_prompt_R & is_sound_R].tolist():
            live = self.rows.live[row]
            assert live is not None
            # Later keys may be of a step whose numbers nobody has looked at.
            self._remember_pages(live, live.num_prompt)

    def preempt(self, live: LiveRequest) -> None:
        """Take pages and row of a running request; it is the first in line again.

        Call it for the latest admitted one first: then the order of the line stays true.
        """
        self._requeue(live, keep_in_cache=True)
        self.num_preemptions += 1

    def preempt_all(self) -> None:
        """As `preempt` for every running request, not counted as preemptions."""
        for live in reversed(list(self.running)):
            self._requeue(live, keep_in_cache=True)

    def forget_pages(self) -> None:
        """What the pages hold is unknown, after a step that broke off: everyone starts anew."""
        for live in reversed(list(self.running)):
            self._requeue(live, keep_in_cache=False)
        self.prefix_cache.forget_all()

    def finish(self, live: LiveRequest, *, keep_in_cache: bool = True) -> None:
        """The request leaves the engine, from whichever state."""
        if live.row >= 0:
            self._take_pages_back(live, keep_in_cache=keep_in_cache)
        else:
            self.waiting.remove(live)
        if live.group is not None:
            live.group.members.remove(live)
            if not live.group.members:
                assert live.request.group_id is not None, "members of a group have its id"
                del self._groups[live.request.group_id]

    def _requeue(self, live: LiveRequest, *, keep_in_cache: bool) -> None:
        self._take_pages_back(live, keep_in_cache=keep_in_cache)
        self.waiting.appendleft(live)

    def _take_pages_back(self, live: LiveRequest, *, keep_in_cache: bool) -> None:
        if keep_in_cache:
            # The key of the newest token, if it is there, was computed ahead and never judged.
            rows, row = self.rows, live.row
            self._remember_pages(live, min(rows.num_computed[row], rows.num_tokens[row] - 1))
        self.running.remove(live)
        self._order = np.array([other.row for other in self.running], np.int64)
        self.pool.release(self.rows.remove(live))
        live.has_stale_pages = False

    def _uses_cache(self, live: LiveRequest) -> bool:
        return self._enable_prefix_cache and live.request.use_prefix_cache

    def _remember_pages(self, live: LiveRequest, num_keys: int) -> None:
        """Let the prefix cache find the pages that the first `num_keys` of a request fill."""
        if live.has_stale_pages or not self._uses_cache(live):
            return
        row = live.row
        count = int(num_keys) // self._page_size
        self.prefix_cache.extend_keys(live.page_keys, self.rows.tokens_MX[row], count)
        self.prefix_cache.insert(live.page_keys[:count], self.rows.pages(row, count))

    def start_version(self, version: int) -> None:
        """New weights: nothing written so far is found again; who runs keeps what it has.

        Requests in the middle of a prefill start it anew: they have nothing yet to keep.
        """
        rows = self.rows
        for live in reversed(list(self.running)):
            is_prefill = rows.num_tokens[live.row] - rows.num_computed[live.row] > 1
            if is_prefill or not live.has_sampled:
                self._requeue(live, keep_in_cache=False)
            else:
                live.has_stale_pages = True
        self.prefix_cache.drop(version)
        for live in [*self.running, *self.waiting]:
            live.page_keys = []

    def check(self) -> None:
        """Assert that every page is free, cached or owned, against the page tables."""
        tables = [self.rows.pages(live.row) for live in self.running]
        self.pool.check(tables, self.prefix_cache.pages)
        assert [live.row for live in self.running] == self._order.tolist()


def _check_member(group: Group, live: LiveRequest) -> None:
    request = live.request
    if not np.array_equal(group.prompt_ids, request.prompt_ids):
        raise ValueError(
            f"request {request.request_id!r} has another prompt than group {request.group_id!r} "
            f"({len(request.prompt_ids)} and {len(group.prompt_ids)} tokens); "
            "give each prompt its own group_id"
        )
    if request.params.temperature == 0.0:
        return
    for member in group.members:
        if member.seed == live.seed:
            raise ValueError(
                f"request {request.request_id!r} has seed {live.seed} of request "
                f"{member.request_id!r} in group {request.group_id!r}: it would be a copy; "
                "give every member its own seed"
            )
