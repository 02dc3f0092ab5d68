"""What keeps prompts from holding up what runs, and batches from starting too small."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class PrefillLimits:
    """How much of a step prompts may take, with vLLM's names. By default there is no limit but the token budget.

    Attributes:
      long_prefill_token_threshold: a prompt with more tokens to compute than this is long, and a step computes at most
        this many of them; 0: no prompt is long.
      max_num_partial_prefills: no prompt is begun that its first step would leave unfinished while so many others are.
      max_long_partial_prefills: no long one is begun while so many long ones are unfinished; shorter ones that wait
        behind it go ahead.
    """

    long_prefill_token_threshold: int = 0
    max_num_partial_prefills: int | None = None
    max_long_partial_prefills: int | None = None

    @property
    def counts(self) -> bool:
        """Whether it matters how many prompts are unfinished."""
        return self.max_num_partial_prefills is not None or self.max_long_partial_prefills is not None

    def is_long(self, num_tokens: int) -> bool:
        return 0 < self.long_prefill_token_threshold < num_tokens

    def chunk(self, remaining: int, budget: int) -> int:
        """How many of a prompt's remaining tokens a step with so much budget left computes."""
        if self.is_long(remaining):
            remaining = self.long_prefill_token_threshold
        return min(remaining, budget)


@dataclass
class BatchDelay:
    """Holds a new batch back for a moment, so that more requests join it.

    Attributes:
      max_queue_delay_s: longest that it is held, from when the first request could have run.
      preferred_batch_size: so many requests are not held.
    """

    max_queue_delay_s: float
    preferred_batch_size: int
    _since_s: float | None = field(default=None, init=False)

    def left_s(self, now_s: float, *, num_running: int, num_waiting: int) -> float:
        """Seconds until the waiting requests may start; 0 where they may now. Only a batch of its own is held: never
        while something runs."""
        if num_running or not 0 < num_waiting < self.preferred_batch_size:
            self._since_s = None
            return 0.0
        if self._since_s is None:
            self._since_s = now_s
        return max(self._since_s + self.max_queue_delay_s - now_s, 0.0)
