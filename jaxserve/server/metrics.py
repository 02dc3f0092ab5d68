"""GET /metrics: the engine's counters for Prometheus, under vLLM's names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from jaxserve.engine.metrics import EngineHistograms, EngineSnapshot, Histogram

if TYPE_CHECKING:
    from jaxserve.engine.async_llm import AsyncLLM

GAUGES = {
    "num_requests_running": ("Sequences in the running batch.", "num_running"),
    "num_requests_waiting": ("Sequences that wait.", "num_waiting"),
    "kv_cache_usage_perc": ("Share of KV blocks in use, 0 to 1.", "kv_cache_usage"),
}
COUNTERS = {
    "num_preemptions": ("Times that a running sequence had to make room.", "num_preemptions"),
    "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", "prefix_queries"),
    "prefix_cache_hits": ("Of these, tokens found.", "prefix_hits"),
    "prompt_tokens": ("Tokens of prompts.", "num_prompt_tokens"),
    "generation_tokens": ("Tokens generated.", "num_generated_tokens"),
    "requests_timed_out": ("Requests that ended at their deadline.", "num_timed_out"),
    "requests_refused": ("Requests refused because too many waited.", "num_refused"),
    "spec_decode_num_draft_tokens": ("Guessed tokens that were checked.", "num_draft_tokens"),
    "spec_decode_num_accepted_tokens": ("Of these, tokens that held.", "num_accepted_tokens"),
    "engine_steps": ("Steps of the engine.", "num_steps"),
}
"""Name -> what it says, and the field of `EngineSnapshot` that has it. Exported with "_total"."""

HISTOGRAMS = {
    "time_to_first_token_seconds": "From a request's arrival to its first token.",
    "inter_token_latency_seconds": "Between two tokens of a completion.",
    "request_time_per_output_token_seconds": "Mean time between the tokens of a completion.",
    "e2e_request_latency_seconds": "From a request's arrival to its last token.",
    "request_queue_time_seconds": "From a request's arrival until it ran.",
    "request_inference_time_seconds": "From when it ran to its last token.",
    "request_prefill_time_seconds": "From when it ran to its first token.",
    "request_decode_time_seconds": "From its first token to its last.",
    "request_prompt_tokens": "Tokens of a prompt.",
    "request_generation_tokens": "Tokens of a completion.",
    "request_params_max_tokens": "max_tokens of a request.",
    "request_params_n": "n of a request.",
    "iteration_tokens_total": "Tokens that a step computed.",
}

ALIASES = {"time_per_output_token_seconds": "inter_token_latency_seconds"}
"""Older names of vLLM, which its first dashboards have."""


class EngineCollector(Collector):
    """Reads the engine when it is scraped; costs the engine nothing in between."""

    def __init__(self, llm: AsyncLLM, model_name: str, prefix: str):
        self._llm, self._prefix = llm, prefix
        self._labels = {"model_name": model_name, "engine": "0"}

    def describe(self) -> Iterable[Any]:
        return ()  # else registering would read the engine

    def collect(self) -> Iterator[Any]:
        snapshot = self._llm.snapshot()
        names, values = list(self._labels), list(self._labels.values())
        for name, (text, field) in GAUGES.items():
            gauge = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=names)
            gauge.add_metric(values, getattr(snapshot, field))
            yield gauge
        for name, (text, field) in COUNTERS.items():
            counter = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=names)
            counter.add_metric(values, getattr(snapshot, field))
            yield counter
        yield self._outcomes(snapshot)
        for name, text in HISTOGRAMS.items():
            yield self._histogram(name, text, getattr(snapshot.histograms, name))
        for alias, name in ALIASES.items():
            yield self._histogram(alias, HISTOGRAMS[name], getattr(snapshot.histograms, name))
        yield self._config()
        yield from self._devices()

    def _outcomes(self, snapshot: EngineSnapshot) -> CounterMetricFamily:
        family = CounterMetricFamily(f"{self._prefix}:request_success", "Completions that have ended, by how.",
                                     labels=[*self._labels, "finished_reason"])
        for reason, count in snapshot.finish_reasons.items():
            family.add_metric([*self._labels.values(), reason], count)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
        family = HistogramMetricFamily(f"{self._prefix}:{name}", text, labels=list(self._labels))
        # The counts first: a value that comes in between is then in the sum only.
        counts, total = list(histogram.counts), histogram.sum
        buckets, so_far = [], 0
        for bound, count in zip([*map(str, histogram.bounds), "+Inf"], counts, strict=True):
            so_far += count
            buckets.append((bound, so_far))
        family.add_metric(list(self._labels.values()), buckets, total)
        return family

    def _config(self) -> GaugeMetricFamily:
        """Information as labels, with the value 1, as vLLM has it."""
        config = self._llm.config
        labels = {"engine": "0", "block_size": str(config.block_size), "num_gpu_blocks": str(self._llm.num_kv_blocks),
                  "cache_dtype": config.kv_cache_dtype, "enable_prefix_caching": str(config.enable_prefix_caching),
                  "gpu_memory_utilization": str(config.gpu_memory_utilization)}
        family = GaugeMetricFamily(f"{self._prefix}:cache_config_info", "Of the KV cache.", labels=list(labels))
        family.add_metric(list(labels.values()), 1)
        return family

    def _devices(self) -> Iterator[GaugeMetricFamily]:
        """Of the devices that tell it; a CPU does not."""
        used = GaugeMetricFamily(f"{self._prefix}:device_memory_used_bytes", "Device memory in use.", labels=["device"])
        limit = GaugeMetricFamily(f"{self._prefix}:device_memory_limit_bytes", "Device memory there is.",
                                  labels=["device"])
        for name, stats in self._llm.device_memory().items():
            used.add_metric([name], stats.get("bytes_in_use", 0))
            limit.add_metric([name], stats.get("bytes_limit", 0))
        busy = GaugeMetricFamily(f"{self._prefix}:device_utilization_ratio", "Share of time in which it computes.",
                                 labels=["device"])
        for name, share in self._llm.device_utilization().items():
            busy.add_metric([name], share)
        yield from (used, limit, busy)


def make_registry(llm: AsyncLLM, model_name: str, prefix: str) -> CollectorRegistry:
    """Of one server: engine and process (memory, CPU, open files)."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(llm, model_name, prefix))
    ProcessCollector(registry=registry)
    return registry


assert {field.name for field in fields(EngineHistograms)} == set(HISTOGRAMS), "a histogram is not exported"
