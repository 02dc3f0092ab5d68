"""What lives on the device from step to step, and what comes back from one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import PyTreeDef

from jaxserve.runner.buckets import Bucket
from jaxserve.runner.kv_cache import Caches, CacheSpec, ScaledCache
from jaxserve.runner.sharding import TENSOR, cache_sharding, replicated
from jaxserve.sampling.logprobs import Logprobs
from jaxserve.sampling.state import SamplingState, init_state


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceState:
    """What lives on the device from step to step; donated to each.

    Attributes:
      last_tokens: [num_slots + 1] int32, each running request's newest token; the last is a trash slot for padding.

    Also used with `jax.ShapeDtypeStruct`s in place of arrays.
    """

    caches: Caches
    last_tokens: jax.Array
    sampling: SamplingState


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutputs:
    """What the host may read of a step.

    Attributes:
      token_ids: [S] int32, sampled; meaningless where the sequence does not sample.
      logprobs: of the sampled tokens, [S, ...]; meaningful only if some sequence wanted them.
      prompt_logprobs: of each row's following token, [T, ...]; None in decode steps.
    """

    token_ids: jax.Array
    logprobs: Logprobs
    prompt_logprobs: Logprobs | None


def abstract_state(cache_spec: CacheSpec, num_slots: int, vocab_size: int, mesh: Mesh) -> DeviceState:
    """Shapes, dtypes and shardings of the state; no memory is taken."""
    whole = replicated(mesh)
    cache: Any = jax.ShapeDtypeStruct(cache_spec.shape, cache_spec.dtype, sharding=cache_sharding(mesh))
    if cache_spec.has_scales:
        by_head = NamedSharding(mesh, PartitionSpec(TENSOR))
        cache = ScaledCache(cache, jax.ShapeDtypeStruct((cache_spec.num_kv_heads,), jnp.float32, sharding=by_head))
    last_tokens = jax.ShapeDtypeStruct((num_slots + 1,), jnp.int32, sharding=whole)
    sampling = jax.eval_shape(partial(init_state, num_slots, vocab_size))
    sampling = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), sampling)
    caches: Any = ((cache, cache),) * cache_spec.num_layers
    return DeviceState(caches, cast(jax.Array, last_tokens), sampling)


def zeros_like(state: DeviceState) -> DeviceState:
    """The state itself, zeroed, each array made where it will live."""
    if state.last_tokens.sharding.mesh.devices.flat[0].platform == "cpu":  # type: ignore[attr-defined]
        return _copied_zeros(state)

    def make() -> DeviceState:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    made: DeviceState = jax.jit(make, out_shardings=shardings)()
    return made


def _copied_zeros(state: DeviceState) -> DeviceState:
    """In the background and without the compiler, which would wait for a program that is being loaded."""
    zeros = cache(_unaligned_zeros)
    copied: DeviceState = jax.tree.map(
        lambda leaf: jax.device_put(zeros(leaf.shape, leaf.dtype), leaf.sharding), state)
    return copied


def _unaligned_zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Memory that is aligned JAX would share instead of copying it, and steps could not write to what is shared."""
    num_bytes, alignment = math.prod(shape) * dtype.itemsize, 64
    buffer = np.zeros(num_bytes + 2 * alignment, np.uint8)
    start = -buffer.ctypes.data % alignment + dtype.itemsize
    return buffer[start : start + num_bytes].view(dtype).reshape(shape)


def output_tree(state: DeviceState, bucket: Bucket) -> PyTreeDef:
    """Structure of what a bucket's step returns."""
    of_tokens: Any = (0, 0, 0, 0)  # a leaf each
    outputs = StepOutputs(cast(jax.Array, 0), of_tokens, None if bucket.is_decode else of_tokens)
    return jax.tree.structure((state, outputs))
