"""How long a step takes on a card: a model, not a measurement."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.config import ModelConfig
from jaxserve.errors import InvalidInputError
from jaxserve.planning import Plan, known_models, plan
from jaxserve.planning.roofline import Roofline
from jaxserve.runner.buckets import Buckets
from jaxserve.scheduling.plan import StepPlan


@dataclass(frozen=True)
class StepTime:
    """The roofline of a step (bytes over bandwidth or FLOPs over peak, whichever is longer) divided by `efficiency`,
    plus `overhead_s`.

    Neither number was measured on a card: they are assumptions, to be replaced by what a card gives.

    Attributes:
      buckets: the fixed shapes that steps are padded to: padding rows cost FLOPs. None: steps of exactly their size.
      efficiency: share of the roofline that the step's kernels reach, in (0, 1].
      overhead_s: of every step: launches, and what the host does while the device waits.
    """

    roofline: Roofline
    buckets: Buckets | None
    efficiency: float
    overhead_s: float

    def __post_init__(self) -> None:
        if not 0 < self.efficiency <= 1:
            raise InvalidInputError("efficiency", self.efficiency, "a number in (0, 1]")
        if not 0 <= self.overhead_s < float("inf"):
            raise InvalidInputError("overhead_s", self.overhead_s, "seconds, at least 0")

    def __call__(self, plan: StepPlan) -> float:
        """Seconds."""
        rows, sampled = plan.num_tokens, len(plan.decodes) + sum(chunk.samples for chunk in plan.chunks)
        if self.buckets is not None:
            bucket = self.buckets.pick(plan)
            rows, sampled = bucket.num_tokens, bucket.num_seqs
        read, seen = _keys(self.roofline.model, plan)
        bytes_per_key = self.roofline.step.block / (self.roofline.block_size * self.roofline.model.num_layers)
        bound = self.roofline.bound(rows, sampled, read * bytes_per_key, seen)
        return bound.seconds / self.efficiency + self.overhead_s


def _keys(model: ModelConfig, plan: StepPlan) -> tuple[float, float]:
    """Keys read from the cache, once for each row of a decode and once for each chunk, and keys that queries meet;
    both summed over the layers."""
    read = seen = 0.0
    num_decodes = len(plan.decodes)
    for window, num_layers in Counter(model.layer_windows).items():
        if window is None:
            decodes = sum(plan.positions) + num_decodes
        else:
            decodes = int(np.minimum(np.array(plan.positions, np.int64) + 1, window).sum())
        most = window or float("inf")
        for chunk in plan.chunks:
            first, last = min(chunk.start + 1, most), min(chunk.start + chunk.num_tokens, most)
            read += num_layers * last
            seen += num_layers * chunk.num_tokens * (first + last) / 2
        read += num_layers * decodes
        seen += num_layers * decodes
    return read, seen


def plan_card(model: str, **options: Any) -> Plan:
    """`jaxserve.plan`; "llama-8b" is short for Llama-3.1-8B. The first time a model's step is compiled, which takes
    half a minute.

    Raises:
      InvalidInputError: the model does not fit on the card, or what `jaxserve.plan` raises.
    """
    by_short_name = {name.lower().replace("llama-3.1-", "llama-"): name for name in known_models()}
    found = plan(by_short_name.get(model.lower(), model), **options)
    if found.num_blocks < 2:
        raise InvalidInputError("model", model, f"one that leaves room for KV blocks on {found.target.name} x "
                                f"{found.tensor_parallel_size}: weights and temporaries lack "
                                f"{-found.cache_room_bytes / 1e9:.1f} GB (jaxserve plan tells what would help)")
    return found


def buckets_of(plan: Plan) -> Buckets:
    """The shapes that the engine would compile."""
    config = plan.config
    assert config.max_num_seqs and config.max_num_batched_tokens
    return Buckets(max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens,
                   query_tile=64, platform="gpu")  # tiles of queries do not change the number of rows
