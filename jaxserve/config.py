"""All configuration: frozen dataclasses, validated and resolved once; nothing changes them later."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Literal, get_args

from jaxserve.errors import InvalidInputError, UnsupportedModelError
from jaxserve.scheduling.host_tier import PreemptionMode
from jaxserve.scheduling.ngram import SpeculativeConfig
from jaxserve.scheduling.policy import PolicyName, PriorityWeights

RopeKind = Literal["none", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding and how it is stretched past the trained context.

    Attributes:
      theta: base of the frequencies.
      kind: "none" is the plain form (Su et al., arXiv:2104.09864).
      factor: stretch of the context.
      original_max_position: trained context, for dynamic, llama3 and yarn.
      low_freq_factor, high_freq_factor: llama3's bounds of the interpolated band.
      beta_fast, beta_slow, mscale, mscale_all_dim, attention_factor, truncate: yarn's (arXiv:2309.00071), named as in
        HF configs.
    """

    theta: float = 10000.0
    kind: RopeKind = "none"
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """Weights of all projections in fewer bits (the embedding and the output head stay as they are).

    Attributes:
      kind: "int4": 4-bit integers (`layers.int4`); "fp8": 8-bit floats, and activations too (`layers.fp8`).
      group_size: of int4, input features that share a scale: 32, 64, 128, or None for all of them.
      symmetric: of int4, the zero-point is 8 everywhere; else each group has its own.
    """

    kind: Literal["int4", "fp8"] = "int4"
    group_size: Literal[32, 64, 128] | None = 128
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.kind not in ("int4", "fp8"):
            raise UnsupportedModelError("quantization.kind", self.kind, '"int4" or "fp8"')
        if self.group_size not in (32, 64, 128, None):
            raise UnsupportedModelError("quantization.group_size", self.group_size, "32, 64, 128 or None")
        for name, default in (("group_size", 128), ("symmetric", True)):
            if self.kind == "fp8" and getattr(self, name) != default:
                raise UnsupportedModelError(f"quantization.{name}", getattr(self, name), 'only for kind="int4"')


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder's shape and options. Made by `models.registry.model_config_from_hf`, the only reader of HF configs.

    Attributes:
      layer_windows: per layer the sliding window in tokens (a query sees itself and window - 1 before it), or None.
      attention_bias: q, k and v have biases; attention_out_bias: so has the output projection.
      qk_norm: RMSNorm over the head width on q and k before RoPE (Qwen3).
      dtype: the checkpoint's own.
      quantization: of the projections' weights, or None.
      hf_config: the checkpoint's config.json as read, kept so that a converted checkpoint can carry it.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    layer_windows: tuple[int | None, ...] = ()
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    quantization: QuantizationConfig | None = None
    hf_config: dict = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError("num_attention_heads", self.num_heads,
                                        f"a multiple of num_key_value_heads={self.num_kv_heads}")
        if not self.layer_windows:
            object.__setattr__(self, "layer_windows", (None,) * self.num_layers)


def kv_groups(config: ModelConfig, tensor_parallel_size: int) -> tuple[int, int]:
    """Stored KV heads K' and query heads per stored KV head G' at this tensor-parallel size.

    With more ranks than KV heads each KV head is stored once per rank that needs it.

    Raises:
      InvalidInputError: the heads cannot be divided over the ranks.
    """
    tp, num_heads, num_kv = tensor_parallel_size, config.num_heads, config.num_kv_heads
    if num_heads % tp or (num_kv % tp and tp % num_kv):
        raise InvalidInputError("tensor_parallel_size", tp, f"a divisor of the {num_heads} query heads that divides, "
                                f"or is a multiple of, the {num_kv} KV heads")
    stored = max(num_kv, tp)
    return stored, num_heads // stored


def check_divisible(config: ModelConfig, tensor_parallel_size: int) -> None:
    """Raises InvalidInputError where heads or MLP width cannot be split over the ranks."""
    kv_groups(config, tensor_parallel_size)
    if config.intermediate_size % tensor_parallel_size:
        raise InvalidInputError("tensor_parallel_size", tensor_parallel_size,
                                f"a divisor of intermediate_size={config.intermediate_size}")


def check_positive(name: str, value: Any) -> None:
    """Raises InvalidInputError unless it is a number above 0."""
    check_finite(name, value)
    if value <= 0:
        raise InvalidInputError(name, value, "a number above 0")


def check_finite(name: str, value: Any) -> None:
    """Raises InvalidInputError unless it is a number, and neither infinite nor NaN."""
    try:
        is_finite = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        is_finite = False
    if not is_finite:
        raise InvalidInputError(name, value, "a finite number")


def _require_int(name: str, value: Any, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise InvalidInputError(name, value, f"an integer, at least {low}")


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How many devices each kind of parallelism uses.

    Attributes:
      tensor: devices over which heads, MLP width and vocabulary are split.
    """

    tensor: int = 1

    def __post_init__(self) -> None:
        _require_int("mesh.tensor", self.tensor, 1)


KVCacheDType = Literal["auto", "fp8", "fp8_e4m3", "int8"]
DType = Literal["auto", "float32", "bfloat16", "float16"]

DEFAULT_CPU_KV_CACHE_BYTES = 1 << 30
"""KV cache on a CPU when `kv_cache_memory_bytes` is not given (less if that many tokens can never be live)."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Engine options, with vLLM's names. None means: chosen by `resolve` for the model and the platform.

    Attributes:
      dtype: of weights, activations and cache; "auto": float32 on a CPU, else the checkpoint's own.
      max_model_len: most tokens of a sequence; default: the model's own limit.
      max_num_seqs: sequences that run at once; default 32 on a CPU, else 256.
      max_num_batched_tokens: tokens of a step; default 512 on a CPU, else 8192. Longer prompts are cut into chunks.
      block_size: tokens of a KV block.
      kv_cache_dtype: of the KV cache; "auto": as dtype. fp8 and fp8_e4m3 are the same; int8 has a scale for each head,
        found at start on a sample text.
      gpu_memory_utilization: share of a GPU's memory for weights, temporaries and KV cache together.
      kv_cache_memory_bytes: KV cache per device instead; default on a CPU `DEFAULT_CPU_KV_CACHE_BYTES`.
      num_gpu_blocks_override: exactly this many blocks, for tests and experiments.
      seed: of requests that bring no seed of their own.
      enable_prefix_caching: keep computed KV blocks, and share them with prompts that begin with the same tokens.
      swap_space: GiB of host memory per device for KV blocks: of preempted requests, which then go on where they were,
        and of evicted prefixes, which are fetched when they are asked for again. 0: none; on a GPU this memory is
        page-locked, and only the machine's owner knows what it can spare.
      preemption_mode: what becomes of a preempted request's blocks. "swap": they are copied to the host while there is
        room; "recompute": they are computed again; "auto": the cheaper, by `scheduling.move_costs`.
      swap_compression: keep blocks on the host as LZ4 frames. They take less of the memory (`LLM.memory_report` has the
        ratio), not more of them are kept, and a processor core is busy with it.
      speculative_config: guess tokens and check several in a step, see `SpeculativeConfig`; a mapping will do, such as
        {"method": "ngram", "num_speculative_tokens": 4}. Pays for few sequences that repeat themselves or their prompt.
        Requests with penalties, biases, bad words or min_tokens are left out.
      scheduling_policy: "fcfs", or "priority": the lowest rank first, see `PriorityWeights`.
      priority_weights: what waiting and other things are worth in a rank.
      max_waiting_requests: most that may wait; more are refused with `QueueFullError`. None: any number.
      long_prefill_token_threshold, max_num_partial_prefills, max_long_partial_prefills: see `PrefillLimits`.
      max_queue_delay_ms: a batch that would start while nothing runs is held back so long, so that more requests join
        it, unless `preferred_batch_size` (default: max_num_seqs) of them wait.
      enable_memory_profiler: keep the last steps' use of blocks for `LLM.memory_report`.
      queue_timeout_s: a request that has not begun to run so long after its arrival ends with `RequestTimeoutError`.
      async_scheduling: plan and dispatch a step while the one before runs.
      mesh: devices to use.
      compilation_cache_dir: where compiled programs are kept between runs; "": nowhere; default: JAX's own setting,
        else ~/.cache/jaxserve/xla.
      executables: folder that `jaxserve compile` wrote: its programs are loaded instead of compiled, and options that
        are None or "auto" here are as they were there. Loading them runs code from that folder.
    """

    dtype: DType = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    kv_cache_dtype: KVCacheDType = "auto"
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    seed: int = 0
    enable_prefix_caching: bool = True
    swap_space: float = 0.0
    preemption_mode: PreemptionMode = "auto"
    swap_compression: bool = False
    speculative_config: SpeculativeConfig | None = None
    scheduling_policy: PolicyName = "fcfs"
    priority_weights: PriorityWeights = field(default_factory=PriorityWeights)
    long_prefill_token_threshold: int = 0
    max_num_partial_prefills: int | None = None
    max_long_partial_prefills: int | None = None
    max_queue_delay_ms: float = 0.0
    preferred_batch_size: int | None = None
    enable_memory_profiler: bool = False
    max_waiting_requests: int | None = None
    queue_timeout_s: float | None = None
    async_scheduling: bool = True
    mesh: Any = MeshConfig()
    compilation_cache_dir: str | None = None
    executables: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in get_args(DType):
            raise InvalidInputError("dtype", self.dtype, f"one of {', '.join(get_args(DType))}")
        if self.kv_cache_dtype not in get_args(KVCacheDType):
            allowed = f"one of {', '.join(get_args(KVCacheDType))}"
            raise InvalidInputError("kv_cache_dtype", self.kv_cache_dtype, allowed)
        if self.scheduling_policy not in get_args(PolicyName):
            allowed = f"one of {', '.join(get_args(PolicyName))}"
            raise InvalidInputError("scheduling_policy", self.scheduling_policy, allowed)
        if self.preemption_mode not in get_args(PreemptionMode):
            raise InvalidInputError("preemption_mode", self.preemption_mode,
                                    f"one of {', '.join(get_args(PreemptionMode))}")
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes",
                     "max_waiting_requests", "max_num_partial_prefills", "max_long_partial_prefills",
                     "preferred_batch_size"):
            if getattr(self, name) is not None:
                _require_int(name, getattr(self, name), 1)
        if self.num_gpu_blocks_override is not None:
            _require_int("num_gpu_blocks_override", self.num_gpu_blocks_override, 2)
        _require_int("block_size", self.block_size, 1)
        _require_int("seed", self.seed, 0)
        _require_int("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        self._check_host_memory()
        share = self.gpu_memory_utilization
        if not isinstance(share, Real) or isinstance(share, bool) or not 0 < share <= 1:
            raise InvalidInputError("gpu_memory_utilization", self.gpu_memory_utilization, "a number in (0, 1]")

        object.__setattr__(self, "speculative_config", SpeculativeConfig.of(self.speculative_config))
        if self.queue_timeout_s is not None:
            check_positive("queue_timeout_s", self.queue_timeout_s)
        if not isinstance(self.priority_weights, PriorityWeights):
            raise InvalidInputError("priority_weights", self.priority_weights, "a PriorityWeights")
        for name in ("async_scheduling", "enable_prefix_caching", "swap_compression", "enable_memory_profiler"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidInputError(name, getattr(self, name), "True or False")
        for name in ("compilation_cache_dir", "executables"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str | os.PathLike):
                raise InvalidInputError(name, value, "a folder's name, or None")
        if self.executables == "":  # not the current folder: code is run from there
            raise InvalidInputError("executables", "", "a folder's name, or None")

    def _check_host_memory(self) -> None:
        for name in ("swap_space", "max_queue_delay_ms"):
            check_finite(name, getattr(self, name))
            if getattr(self, name) < 0:
                raise InvalidInputError(name, getattr(self, name), "0 or above")
        for name, needs_space in (("preemption_mode", self.preemption_mode == "swap"),
                                  ("swap_compression", self.swap_compression)):
            if needs_space and not self.swap_space:
                raise InvalidInputError(name, getattr(self, name), "only with swap_space above 0")
        if self.max_long_partial_prefills is not None and not self.long_prefill_token_threshold:
            raise InvalidInputError("max_long_partial_prefills", self.max_long_partial_prefills,
                                    "only with long_prefill_token_threshold above 0")

    def resolve(self, model: ModelConfig, platform: str) -> EngineConfig:
        """The same options without None or "auto" (but for the memory options, which `runner.memory` reads).

        Raises:
          InvalidInputError: options that contradict each other or the model.
        """
        on_cpu = platform == "cpu"
        max_model_len = self.max_model_len or model.max_position
        if max_model_len > model.max_position:
            raise InvalidInputError("max_model_len", max_model_len, f"at most the model's {model.max_position}")
        max_num_seqs = self.max_num_seqs or (32 if on_cpu else 256)
        max_tokens = self.max_num_batched_tokens or max(512 if on_cpu else 8192, max_num_seqs)
        if max_tokens < max_num_seqs:
            raise InvalidInputError("max_num_batched_tokens", max_tokens, f"at least max_num_seqs={max_num_seqs}")
        dtype = self.dtype
        if dtype == "auto":
            dtype = "float32" if on_cpu else model.dtype
        return replace(self, dtype=dtype, max_model_len=max_model_len, max_num_seqs=max_num_seqs,
                       max_num_batched_tokens=max_tokens)
