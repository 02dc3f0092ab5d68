"""The jitted step: from packed inputs to sampled tokens, in one dispatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.runner.batch import SLOT_FLOATS, SLOT_INTS, BatchLayout, cut
from jaxserve.runner.kv_cache import parts
from jaxserve.runner.paged_batch import Fields, PagedBatch, row_positions
from jaxserve.runner.state import DeviceState, StepOutputs
from jaxserve.sampling.logprobs import logprobs, prompt_logprobs
from jaxserve.sampling.sampler import sample
from jaxserve.sampling.state import SamplingInputs
from pallas_kernels.dispatch import compiling_for

MakeModel = Callable[[Sequence[jax.Array]], Any]
"""The model with these weights; see `Blueprint.decoder`."""


def run_step(decoder: MakeModel, layout: BatchLayout, mesh: Mesh, *arguments: Any) -> tuple[DeviceState, StepOutputs]:
    """`_run_step` with the mesh known to whatever asks for it while it is traced."""
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), compiling_for(mesh.devices.flat[0]):
        return _run_step(decoder, layout, mesh, *arguments)


def _run_step(decoder: MakeModel, layout: BatchLayout, mesh: Mesh, leaves: Sequence[jax.Array], state: DeviceState,
              ints: jax.Array, floats: jax.Array) -> tuple[DeviceState, StepOutputs]:
    """One step of the model over a packed batch (`BatchLayout`). Traced once for each bucket."""
    fields = cut(ints, layout.int_fields) | cut(floats, layout.float_fields)
    if layout.bucket.is_lone:
        fields["num_decodes"] = jnp.int32(0)  # known to the compiler, which drops the decodes' loops
    model = decoder(leaves)
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
