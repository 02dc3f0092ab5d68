"""`jaxserve.plan`: does it fit, with how much room, how fast at best, and what would help if not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from jaxserve.config import EngineConfig, KVCacheDType, ModelConfig, check_divisible
from jaxserve.errors import CompilerError, InvalidInputError
from jaxserve.planning.known import quantized, read_model
from jaxserve.planning.measure import Request, StepBytes, measure_all
from jaxserve.planning.roofline import Bound, Roofline
from jaxserve.runner.capacity import blocks_of, num_blocks_in
from jaxserve.targets.target import TARGETS, Target, get_target

PROMPT_TOKENS = 1024
"""Of the prompt whose time to first token is told."""


@dataclass(frozen=True)
class Plan:
    """One model on one kind of card. All bytes are per device.

    Attributes:
      config: resolved engine options.
      step: the bytes of its parts, see `StepBytes`.
    """

    model: ModelConfig
    config: EngineConfig
    target: Target
    tensor_parallel_size: int
    step: StepBytes

    @property
    def usable_bytes(self) -> int:
        """Of the card's memory, as `gpu_memory_utilization` says."""
        return int(self.target.memory_bytes * self.config.gpu_memory_utilization)

    @property
    def cache_room_bytes(self) -> int:
        """What weights, sampler's rows and temporaries leave for the KV cache; below 0 if they do not fit."""
        return self.usable_bytes - self.step.weights - self.step.state - self.step.temporaries

    @property
    def num_blocks(self) -> int:
        """Of the KV cache that the engine would make, the null block included."""
        return num_blocks_in(self.cache_room_bytes, self.step.block, self.config)

    @property
    def cache_bytes(self) -> int:
        return self.num_blocks * self.step.block

    @property
    def num_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return max(self.num_blocks - 1, 0) * self.config.block_size

    @property
    def longest_context(self) -> int:
        """Tokens of the longest sequence that fits, within max_model_len."""
        return min(self.num_tokens, self.max_model_len)

    @property
    def max_model_len(self) -> int:
        assert self.config.max_model_len is not None
        return self.config.max_model_len

    @property
    def missing_bytes(self) -> int:
        """What is lacking for one sequence of max_model_len tokens; 0 if it fits."""
        needed = (blocks_of(self.max_model_len, self.config.block_size) + 1) * self.step.block
        return max(needed - self.cache_room_bytes, 0)

    @property
    def fits(self) -> bool:
        return self.missing_bytes == 0

    @cached_property
    def roofline(self) -> Roofline:
        """Bounds on the time of its steps."""
        return Roofline(self.model, self.target, self.tensor_parallel_size, self.config.block_size, self.step)

    def largest_batch(self, context: int) -> int:
        """Sequences of `context` tokens each that the cache holds and the engine would run."""
        assert self.config.max_num_seqs
        blocks = blocks_of(_positive("context", context), self.config.block_size)
        return min(max(self.num_blocks - 1, 0) // blocks, self.config.max_num_seqs)

    def decode_tokens_per_s(self, context: int, batch: int) -> float:
        """At most, over the whole batch (a roofline)."""
        return batch / self.roofline.decode(_positive("context", context), _positive("batch", batch)).seconds

    def time_to_first_token(self, prompt: int = PROMPT_TOKENS) -> Bound:
        """At least, of one prompt that runs alone (a roofline). Prompts end at max_model_len."""
        assert self.config.max_num_batched_tokens
        prompt = min(_positive("prompt", prompt), self.max_model_len)
        return self.roofline.prefill(prompt, self.config.max_num_batched_tokens)

    @property
    def is_servable(self) -> bool:
        """Whether the engine can load such weights; checkpoints with quantised ones are only planned for, so far."""
        return self.model.quantization is None

    @property
    def contexts(self) -> list[int]:
        """Lengths worth a line in a table: 1,024, four times that, ... and the longest that fits."""
        lengths, length = [], 1024
        while length < self.longest_context:
            lengths.append(length)
            length *= 4
        return [*lengths, self.longest_context] if self.longest_context else []

    @property
    def batches(self) -> list[int]:
        assert self.config.max_num_seqs
        return [*(size for size in (1, 8, 32, 128) if size < self.config.max_num_seqs), self.config.max_num_seqs]

    def as_json(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        config = {name: value for name, value in asdict(self.config).items() if name not in ("mesh", "seed")}
        table = [{"context": context, "largest_batch": self.largest_batch(context), "decode": [
            {"batch": batch, "tokens_per_s_bound": self.decode_tokens_per_s(context, batch),
             "limit": self.roofline.decode(context, batch).limit}
            for batch in self.batches if batch <= self.largest_batch(context)]} for context in self.contexts]
        quantization = asdict(self.model.quantization) if self.model.quantization else None
        first = self.time_to_first_token()
        return {
            "architecture": self.model.architecture, "quantization": quantization, "target": self.target.name,
            "device_name": self.target.device_name, "tensor_parallel_size": self.tensor_parallel_size,
            "config": config, "servable": self.is_servable, "fits": self.fits, "missing_bytes": self.missing_bytes,
            "bytes_per_device": {
                "memory": self.target.memory_bytes, "usable": self.usable_bytes, "weights": self.step.weights,
                "sampler_rows": self.step.state, "temporaries": self.step.temporaries, "cache": self.cache_bytes,
                "block": self.step.block},
            "num_blocks": self.num_blocks, "num_tokens": self.num_tokens, "longest_context": self.longest_context,
            "batches": table, "compile_s": self.step.compile_s,
            "time_to_first_token": {"prompt": min(PROMPT_TOKENS, self.max_model_len), "s_bound": first.seconds,
                                    "limit": first.limit},
        }


@dataclass(frozen=True)
class Refused:
    """A card that the model cannot run on as asked, whatever its memory."""

    target: Target
    reason: str


def plan(
    model: str | Path,
    *,
    target: str = "h200",
    tensor_parallel_size: int = 1,
    quantization: str | None = None,
    kv_cache_dtype: KVCacheDType = "auto",
    on_done: Callable[[], None] = lambda: None,
    **options: Any,
) -> Plan:
    """What a model needs on a card, from the engine's largest step compiled for that card; no GPU is needed.

    Takes some seconds the first time; what was compiled is remembered.

    Args:
      model: a checkpoint, a config.json, or a well-known model's name (`planning.known_models`).
      target: the card: a100, a10g, l4, rtx4090, h100, h200 or b200.
      quantization: of the weights: gptq, awq, int4 or fp8. Default: as the checkpoint has them.
      options: dtype, max_model_len, max_num_seqs, max_num_batched_tokens, block_size, gpu_memory_utilization, as for
        `LLM`.

    Raises:
      InvalidInputError: an argument is wrong; the message names it.
      CompilerError: XLA's GPU compiler is not installed, or cannot make the step for this card.
    """
    request = _request(read_model(model, quantization), target, tensor_parallel_size,
                       _config(kv_cache_dtype=kv_cache_dtype, **options))
    return plan_of(request, on_done)


def plan_of(request: Request, on_done: Callable[[], None] = lambda: None) -> Plan:
    """`plan`, for options that are resolved; raises as it does."""
    found, = _plans([request], on_done)
    if isinstance(found, Refused):
        raise CompilerError(found.reason)
    return found


def plan_all(model: str | Path, *, tensor_parallel_size: int = 1, quantization: str | None = None,
             kv_cache_dtype: KVCacheDType = "auto", on_done: Callable[[], None] = lambda: None,
             **options: Any) -> list[Plan | Refused]:
    """`plan` for every card, the best first: those where it fits, by their bound on tokens/s with a full cache."""
    config = _config(kv_cache_dtype=kv_cache_dtype, **options)
    read = read_model(model, quantization)
    found = _plans([_request(read, name, tensor_parallel_size, config) for name in TARGETS], on_done)

    def rank(entry: Plan | Refused) -> tuple[bool, float]:
        if isinstance(entry, Refused):
            return False, -float("inf")
        return entry.fits, full_tokens_per_s(entry) if entry.fits else -float(entry.missing_bytes)

    if all(isinstance(entry, Refused) for entry in found):
        raise CompilerError(next(entry.reason for entry in found if isinstance(entry, Refused)))
    return sorted(found, key=rank, reverse=True)


def full_tokens_per_s(entry: Plan) -> float:
    """Bound with as many sequences of 2,048 tokens (or of max_model_len, if that is less) as the card holds."""
    context = min(2048, entry.max_model_len)
    batch = entry.largest_batch(context)
    return entry.decode_tokens_per_s(context, batch) if batch else 0.0


@dataclass(frozen=True)
class Remedy:
    """A change of options that makes the model fit.

    Attributes:
      change: as options of the command line.
      plan: with it.
    """

    change: str
    plan: Plan


def remedies(short: Plan, on_done: Callable[[], None] = lambda: None) -> list[Remedy]:
    """What would make a plan fit that does not, each compiled and computed; the least change first."""
    changes = list(_changes(short))
    found = _plans([request for _, request in changes], on_done)
    fitting = [Remedy(change, entry) for (change, _), entry in zip(changes, found, strict=True)
               if isinstance(entry, Plan) and entry.fits]
    cards = [remedy for remedy in fitting if remedy.plan.tensor_parallel_size != short.tensor_parallel_size]
    return [remedy for remedy in fitting if remedy not in cards[1:]]


def num_changes(short: Plan) -> int:
    """How often `remedies` calls its on_done."""
    return len(list(_changes(short)))


def _changes(short: Plan) -> Iterator[tuple[str, Request]]:
    same = Request(short.model, short.config, short.target.name, short.tensor_parallel_size)
    if short.num_tokens >= 1024:
        shorter = short.longest_context
        yield f"--max-model-len {shorter}", replace(same, config=replace(short.config, max_model_len=shorter))
    int8 = replace(short.config, kv_cache_dtype="int8")
    weights: list[tuple[str, Literal["fp8", "int4"]]] = []
    if short.model.quantization is None:
        weights = [("--quantization fp8", "fp8")] if short.target.fp8_flops else []
        weights += [("--quantization int4", "int4")]
    if short.config.kv_cache_dtype == "auto":
        yield "--kv-cache-dtype int8", replace(same, config=int8)
    for name, kind in weights:
        yield name, replace(same, model=quantized(short.model, kind))
    if short.config.kv_cache_dtype == "auto" and weights:
        yield (f"{weights[-1][0]} --kv-cache-dtype int8",
               replace(same, model=quantized(short.model, "int4"), config=int8))
    for ranks in (2, 4, 8):
        if ranks > short.tensor_parallel_size and _divides(short.model, ranks):
            yield f"--tensor-parallel-size {ranks}", replace(same, tensor_parallel_size=ranks)


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise InvalidInputError(name, value, "at least 1 token" if name != "batch" else "at least 1 sequence")
    return value


def _divides(model: ModelConfig, ranks: int) -> bool:
    try:
        check_divisible(model, ranks)
    except InvalidInputError:
        return False
    return True


def _config(**options: Any) -> EngineConfig:
    allowed = ("dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_dtype",
               "gpu_memory_utilization")
    for name, value in options.items():
        if name not in allowed:
            raise InvalidInputError(name, value, f"no option of a plan; there are {', '.join(allowed)}")
    return EngineConfig(**options)


def _request(model: ModelConfig, target: str, ranks: int, config: EngineConfig) -> Request:
    name = str(target).lower()
    if name not in TARGETS:
        raise InvalidInputError("target", target, f"one of {', '.join(TARGETS)} (all of them: plan_all)")
    if not isinstance(ranks, int) or isinstance(ranks, bool) or not 1 <= ranks <= 8:
        raise InvalidInputError("tensor_parallel_size", ranks, "an integer from 1 to 8, the cards of one host")
    check_divisible(model, ranks)
    return Request(model, config.resolve(model, "gpu"), name, ranks)


def _plans(requests: list[Request], on_done: Callable[[], None]) -> list[Plan | Refused]:
    plans: list[Plan | Refused] = []
    for request, found in zip(requests, measure_all(requests, on_done=on_done), strict=True):
        target = get_target(request.target)
        plans.append(Plan(request.model, request.config, target, request.tensor_parallel_size, found)
                     if isinstance(found, StepBytes) else Refused(target, found))
    return plans
