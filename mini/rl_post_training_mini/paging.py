"""The KV cache in blocks: tables, reference counts, a group's shared prompt, copy-on-write, preemption.

Stands for: PagedAttention (arXiv:2309.06180). Grown-up version: quintet/rollout/engine/.

Contiguous allocation reserves the maximum length for every request, however short it ends. Blocks are taken as
tokens come, and the G samples of a group hold the very same blocks for their common prompt. The first token a
sample writes into a block that others hold too makes a copy of that block (copy-on-write).

There are no keys and values here, only the book-keeping; this module is given to `RolloutWorker(kv=…)`.
"""

from __future__ import annotations

from collections.abc import Sequence

from .rollout import Request, Rollout


def fragmentation(n_tokens: Sequence[int], reserved: Sequence[int]) -> float:
    """Internal fragmentation: the share of the reserved places that never held a token."""
    return 1.0 - sum(n_tokens) / sum(reserved)


class PagedKVCache:
    """Blocks 0..n_blocks−1 of `block_size` tokens. `refs[b]` is the number of block tables that hold b."""

    def __init__(self, n_blocks: int, block_size: int = 4, share_prompts: bool = True) -> None:
        if n_blocks < 1 or block_size < 1:
            raise ValueError("n_blocks and block_size must be at least 1")
        self.n_blocks, self.block_size, self.share_prompts = n_blocks, block_size, share_prompts
        self.free = list(range(n_blocks))
        self.refs: dict[int, int] = {}
        self.tables: dict[Request, list[int]] = {}
        self.lengths: dict[Request, int] = {}
        self.prompts: dict[int, list[int]] = {}  # group → resident blocks that hold nothing but its prompt
        self.peak_blocks = self.copies = 0

    @property
    def used(self) -> int:
        return self.n_blocks - len(self.free)

    def blocks_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.block_size)

    def admit(self, request: Request) -> bool:
        """Room for the prompt and for what was generated before a preemption; False if it must wait."""
        shared = self._shareable(request)
        needed = self.blocks_for(request.n_tokens) - len(shared)
        if needed > len(self.free):
            return False
        for block in shared:
            self.refs[block] += 1
        self.tables[request] = shared + [self._take() for _ in range(needed)]
        self.lengths[request] = request.n_tokens
        if not request.rollout.response:
            n_prompt = self.blocks_for(len(request.rollout.prompt))
            self.prompts[request.rollout.group_id] = self.tables[request][:n_prompt]
        self._note_peak()
        return True

    def append(self, request: Request) -> bool:
        """Room for one more token; False, with nothing changed, if a block is needed and none is free."""
        table, place = self.tables[request], self.lengths[request] % self.block_size
        last = table[-1]
        if place == 0 or self.refs[last] > 1:
            if not self.free:
                return False
            if place == 0:
                table.append(self._take())
            else:  # others hold the half-full block too: write into a copy
                self._drop(last)
                table[-1] = self._take()
                self.copies += 1
        else:  # ours alone: from now on it holds more than the prompt
            self._forget(request.rollout, last)
        self.lengths[request] += 1
        self._note_peak()
        return True

    def release(self, request: Request) -> None:
        for block in self.tables.pop(request):
            if self._drop(block):
                self._forget(request.rollout, block)
        del self.lengths[request]

    def check(self) -> None:
        """Raises unless every block is either free or held by exactly as many tables as `refs` says."""
        held: dict[int, int] = {}
        for table in self.tables.values():
            for block in table:
                held[block] = held.get(block, 0) + 1
        if held != self.refs or sorted([*held, *self.free]) != list(range(self.n_blocks)):
            raise AssertionError("a block leaked: the reference counts do not agree with the block tables")

    def _shareable(self, request: Request) -> list[int]:
        """The resident prompt blocks of the group: the half-full one only for a sample that starts afresh."""
        blocks = self.prompts.get(request.rollout.group_id, []) if self.share_prompts else []
        n_full = len(request.rollout.prompt) // self.block_size
        return blocks[: len(blocks) if not request.rollout.response else n_full]

    def _take(self) -> int:
        block = self.free.pop()
        self.refs[block] = 1
        return block

    def _drop(self, block: int) -> bool:
        """One holder fewer; True if that was the last and the block is free again."""
        self.refs[block] -= 1
        if self.refs[block]:
            return False
        del self.refs[block]
        self.free.append(block)
        return True

    def _forget(self, rollout: Rollout, block: int) -> None:
        """The block no longer holds just the prompt: neither it nor what follows it is shared with newcomers."""
        blocks = self.prompts.get(rollout.group_id, [])
        if block in blocks:
            del blocks[blocks.index(block) :]
        if not blocks:
            self.prompts.pop(rollout.group_id, None)

    def _note_peak(self) -> None:
        self.peak_blocks = max(self.peak_blocks, self.used)
