"""When requests stop being worth an answer."""

from __future__ import annotations

import heapq
from itertools import count

from jaxserve.engine.outputs import RequestGroup
from jaxserve.errors import RequestTimeoutError


class Deadlines:
    """Which requests are late.

    Args:
      queue_timeout_s: seconds since its arrival by which a request must have begun to run; None: any time.
    """

    def __init__(self, queue_timeout_s: float | None):
        self._queue_timeout_s = queue_timeout_s
        self._numbers = count()
        self._heap: list[tuple[float, int, RequestGroup, bool]] = []
        self._sweep_at = 64

    def add(self, group: RequestGroup) -> None:
        arrival = group.metrics.arrival_time_s
        if group.deadline_s is not None:
            self._push(arrival + group.deadline_s, group, only_waiting=False)
        if self._queue_timeout_s is not None:
            self._push(arrival + self._queue_timeout_s, group, only_waiting=True)

    def late(self, now: float) -> list[tuple[RequestGroup, RequestTimeoutError]]:
        """Unfinished requests whose time is over, and what to tell their callers; each is told once."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            _, _, group, only_waiting = heapq.heappop(self._heap)
            if not group.num_unfinished or (only_waiting and group.metrics.first_scheduled_time_s is not None):
                continue
            waited = now - group.metrics.arrival_time_s
            what = (f"queue_timeout_s={self._queue_timeout_s} passed before it began to run" if only_waiting else
                    f"deadline_s={group.deadline_s} passed")
            found.append((group, RequestTimeoutError(f"request {group.request_id}: {what} ({waited:.2f} s)")))
        return found

    def _push(self, when: float, group: RequestGroup, *, only_waiting: bool) -> None:
        if len(self._heap) >= self._sweep_at:  # requests that ended long before their time must not stay here
            self._heap = [entry for entry in self._heap if entry[2].num_unfinished]
            heapq.heapify(self._heap)
            self._sweep_at = 2 * len(self._heap) + 64
        heapq.heappush(self._heap, (when, next(self._numbers), group, only_waiting))
