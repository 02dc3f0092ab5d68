"""What the KV cache's blocks are used for."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from jaxserve.scheduling.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """Blocks and requests after a step was planned. Blocks are used, cached or free; host blocks used (by swapped
    requests), cached, or free."""

    used: int
    cached: int
    free: int
    host_used: int
    host_cached: int
    running: int
    waiting: int


class MemoryProfiler:
    """Keeps the curve of the last steps.

    Args:
      num_points: that are kept.
    """

    def __init__(self, num_points: int = 4096):
        self._points: deque[MemoryPoint] = deque(maxlen=num_points)

    def record(self, scheduler: Scheduler) -> None:
        pool, host = scheduler.pool, scheduler.host
        self._points.append(MemoryPoint(
            used=pool.num_used, cached=pool.num_cached, free=pool.num_free - pool.num_cached,
            host_used=0 if host is None else host.pool.num_used,
            host_cached=0 if host is None else host.pool.num_cached,
            running=len(scheduler.running), waiting=len(scheduler.waiting)))

    @property
    def curve(self) -> tuple[MemoryPoint, ...]:
        """Oldest first."""
        return tuple(self._points)


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
      num_host_blocks: that fit into host memory; num_host_used: of those, the ones that swapped requests hold;
        num_host_cached: the ones that hold evicted blocks.
      num_swapped: preemptions that swapped; num_blocks_out, num_blocks_back: blocks copied to the host and from there,
        all since the engine was made.
      compression_ratio: bytes of the blocks that were copied out, divided by bytes that they took on the host; None
        without host memory.
      curve: with `enable_memory_profiler`, of the last steps.
      unexplained: with `enable_memory_profiler`, block -> references that no request explains: a fault in the engine.
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
    num_host_blocks: int = 0
    num_host_used: int = 0
    num_host_cached: int = 0
    num_swapped: int = 0
    num_blocks_out: int = 0
    num_blocks_back: int = 0
    compression_ratio: float | None = None
    curve: tuple[MemoryPoint, ...] = ()
    unexplained: dict[int, int] | None = None

    @property
    def hit_rate(self) -> float:
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else 0.0


def memory_report(scheduler: Scheduler, profiler: MemoryProfiler | None = None, *,
                  compression_ratio: float | None = None) -> MemoryReport:
    """Of this moment.

    Args:
      profiler: None: without a curve, and without a look for lost references.
      compression_ratio: as the runner measured it.
    """
    pool, size, host = scheduler.pool, scheduler.block_size, scheduler.host
    holders: dict[int, int] = {}
    filled: dict[int, int] = {}
    for request in scheduler.running:
        for index, block_id in enumerate(request.block_ids):
            holders[block_id] = holders.get(block_id, 0) + 1
            tokens = min(max(request.num_computed_tokens - index * size, 0), size)
            filled[block_id] = max(filled.get(block_id, 0), tokens)
    stats = scheduler.prefixes.stats
    of_host = {} if host is None else dict(
        num_host_blocks=host.pool.num_blocks - 1, num_host_used=host.pool.num_used,
        num_host_cached=host.pool.num_cached, num_swapped=host.num_swapped, num_blocks_out=host.num_blocks_out,
        num_blocks_back=host.num_blocks_back)
    return MemoryReport(
        num_blocks=pool.num_blocks - 1, num_used=pool.num_used, num_cached=pool.num_cached,
        num_shared=sum(count > 1 for count in holders.values()), num_empty=pool.num_free - pool.num_cached,
        owners={request.request_id: len(request.block_ids) for request in scheduler.running},
        waste=1 - sum(filled.values()) / (size * len(filled)) if filled else 0.0,
        prefix_queries=stats.queries, prefix_hits=stats.hits, num_evictions=pool.num_evictions,
        num_preemptions=scheduler.num_preemptions, num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting), compression_ratio=compression_ratio, **of_host,
        curve=() if profiler is None else profiler.curve,
        unexplained=None if profiler is None else pool.unexplained(request.block_ids for request in scheduler.running))
