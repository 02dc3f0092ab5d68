"""KV blocks kept in host memory: those of swapped requests, and cached ones that the device had no room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jaxserve.request import Request
from jaxserve.scheduling.block_pool import BlockPool
from jaxserve.scheduling.move_costs import MoveCosts

PreemptionMode = Literal["auto", "recompute", "swap"]

Moves = list[tuple[int, int]]
"""(device block, host block) each."""


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """What the host offers.

    Attributes:
      num_blocks: that fit into its memory.
      costs: decide whether a preempted request is swapped ("auto"), and whether cached blocks are worth fetching.
      preemption_mode: "swap": always while there is room; "recompute": never, only cached blocks are kept.
    """

    num_blocks: int
    costs: MoveCosts
    preemption_mode: PreemptionMode = "auto"


class HostTier:
    """Which host block holds what, and the copies that a step needs before it runs.

    A swapped request holds its host blocks until it runs again or ends. Named blocks that nobody holds are a second
    level of the prefix cache: they come when the device evicts them, and the one that nobody wanted longest gives way.

    All copies out of a plan run before its copies in, in order, and both after all earlier steps. So a device block can
    be copied out and handed out again within one plan. A host block that a plan reads is held until the plan is made,
    or a copy out of the same plan could overwrite it first.
    """

    def __init__(self, memory: HostMemory, device: BlockPool):
        self.pool = BlockPool(memory.num_blocks + 1)  # block 0 is nobody's, as on the device
        self._memory, self._device = memory, device
        self._out: Moves = []
        self._back: Moves = []
        self._reading: list[int] = []
        self.num_blocks_out = self.num_blocks_back = self.num_swapped = 0
        device.on_evict = self._keep

    def swap_out(self, request: Request) -> bool:
        """Copies the blocks that hold the request's computed tokens, if that pays and there is room; whether it did."""
        memory = self._memory
        block_ids = request.block_ids
        if memory.preemption_mode == "recompute" or not block_ids or not request.num_computed_tokens:
            return False
        names = [self._device.name_of(block_id) for block_id in block_ids]
        there = [self.pool.find([name]) if name is not None else [] for name in names]
        num_missing = there.count([])
        if memory.preemption_mode == "auto" and not memory.costs.swap_is_cheaper(
                num_blocks_out=num_missing, num_blocks_back=len(block_ids), num_tokens=request.num_computed_tokens):
            return False
        for found in there:  # before `allocate` can evict them
            self.pool.share(found)
        fresh = self.pool.allocate(num_missing)
        if fresh is None:
            for found in there:
                self.pool.free(found)
            return False
        fresh.reverse()
        request.host_block_ids = [found[0] if found else self._copy_out(block_id, name, fresh.pop())
                                  for block_id, name, found in zip(block_ids, names, there, strict=True)]
        self.num_swapped += 1
        return True

    def cached(self, names: Sequence[bytes], tokens_per_block: int) -> list[int]:
        """Host blocks that hold these, up to the first that none holds, if fetching them is worth it."""
        found = self.pool.find(names)
        costs = self._memory.costs
        if found and costs.fetch_is_cheaper(num_blocks=len(found), num_tokens=len(found) * tokens_per_block):
            return found
        return []

    def hold(self, host_ids: Sequence[int]) -> None:
        """This plan will copy them back, whatever it evicts before."""
        self.pool.share(host_ids)
        self._reading += host_ids

    def copy_back(self, device_ids: Sequence[int], host_ids: Sequence[int]) -> None:
        """Before the step, these device blocks get the content of blocks that are held."""
        self._back += zip(device_ids, host_ids, strict=True)
        self.num_blocks_back += len(device_ids)

    def drop(self, request: Request) -> None:
        """A request needs its host blocks no more."""
        self.pool.free(reversed(request.host_block_ids))
        request.host_block_ids = []

    def take_moves(self) -> tuple[Moves, Moves]:
        """Copies out and in since the last call; they must run before the next step."""
        moves = self._out, self._back
        self._out, self._back = [], []
        self.pool.free(reversed(self._reading))
        self._reading = []
        return moves

    def _keep(self, block_id: int, name: bytes) -> None:
        """The device evicts a block."""
        if found := self.pool.find([name]):
            self.pool.share(found)  # wanted again: now the last to go
        elif found := self.pool.allocate(1) or []:
            self._copy_out(block_id, name, found[0])
        self.pool.free(found)

    def _copy_out(self, block_id: int, name: bytes | None, host_id: int) -> int:
        if name is not None:
            self.pool.name(host_id, name)
        self._out.append((block_id, host_id))
        self.num_blocks_out += 1
        return host_id
