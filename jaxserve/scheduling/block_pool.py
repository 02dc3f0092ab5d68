"""The KV cache's blocks: who holds which."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from jaxserve.errors import InvalidInputError

NULL_BLOCK = 0
"""Padding rows of a step write here; it is never handed out and never read."""


class BlockPool:
    """Hands out block ids, counts references, takes them back.

    A freed block is the next to be handed out (a stack): it is the likeliest to still be in a cache.
    """

    def __init__(self, num_blocks: int):
        """Manages blocks 1 ... num_blocks - 1; block 0 is the null block.

        Raises:
          InvalidInputError: fewer than two blocks.
        """
        if num_blocks < 2:
            raise InvalidInputError("num_blocks", num_blocks, "at least 2 (one is the null block)")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._refs = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None (and nothing changed) when fewer are free."""
        if count > len(self._free):
            return None
        block_ids = [self._free.pop() for _ in range(count)]
        for block_id in block_ids:
            self._refs[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Adds a holder to blocks that are in use."""
        for block_id in block_ids:
            assert self._refs[block_id] > 0, f"block {block_id} is free and can't be shared"
            self._refs[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Takes one reference from each block; those without holders can be reused at once."""
        for block_id in block_ids:
            assert self._refs[block_id] > 0, f"block {block_id} is freed twice"
            self._refs[block_id] -= 1
            if not self._refs[block_id]:
                self._free.append(block_id)

    def check_integrity(self, owners: Iterable[Iterable[int]]) -> None:
        """Raises AssertionError unless the reference counts are exactly what `owners` (lists of blocks) explain."""
        held = Counter(block_id for block_ids in owners for block_id in block_ids)
        assert not held[NULL_BLOCK], "the null block is in use"
        for block_id, refs in enumerate(self._refs):
            assert refs == held[block_id], f"block {block_id} has {refs} references, {held[block_id]} holders"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is in the free list twice"
        assert free == {b for b in range(1, self.num_blocks) if not self._refs[b]}, "free list and references differ"
