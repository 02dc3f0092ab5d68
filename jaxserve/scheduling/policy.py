"""Who is served first."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from numbers import Real
from typing import Literal

from jaxserve.errors import InvalidInputError
from jaxserve.request import Request

PolicyName = Literal["fcfs", "priority"]


@dataclass(frozen=True, kw_only=True)
class PriorityWeights:
    """What a request's priority is worth beside its own number, in units of that number.

    The request with the lowest rank is served first:

        rank = priority - (waiting * seconds waited + expected_latency * expected steps + business_value * its value)

    All requests grow older at the same pace, so their order never changes while they wait. None starves: one that is
    `d` higher in rank than the lowest that ever comes is passed only by those that arrive within d / waiting seconds.

    Attributes:
      waiting: of a second in the queue; above 0.
      expected_latency: of a step that the request may take (its chunks of prompt and its tokens to generate); negative
        serves short ones first.
      business_value: of a unit of what the caller says that the request is worth.
    """

    waiting: float = 0.1
    expected_latency: float = 0.0
    business_value: float = 1.0

    def __post_init__(self) -> None:
        for name in ("waiting", "expected_latency", "business_value"):
            value = getattr(self, name)
            if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value):
                raise InvalidInputError(f"priority_weights.{name}", value, "a finite number")
        if self.waiting <= 0:
            raise InvalidInputError("priority_weights.waiting", self.waiting, "above 0, or requests could starve")


@dataclass(frozen=True)
class Policy:
    """The order of requests: by arrival, or by rank.

    Attributes:
      max_num_batched_tokens: of a step, to tell how many steps a prompt takes.
    """

    name: PolicyName
    weights: PriorityWeights
    max_num_batched_tokens: int

    @property
    def preempts(self) -> bool:
        """Whether a request that waits may take the place of one that runs."""
        return self.name == "priority"

    def rank(self, request: Request) -> float:
        """Lower is sooner; constant. (What all requests' ranks lose in a second, they lose together.)"""
        if self.name == "fcfs":
            return 0.0
        weights = self.weights
        steps = -(-request.num_prompt_tokens // self.max_num_batched_tokens)
        steps += request.max_total_tokens - request.num_prompt_tokens
        return (request.priority + weights.waiting * request.arrival_time_s - weights.expected_latency * steps
                - weights.business_value * request.business_value)


Place = tuple[float, int]


class WaitingQueue:
    """Requests in the order of their places: rank, then order of arrival, which a request keeps when it is preempted.

    A heap; who leaves from the middle is dropped when it comes up.
    """

    def __init__(self, rank: Callable[[Request], float]):
        self._rank = rank
        self._heap: list[tuple[Place, Request]] = []
        self._waiting: dict[Request, Place] = {}
        self._places: dict[Request, Place] = {}
        self._num_arrivals = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        """In order; for reports and tests."""
        return iter(sorted(self._waiting, key=self._waiting.__getitem__))

    def place(self, request: Request) -> Place:
        """Lower is sooner; of a request that was added and has not been forgotten."""
        return self._places[request]

    def add(self, request: Request) -> None:
        """A new request, or one that was preempted."""
        if request not in self._places:
            self._places[request] = self._rank(request), self._num_arrivals
            self._num_arrivals += 1
        self._waiting[request] = place = self._places[request]
        heapq.heappush(self._heap, (place, request))

    def first(self) -> Request | None:
        """Who is next; stays in the queue."""
        while self._heap:
            place, request = self._heap[0]
            if self._waiting.get(request) == place:
                return request
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Request:
        """Takes out who is next, to run."""
        request = self.first()
        assert request is not None, "nobody waits"
        heapq.heappop(self._heap)
        del self._waiting[request]
        return request

    def forget(self, request: Request) -> None:
        """It has ended."""
        self._waiting.pop(request, None)
        self._places.pop(request, None)
        if len(self._heap) > 2 * len(self._waiting) + 64:  # most of it has left
            self._heap = [(place, waiting) for waiting, place in self._waiting.items()]
            heapq.heapify(self._heap)
