"""Every page is free, cached or owned, whatever is done to the pool."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from inference.engine.page_pool import PagePool
from inference.engine.prefix_cache import PrefixCache


def test_pages_come_back_to_be_given_again():
    pool = PagePool(3)
    first = pool.allocate(2)
    assert pool.num_available == 1
    assert pool.num_owned == 2
    pool.release(first)
    assert sorted(pool.allocate(3)) == [0, 1, 2]


def test_a_shared_page_is_free_only_after_its_last_owner():
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.share(pages)
    pool.release(pages)
    assert pool.num_available == 1
    pool.release(pages)
    assert pool.num_available == 2


def test_eviction_takes_the_tail_of_the_least_recently_released_chain():
    pool = PagePool(4)
    cache = PrefixCache(pool, page_size=2)
    cache.drop(0)
    chains = []
    for start in (0, 10):
        keys: list[bytes] = []
        cache.extend_keys(keys, np.arange(start, start + 4, dtype=np.int32), 2)
        pages = pool.allocate(2)
        cache.insert(keys, pages)
        chains.append((keys, pages))
    pool.release(chains[1][1])
    pool.release(chains[0][1])
    (taken,) = pool.allocate(1)
    assert taken == chains[1][1][1]
    assert cache.match(chains[1][0]) == chains[1][1][:1]
    assert cache.match(chains[0][0]) == chains[0][1]


def test_a_dropped_key_frees_the_page_and_spares_its_owner():
    pool = PagePool(2)
    cache = PrefixCache(pool, page_size=1)
    cache.drop(0)
    keys: list[bytes] = []
    cache.extend_keys(keys, np.array([5, 6], np.int32), 2)
    pages = pool.allocate(2)
    cache.insert(keys, pages)
    pool.release(pages[1:])
    cache.drop(1)
    assert cache.match(keys) == []
    assert pool.num_available == 1
    pool.check([pages[:1]], cache.pages)


# BR-010
def test_equal_tokens_have_another_key_in_another_version_and_after_another_page():
    pool = PagePool(1)
    cache = PrefixCache(pool, page_size=2)
    tokens = np.array([3, 4, 3, 4], np.int32)
    chains = []
    for version in (0, 1):
        cache.drop(version)
        keys: list[bytes] = []
        cache.extend_keys(keys, tokens, 2)
        chains += keys
    assert len(set(chains)) == 4


operations = st.lists(
    st.tuples(
        st.sampled_from(["allocate", "share", "release", "insert", "match", "drop"]),
        st.integers(0, 5),
        st.integers(0, 5),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(operations)
def test_every_page_is_free_cached_or_owned_after_every_operation(ops):
    """Tables are what requests hold; chain `c` means the tokens c, c, c, …"""
    pool = PagePool(6)
    cache = PrefixCache(pool, page_size=1)
    cache.drop(0)
    tables: list[tuple[int, list[int]]] = []
    version = 0

    def keys_of(chain: int, count: int) -> list[bytes]:
        keys: list[bytes] = []
        cache.extend_keys(keys, np.full(count, chain, np.int32), count)
        return keys

    for op, a, b in ops:
        if op == "allocate" and a <= pool.num_available:
            tables.append((b, pool.allocate(a)))
        elif op == "drop":
            version += 1
            cache.drop(version)
        elif op == "match":
            found = cache.match(keys_of(a, b))
            pool.share(found)
            tables.append((a, found))
        elif tables:
            chain, pages = tables[a % len(tables)]
            if op == "share":
                pool.share(pages)
                tables.append((chain, list(pages)))
            elif op == "insert":
                cache.insert(keys_of(chain, len(pages)), pages)
            elif op == "release":
                pool.release(pages)
                del tables[a % len(tables)]
        pool.check([pages for _, pages in tables], cache.pages)
