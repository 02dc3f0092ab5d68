"""The KV cache's blocks: who holds which, and which of them hold something worth keeping."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from jaxserve.errors import InvalidInputError

NULL_BLOCK = 0
"""Padding rows of a step write here; it is never handed out and never read."""


class BlockPool:
    """Hands out block ids, counts references, takes them back, and remembers the content of named blocks.

        free --allocate--> used --free--> free    a block without a name
                           used --free--> cached  one with a name: it keeps its content
                         cached --share-> used    found again by its name
                         cached --allocate--> used, without a name: evicted, the one that nobody wanted longest first

    A block that is freed without a name is the next to be handed out (a stack): it is the likeliest to still be in a
    processor's cache.

    Only full blocks get names, and the scheduler shares only what it found by name, so no block that several hold is
    ever written to again: copy-on-write without a copy. Who goes on from a shared beginning (another completion of a
    prompt, a beam) shares its full blocks and computes the tokens of the last, partial one into a block of its own.

    Attributes:
      on_evict: called with a block and its name just before it is evicted.
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
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self.num_evictions = 0
        self.on_evict: Callable[[int, bytes], None] | None = None

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out: those without a holder."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Of those, the ones that still hold something known."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - self.num_free

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None (and nothing changed) when fewer are free."""
        if count > len(self._free) + len(self._cached):
            return None
        block_ids = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block_id in block_ids:
            self._refs[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Adds a holder to blocks that are in use or cached."""
        for block_id in block_ids:
            if not self._refs[block_id]:
                assert block_id in self._cached, f"block {block_id} is free and can't be shared"
                del self._cached[block_id]
            self._refs[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Takes one reference from each block; those without holders can be reused at once, named ones in the order
        given."""
        for block_id in block_ids:
            assert self._refs[block_id] > 0, f"block {block_id} is freed twice"
            self._refs[block_id] -= 1
            if not self._refs[block_id]:
                if block_id in self._name_of:
                    self._cached[block_id] = None
                else:
                    self._free.append(block_id)

    def name(self, block_id: int, name: bytes) -> bool:
        """Says what a block in use holds, from now on unchanged; False if another block holds the same already."""
        assert self._refs[block_id] > 0 and block_id not in self._name_of, f"block {block_id} can't be named"
        if name in self._block_of:
            return False
        self._block_of[name] = block_id
        self._name_of[block_id] = name
        return True

    def find(self, names: Iterable[bytes]) -> list[int]:
        """The blocks that hold these, up to the first that no block holds."""
        found = []
        for name in names:
            block_id = self._block_of.get(name)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def refs(self, block_id: int) -> int:
        """How many hold the block."""
        return self._refs[block_id]

    def name_of(self, block_id: int) -> bytes | None:
        """What the block is known to hold."""
        return self._name_of.get(block_id)

    def num_idle(self, block_ids: Sequence[int]) -> int:
        """How many of these have no holder: sharing them makes so many blocks fewer free."""
        return sum(not self._refs[block_id] for block_id in block_ids)

    def forget(self, block_ids: Iterable[int]) -> None:
        """These do not hold what their names say."""
        for block_id in block_ids:
            name = self._name_of.pop(block_id, None)
            if name is not None:
                del self._block_of[name]
            if block_id in self._cached:
                del self._cached[block_id]
                self._free.append(block_id)

    def _evict(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        name = self._name_of.pop(block_id)
        del self._block_of[name]
        if self.on_evict is not None:
            self.on_evict(block_id, name)
        self.num_evictions += 1
        return block_id

    def forget_all(self) -> None:
        """No block holds what its name says."""
        self.forget(list(self._name_of))

    def unexplained(self, owners: Iterable[Iterable[int]]) -> dict[int, int]:
        """Block -> references that none of `owners` (lists of blocks) explains, below 0 if there are too few; only
        where there are any."""
        held = Counter(block_id for block_ids in owners for block_id in block_ids)
        return {block_id: refs - held[block_id] for block_id, refs in enumerate(self._refs) if refs != held[block_id]}

    def check_integrity(self, owners: Iterable[Iterable[int]]) -> None:
        """Raises AssertionError unless the reference counts are exactly what `owners` (lists of blocks) explain, and
        every block is in one state."""
        held = Counter(block_id for block_ids in owners for block_id in block_ids)
        assert not held[NULL_BLOCK], "the null block is in use"
        for block_id, refs in enumerate(self._refs):
            assert refs == held[block_id], f"block {block_id} has {refs} references, {held[block_id]} holders"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is in the free list twice"
        assert not free & self._cached.keys(), "a block is free and cached"
        idle = {b for b in range(1, self.num_blocks) if not self._refs[b]}
        assert free | self._cached.keys() == idle, "free list and references differ"
        assert self._cached.keys() <= self._name_of.keys(), "a cached block has no name"
        assert not free & self._name_of.keys(), "a free block has a name"
        assert {name: b for b, name in self._name_of.items()} == self._block_of, "names and blocks differ"
