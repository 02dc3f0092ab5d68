"""The jitted step: from packed inputs to sampled tokens, in one dispatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import PyTreeDef

from jaxserve.models.params import merge
from jaxserve.runner.batch import SLOT_FLOATS, SLOT_INTS, BatchLayout, cut
from jaxserve.runner.buckets import Bucket
from jaxserve.runner.kv_cache import Caches, CacheSpec, ScaledCache, parts
from jaxserve.runner.paged_batch import Fields, PagedBatch, row_positions
from jaxserve.runner.sharding import TENSOR, cache_sharding, replicated
from jaxserve.sampling.logprobs import Logprobs, logprobs, prompt_logprobs
from jaxserve.sampling.sampler import sample
from jaxserve.sampling.state import SamplingInputs, SamplingState, init_state
from pallas_kernels.dispatch import compiling_for


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


def run_step(graphdef: Any, layout: BatchLayout, mesh: Mesh, *arguments: Any) -> tuple[DeviceState, StepOutputs]:
    """`_run_step` with the mesh known to whatever asks for it while it is traced."""
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), compiling_for(mesh.devices.flat[0]):
        return _run_step(graphdef, layout, mesh, *arguments)


def _run_step(graphdef: Any, layout: BatchLayout, mesh: Mesh, leaves: Sequence[jax.Array], state: DeviceState,
             ints: jax.Array, floats: jax.Array) -> tuple[DeviceState, StepOutputs]:
    """One step of the model over a packed batch (`BatchLayout`). Traced once for each bucket."""
    fields = cut(ints, layout.int_fields) | cut(floats, layout.float_fields)
    model = merge(graphdef, leaves)
    block_size = parts(state.caches[0][0])[0].shape[1]
    positions, slot_mapping = row_positions(fields, block_size)
    token_ids = _input_tokens(fields, state.last_tokens)

    hidden, caches = model(token_ids, positions, state.caches, PagedBatch(fields, slot_mapping, mesh))

    with jax.named_scope("sample"):
        logits = model.logits(hidden[_sampled_rows(fields)])
        inputs = _sampling_inputs(fields)
        sampled, sampling = sample(logits, inputs, state.sampling)
        of_sampled = logprobs(logits, sampled, inputs.wants_logprobs)
        prompt = None
        if not layout.bucket.is_decode:
            prompt = prompt_logprobs(hidden, model.logits, fields["target_ids"], fields["num_logprob_rows"])
        trash = state.last_tokens.shape[0] - 1
        slots = jnp.where(fields["samples"] > 0, fields["slots"], trash)
        last_tokens = state.last_tokens.at[slots].set(sampled)
    return DeviceState(caches, last_tokens, sampling), StepOutputs(sampled, of_sampled, prompt)


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
    def make() -> DeviceState:  # one program: an engine that loads its steps compiles little else
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    made: DeviceState = jax.jit(make, out_shardings=shardings)()
    return made


def output_tree(state: DeviceState, bucket: Bucket) -> PyTreeDef:
    """Structure of what a bucket's step returns."""
    of_tokens: Any = (0, 0, 0, 0)  # a leaf each
    outputs = StepOutputs(cast(jax.Array, 0), of_tokens, None if bucket.is_decode else of_tokens)
    return jax.tree.structure((state, outputs))


def _input_tokens(fields: Fields, last_tokens: jax.Array) -> jax.Array:
    """Each row's token: from the host, or the one sampled by an earlier step that the host may not have seen yet."""
    token_ids = fields["token_ids"]
    slots = fields["slots"]
    if "row_seq" in fields:
        slots = slots[jnp.minimum(fields["row_seq"], slots.shape[0] - 1)]
    return jnp.where(fields["from_device"] > 0, last_tokens[slots], token_ids)


def _sampled_rows(fields: Fields) -> jax.Array:
    """[S]: each sequence's last row."""
    if "query_starts" not in fields:
        return jnp.arange(fields["slots"].shape[0], dtype=jnp.int32)
    return jnp.maximum(fields["query_starts"] + fields["query_lens"] - 1, 0)


def _sampling_inputs(fields: Fields) -> SamplingInputs:
    named = dict(zip(SLOT_INTS, fields["sampling_ints"], strict=True))
    named |= dict(zip(SLOT_FLOATS, fields["sampling_floats"], strict=True))
    named["uses_row"] *= fields["samples"]  # what is drawn in the middle of a prompt must not be counted
    return SamplingInputs(position=fields["context_lens"], slot=fields["slots"], **named)
