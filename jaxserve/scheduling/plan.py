"""What one step computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import compress

from jaxserve.request import Request


@dataclass(slots=True)
class Chunk:
    """A stretch of one request's known tokens: positions start ... start + num_tokens - 1.

    `samples`: it reaches the last known token, so the step samples the next one. `enters`: the request was waiting
    before.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    enters: bool = False


@dataclass(slots=True)
class StepPlan:
    """The work of one step, decided before any of it runs.

    Attributes:
      decodes: requests that compute one token, their newest, and sample the next. After all of them, in the same order,
        those with guesses come once more for each guess, as if it and those before it were their tokens.
      positions: per decode, the position of that token.
      from_device: per decode, whether that token is still only on the device (it is in flight).
      chunks: stretches of prompts (or of tokens to recompute).
      preempted: requests whose blocks were taken; they wait again.
      num_drafts: guesses among the decodes.
      published: blocks that its chunks fill, and that others may share from this step on.
      swap_out, swap_in: (device block, host block) to copy before the step runs, all of the first before all of the
        second, in order. They are to be made even if the step is empty or revised.
    """

    decodes: list[Request] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    from_device: list[bool] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    published: list[int] = field(default_factory=list)
    num_drafts: int = 0
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def is_empty(self) -> bool:
        return not self.decodes and not self.chunks

    def drop_finished_decodes(self) -> None:
        """Leaves out those that have ended since the plan was made."""
        kept = [not request.is_finished for request in self.decodes]
        self.num_drafts = sum(kept[len(kept) - self.num_drafts :])
        self.positions = list(compress(self.positions, kept))
        self.from_device = list(compress(self.from_device, kept))
        self.decodes = list(compress(self.decodes, kept))

    def rows(self) -> list[Request]:
        """The requests in the order of the step's sequence rows."""
        return self.decodes + [chunk.request for chunk in self.chunks]
