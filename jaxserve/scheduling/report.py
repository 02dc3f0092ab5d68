"""What the KV cache's blocks are used for."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.scheduling.scheduler import Scheduler


@dataclass(frozen=True)
class MemoryReport:
    """Of one moment.

    Attributes:
      num_blocks: that can be used.
      num_used: blocks of running requests; num_shared: of those, the ones that several hold.
      num_cached: blocks that no request holds but whose content may be found again; num_empty: all others.
      owners: request id -> blocks that it holds, shared ones included.
      waste: share of the token slots in used blocks that hold no token (0 if nothing is used).
      prefix_queries, prefix_hits: tokens looked up, and found, since the engine was made; hit_rate: their ratio.
      num_evictions, num_preemptions: since the engine was made.
      num_running, num_waiting: requests.
    """

    num_blocks: int
    num_used: int
    num_shared: int
    num_cached: int
    num_empty: int
    owners: dict[str, int]
    waste: float
    prefix_queries: int
    prefix_hits: int
    num_evictions: int
    num_preemptions: int
    num_running: int
    num_waiting: int

    @property
    def hit_rate(self) -> float:
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else 0.0


def memory_report(scheduler: Scheduler) -> MemoryReport:
    pool, size = scheduler.pool, scheduler.block_size
    holders: dict[int, int] = {}
    filled: dict[int, int] = {}
    for request in scheduler.running:
        for index, block_id in enumerate(request.block_ids):
            holders[block_id] = holders.get(block_id, 0) + 1
            tokens = min(max(request.num_computed_tokens - index * size, 0), size)
            filled[block_id] = max(filled.get(block_id, 0), tokens)
    stats = scheduler.prefixes.stats
    return MemoryReport(
        num_blocks=pool.num_blocks - 1, num_used=pool.num_used, num_cached=pool.num_cached,
        num_shared=sum(count > 1 for count in holders.values()), num_empty=pool.num_free - pool.num_cached,
        owners={request.request_id: len(request.block_ids) for request in scheduler.running},
        waste=1 - sum(filled.values()) / (size * len(filled)) if filled else 0.0,
        prefix_queries=stats.queries, prefix_hits=stats.hits, num_evictions=pool.num_evictions,
        num_preemptions=scheduler.num_preemptions, num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting))
