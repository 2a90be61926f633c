"""Full pages found again by the tokens that lead to them.

The key of a page is a hash over the key of the page before it and its own tokens; the chain starts
from the policy version. So equal keys mean: same version, same tokens from position 0 on. With 128
bits no token is compared on a hit.
"""

from __future__ import annotations

import hashlib

import numpy as np

from inference.engine.page_pool import PagePool


class PrefixCache:
    """A map from page key to page, over the pages of one pool."""

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self._root = b""
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        pool.on_evict = self._forget

    @property
    def pages(self) -> list[int]:
        """All pages that can be found."""
        return list(self._key_of)

    def drop(self, version: int) -> None:
        """Forget every page; keys made from now on are those of `version`."""
        self._root = hashlib.blake2b(b"version %d" % version, digest_size=16).digest()
        self.forget_all()

    def forget_all(self) -> None:
        """No page is found any more; keys stay valid."""
        self._page_of.clear()
        self._key_of.clear()
        self._pool.drop_keys()

    def extend_keys(self, keys: list[bytes], tokens: np.ndarray, num_pages: int) -> None:
        """Append to `keys` until the first `num_pages` pages of `tokens` (int32) have theirs."""
        for i in range(len(keys), num_pages):
            parent = keys[-1] if keys else self._root
            page_tokens = tokens[i * self._page_size : (i + 1) * self._page_size]
            assert len(page_tokens) == self._page_size, "only full pages have a key"
            keys.append(hashlib.blake2b(parent + page_tokens.tobytes(), digest_size=16).digest())

    def match(self, keys: list[bytes]) -> list[int]:
        """Pages of the longest known head of `keys`."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def insert(self, keys: list[bytes], pages: list[int]) -> None:
        """Make `pages[i]`, owned and fully written, known under `keys[i]`; a known key stays."""
        for key, page in zip(keys, pages, strict=True):
            if key not in self._page_of and page not in self._key_of:
                self._page_of[key] = page
                self._key_of[page] = key
                self._pool.set_key(page)

    def _forget(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]
