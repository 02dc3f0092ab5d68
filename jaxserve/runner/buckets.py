"""The few fixed shapes that steps are padded to."""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass

from jaxserve.scheduling.plan import StepPlan

NAME = re.compile(r"(decode|mixed|lone)-(\d+)")
"""A bucket's name: its kind and its tokens."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """The shape of one compiled step.

    Attributes:
      num_tokens: rows T of the model's input.
      num_seqs: sequences S.
      num_tiles: query tiles Q for the chunks; 0 in a decode step, where row i is sequence i's one token.
      is_lone: the step has one chunk and nothing else.
    """

    num_tokens: int
    num_seqs: int
    num_tiles: int
    is_lone: bool = False

    @property
    def is_decode(self) -> bool:
        return self.num_tiles == 0

    @property
    def name(self) -> str:
        """Unique within an engine, and fit for a file: "decode-8", "mixed-512", "lone-64"; see `NAME`."""
        return f"{self._kind}-{self.num_tokens}"

    def __str__(self) -> str:
        return f"{self._kind} T={self.num_tokens} S={self.num_seqs}"

    @property
    def _kind(self) -> str:
        if self.is_decode:
            return "decode"
        return "lone" if self.is_lone else "mixed"


FEWEST_SEQS = {"gpu": 8}
"""Sequences, and tokens, of any step, padding included. XLA:GPU pads fewer rows to 8 for cuBLAS itself, with kernels of
their own (6 more a layer), and for one row widens the whole output head to float32."""

FIRST_PROMPT_TOKENS = 64
"""What a first prompt has if nobody knows better: a short question in a chat template."""


class Buckets:
    """Decode sizes double from the platform's fewest to max_num_seqs (or are those fewest, if that is less), mixed ones
    from `smallest_mixed` to max_num_batched_tokens tokens.

    Attributes:
      lone: stand in for mixed sizes where a prompt is alone. Their programs are half as large and load in half the
        time: what an engine that loads its programs on a CPU begins with. It is none of `all`.
    """

    def __init__(self, *, max_num_seqs: int, max_num_batched_tokens: int, query_tile: int, smallest_mixed: int = 16,
                 platform: str = "cpu"):
        fewest = FEWEST_SEQS.get(platform, 1)
        self.decode = [Bucket(size, size, 0) for size in _doublings(fewest, max(fewest, max_num_seqs))]
        self.mixed = []
        for num_tokens in _doublings(min(smallest_mixed, max_num_batched_tokens), max_num_batched_tokens):
            num_seqs = min(max_num_seqs, num_tokens)
            # Every chunk may end in a tile that is not full.
            num_tiles = -(-num_tokens // query_tile) + num_seqs
            self.mixed.append(Bucket(max(num_tokens, fewest), max(num_seqs, fewest), num_tiles))
        self.lone = []
        if platform == "cpu":
            sizes = [mixed.num_tokens for mixed in self.mixed if mixed.num_tokens >= FIRST_PROMPT_TOKENS]
            self.lone = [Bucket(size, 1, -(-size // query_tile), is_lone=True)
                         for size in sizes or [max_num_batched_tokens]]

    def all(self) -> list[Bucket]:
        """Those that hold any plan."""
        return self.decode + self.mixed

    def by_name(self) -> dict[str, Bucket]:
        """All, and the lone ones: what an engine's executables are made for."""
        return {bucket.name: bucket for bucket in self.all() + self.lone}

    def pick(self, plan: StepPlan) -> Bucket:
        """The smallest bucket that holds the plan."""
        if not plan.chunks:
            return self.for_decode(len(plan.decodes))
        return self.for_mixed(plan.num_tokens)

    def lone_for(self, plan: StepPlan) -> list[Bucket]:
        """Those of `lone` that hold the plan, the smallest first."""
        if plan.decodes or len(plan.chunks) != 1:
            return []
        return [bucket for bucket in self.lone if bucket.num_tokens >= plan.num_tokens]

    def for_decode(self, num_seqs: int) -> Bucket:
        return self.decode[bisect_left([bucket.num_tokens for bucket in self.decode], num_seqs)]

    def for_mixed(self, num_tokens: int) -> Bucket:
        return self.mixed[bisect_left([bucket.num_tokens for bucket in self.mixed], num_tokens)]


def _doublings(first: int, last: int) -> list[int]:
    """first, 2 first, 4 first, ... and `last` itself."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return [*sizes, last]
