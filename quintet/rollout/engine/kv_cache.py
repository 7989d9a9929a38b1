"""The paged KV cache: a pool of fixed-size pages, counted references, copy on write.

A sequence owns a list of page ids, its page table. Samples of one prompt share the prompt's pages; whoever writes
into a page that someone else can see gets a copy of it first. Page 0 is never handed out: it pads page tables.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FIRST_PAGES = 64


class PagePool:
    """Which pages are free, and how many page tables each of the others is in.

    Edges that must not exist: a page with no reference that is not free, a free page with a reference.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity  # pages that may be handed out
        self._free = list(range(capacity, 0, -1))  # popped from the end: low ids first, so that the cache grows late
        self._references: dict[int, int] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.capacity - len(self._free)

    def allocate(self) -> int:
        """A page with one reference. Raises IndexError when none is free: ask `free` first."""
        page = self._free.pop()
        self._references[page] = 1
        return page

    def share(self, pages: list[int]) -> list[int]:
        """A second page table over the same pages."""
        for page in pages:
            self._references[page] += 1
        return list(pages)

    def shared(self, page: int) -> bool:
        return self._references[page] > 1

    def release(self, pages: list[int]) -> None:
        """Drop one reference to each page; those without any are free again."""
        for page in pages:
            self._references[page] -= 1
            if self._references[page] == 0:
                del self._references[page]
                self._free.append(page)


class KVCache:
    """Keys and values of all layers, [2, layers, pages, kv_heads, page_size, head_dim], grown on demand.

    `capacity` pages may be used (page 0 comes on top); memory is taken as page ids are first used.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        capacity: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.page_size = page_size
        self.capacity = capacity
        self.pool = PagePool(capacity)
        self._page_shape = (kv_heads, page_size, head_dim)
        pages = 1 + min(capacity, _FIRST_PAGES)
        self._kv = torch.zeros(2, layers, pages, *self._page_shape, device=device, dtype=dtype)

    @property
    def bytes(self) -> int:
        return self._kv.numel() * self._kv.element_size()

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer as rows: [pages * kv_heads, page_size * head_dim]."""
        rows = self._kv.shape[2] * self._page_shape[0]
        return self._kv[0, index].view(rows, -1), self._kv[1, index].view(rows, -1)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def missing(self, pages: list[int], start: int, end: int) -> int:
        """Pages that `make_writable` would take from the pool."""
        return self.pages_for(end) - len(pages) + sum(map(self.pool.shared, self._touched(pages, start, end)))

    def make_writable(self, pages: list[int], start: int, end: int) -> None:
        """Extend and un-share a page table so that token positions [start, end) may be written."""
        first = start // self.page_size
        for place, page in enumerate(self._touched(pages, start, end), first):
            if self.pool.shared(page):
                fresh = self._allocate()
                self._kv[:, :, fresh] = self._kv[:, :, page]
                self.pool.release([page])
                pages[place] = fresh
        while len(pages) < self.pages_for(end):
            pages.append(self._allocate())

    def scrub(self, pages: list[int]) -> None:
        """Zero a table's own pages, which may hold NaN: a masked entry is multiplied by 0, and 0 x NaN would reach the
        page's next user. Shared pages are left to the last one who has them."""
        self._kv[:, :, [page for page in pages if not self.pool.shared(page)]] = 0.0

    def reset(self) -> None:
        """Forget every page, e.g. after an error; contents are zeroed for the reason given in `scrub`."""
        self.pool = PagePool(self.capacity)
        self._kv.zero_()

    def _touched(self, pages: list[int], start: int, end: int) -> list[int]:
        return pages[start // self.page_size : self.pages_for(end)]

    def _allocate(self) -> int:
        page = self.pool.allocate()
        held = self._kv.shape[2]
        if page >= held:
            grown = min(1 + self.capacity, max(page + 1, 2 * held))
            extra = self._kv.new_zeros(*self._kv.shape[:2], grown - held, *self._page_shape)
            self._kv = torch.cat([self._kv, extra], dim=2)
        return page
