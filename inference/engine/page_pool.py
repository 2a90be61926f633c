"""Who holds which page of KV memory.

                allocate                    release, last reference
    free  ------------------> owned  -------------------------------> free      (page has no key)
     ^                         ^  \\---------------------------------> cached    (page has a key)
     |         share           |                                        |
     |      cached ------------+                                        |
     +------------------------------------------------------------------+
                 eviction, least recently released first; or the key is dropped

Invariant: every page is free, cached, or owned; the three sets are disjoint and cover the pool.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


class PagePool:
    """Reference counts over `num_pages` pages; pages with a key outlive their last owner."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages={num_pages} must be at least 1")
        self.num_pages = num_pages
        self.on_evict: Callable[[int], None] | None = None
        """Called with a keyed page before it is reused for something else."""
        self._num_owners = [0] * num_pages
        self._is_keyed = [False] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give: free ones, and cached ones after eviction."""
        return len(self._free) + len(self._cached)

    @property
    def num_owned(self) -> int:
        return self.num_pages - self.num_available

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, each with one owner; their content means nothing yet."""
        assert count <= self.num_available, f"{count} pages asked, {self.num_available} available"
        pages = [self._take() for _ in range(count)]
        for page in pages:
            self._num_owners[page] = 1
        return pages

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        page, _ = self._cached.popitem(last=False)
        self._is_keyed[page] = False
        assert self.on_evict is not None, "a page was keyed without a cache to tell"
        self.on_evict(page)
        return page

    def share(self, pages: Iterable[int]) -> None:
        """One owner more for each of `pages`, which are owned or cached."""
        for page in pages:
            if self._num_owners[page] == 0:
                del self._cached[page]
            self._num_owners[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One owner less for each of `pages`, given in the order of the request's tokens.

        The tail goes first into the line for eviction: a chain of pages is only of use from its
        head on.
        """
        for page in reversed(pages):
            assert self._num_owners[page] > 0, f"page {page} has no owner to release it"
            self._num_owners[page] -= 1
            if self._num_owners[page] == 0:
                if self._is_keyed[page]:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def set_key(self, page: int) -> None:
        """`page` is owned and its content can be found again: keep it after its last owner."""
        assert self._num_owners[page] > 0, f"page {page} is keyed without an owner"
        self._is_keyed[page] = True

    def drop_keys(self) -> None:
        """No page can be found again: cached pages are free, owned ones will be."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._is_keyed = [False] * self.num_pages
        # A pool without owners is again as new: page numbers repeat from version to version.
        self._free.sort(reverse=True)

    def num_cached(self, pages: Iterable[int]) -> int:
        """How many of `pages` have no owner (they count as available until shared)."""
        return sum(self._num_owners[page] == 0 for page in pages)

    def check(self, page_tables: Iterable[Sequence[int]], keyed_pages: Iterable[int]) -> None:
        """Assert the invariant against the page tables of all owners and the cache's pages."""
        owners = [0] * self.num_pages
        for table in page_tables:
            for page in table:
                owners[page] += 1
        assert owners == self._num_owners, f"owners {self._num_owners}, by the tables {owners}"
        keyed = set(keyed_pages)
        assert keyed == {p for p in range(self.num_pages) if self._is_keyed[p]}
        owned = {page for page in range(self.num_pages) if owners[page]}
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a page is twice in the free list"
        assert len(free) + len(cached) + len(owned) == self.num_pages
        assert free | cached | owned == set(range(self.num_pages))
        assert cached == keyed - owned, "cached are exactly the keyed pages without an owner"
