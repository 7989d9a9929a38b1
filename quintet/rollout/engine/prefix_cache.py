"""KV pages and what is known to be in them: a tree of pages keyed by the tokens that they hold.

A node is one page, filled with 1 to PAGE tokens and never written again; its key is its parent and its tokens, so
equal beginnings of two requests, or of two turns of one conversation, meet in the same nodes. A page may be partly
filled (the end of a prompt): what follows starts a new page, so that samples of one prompt share all of it and nothing
is ever copied. Pages are in one of three places: free, private to a running sample, or in the tree, where those that
no running sample uses stay for later requests, up to `keep` of them; the least recently used leaf goes first.

All of it belongs to one weight version: `clear` when the weights change.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from quintet.rollout.engine.step import PAGE


@dataclass(eq=False, slots=True)
class Node:
    """One page of the tree. Edges that must not exist: an evicted node with users or children."""

    parent: Node | None
    key: bytes  # its tokens, int32
    page: int
    users: int = 0
    used_at: int = 0
    tainted: bool = False  # may hold NaN: not given to further requests, zeroed before its page is used again
    children: dict[bytes, Node] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self.key) // 4


_Leaf = tuple[int, int, Node]  # when it was last used, an id that orders equals, the node
_STALE = 64  # entries of the heap that need not be worth a clean-up


def _is_current(leaf: _Leaf) -> bool:
    used_at, _, node = leaf
    return node.users == 0 and not node.children and node.used_at == used_at and bool(node.page)


class PrefixCache:
    """`capacity` pages, numbered from 1 so that low ids, and thus little memory, are used first."""

    def __init__(self, capacity: int, keep: int, clear_pages: Callable[[Sequence[int]], None]) -> None:
        self.capacity = capacity
        self.highest = 0  # largest page id ever handed out
        self.idle = 0  # pages in the tree that no running sample uses
        self._keep = keep
        self._clear_pages = clear_pages
        self._free = list(range(capacity, 0, -1))
        self._root = Node(None, b"", 0)
        self._leaves: list[_Leaf] = []  # heap of idle leaves, oldest first; may hold stale entries
        self._clock = 0

    @property
    def available(self) -> int:
        """Pages that `take` can give, after evictions."""
        return len(self._free) + self.idle

    @property
    def in_use(self) -> int:
        return self.capacity - self.available

    def take(self, count: int) -> list[int]:
        """Private pages. Raises IndexError when fewer are available: ask first."""
        while len(self._free) < count:
            self._evict_one()
        taken = self._free[len(self._free) - count :][::-1]
        del self._free[len(self._free) - count :]
        self.highest = max(self.highest, *taken) if taken else self.highest
        return taken

    def give(self, pages: Sequence[int]) -> None:
        """Private pages back to the free ones."""
        self._free.extend(pages)

    def match(self, tokens: np.ndarray) -> list[Node]:
        """The longest chain of known pages that `tokens` (int32) begin with; not acquired yet."""
        node, at, chain = self._root, 0, []
        while at < len(tokens):
            child = self._child(node, tokens[at : at + PAGE])
            if child is None:
                break
            chain.append(child)
            node, at = child, at + child.count
        return chain

    def acquire(self, chain: Sequence[Node]) -> None:
        """Keep these pages until they are released as often."""
        for node in chain:
            self.idle -= node.users == 0
            node.users += 1

    def release(self, chain: Sequence[Node]) -> None:
        self._clock += 1
        for node in reversed(chain):
            node.users -= 1
            node.used_at = self._clock
            self.idle += node.users == 0
            self._note_leaf(node)
        while self.idle > self._keep:
            self._evict_one()

    def insert(self, chain: Sequence[Node], tokens: np.ndarray, pages: Sequence[int]) -> list[Node]:
        """Private pages that hold `tokens`, following on an acquired chain, become part of the tree and acquired.

        Where the tree has them already its own are taken and the private page is free again. Returns the new nodes.
        """
        node, added = chain[-1] if chain else self._root, []
        for index, page in enumerate(pages):
            key = tokens[index * PAGE : (index + 1) * PAGE].tobytes()
            child = node.children.get(key)
            if child is None or child.tainted:
                child = node.children[key] = Node(node, key, page)
                self.idle += 1
            else:
                self.give([page])
            self.acquire([child])
            added.append(child)
            node = child
        return added

    def clear(self) -> None:
        """Forget everything that no running sample uses; nobody may be running when the weights have changed."""
        while self.idle:
            self._evict_one()

    def _child(self, node: Node, tokens: np.ndarray) -> Node | None:
        """The longest page below `node` that `tokens` begin with."""
        whole = node.children.get(tokens.tobytes())
        if whole is not None and not whole.tainted:
            return whole
        for count in sorted({len(key) // 4 for key in node.children if len(key) < 4 * len(tokens)}, reverse=True):
            child = node.children.get(tokens[:count].tobytes())
            if child is not None and not child.tainted:
                return child
        return None

    def _note_leaf(self, node: Node) -> None:
        if node.users == 0 and not node.children:
            heapq.heappush(self._leaves, (node.used_at, id(node), node))
            if len(self._leaves) > 2 * self.idle + _STALE:
                self._leaves = [entry for entry in self._leaves if _is_current(entry)]
                heapq.heapify(self._leaves)

    def _evict_one(self) -> None:
        while True:
            entry = heapq.heappop(self._leaves)
            if _is_current(entry):
                break
        node = entry[2]
        if node.tainted:
            self._clear_pages([node.page])
        self.give([node.page])
        self.idle -= 1
        node.page = 0  # marks stale entries of the heap
        parent = node.parent
        if parent is not None and parent.children.get(node.key) is node:
            del parent.children[node.key]
            if parent is not self._root:
                self._note_leaf(parent)
