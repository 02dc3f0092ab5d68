"""The engine on the machine's own device: a real model end to end, and one decode step of a large one."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.compiled.lowering import Step, StepOptions, lower_step
from bench.gpu.kernels import seconds
from jaxserve import LLM, MeshConfig, SamplingParams
from jaxserve.config import ModelConfig
from jaxserve.planning.known import read_model
from jaxserve.runner.batch import BatchLayout
from jaxserve.runner.sharding import make_mesh


def smollm2(num_requests: int, num_new_tokens: int, **options: Any) -> dict[str, Any]:
    """Output tokens per second of the packaged model, greedy, after one round that compiles; and an answer to read."""
    params = SamplingParams(temperature=0, max_tokens=num_new_tokens, ignore_eos=True)
    prompts = [f"Question {number}: what is the capital of France? Answer:" for number in range(num_requests)]
    with LLM(**options) as llm:
        llm.generate(prompts, params, use_tqdm=False)
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        taken = time.perf_counter() - start
    return {"requests": num_requests, "output_tokens_per_s": num_requests * num_new_tokens / taken,
            "answer": outputs[0].outputs[0].text}


def decode_step(model_name: str, options: StepOptions, *, quantization: Any = None, model: ModelConfig | None = None,
                ) -> dict[str, Any]:
    """Seconds of a decode step with random weights, and the least that memory traffic allows."""
    mesh = make_mesh(MeshConfig())
    step = lower_step("decode", model or read_model(model_name, quantization), mesh, options)
    compiled = step.lowered.compile()
    leaves, state = _random_arguments(compiled)
    ints, floats = _decode_inputs(step, options)
    outputs: Any = None

    def run() -> Any:
        nonlocal state, outputs
        state, outputs = compiled(leaves, state, ints, floats)
        return outputs.token_ids

    taken = seconds(run)
    weights = sum(leaf.nbytes for leaf in leaves)
    live = 2 * step.model.num_layers * step.kv_bytes(sum(step.context_lens))
    return {"model": model_name, "quantization": quantization, "sequences": options.batch, "context": options.context,
            "seconds": taken, "unavoidable_bytes": weights + live}


def _random_arguments(compiled: Any) -> tuple[Any, Any]:
    """Weights and state as the program wants them, made on the device."""
    (leaves, state, *_), _ = compiled.in_avals if hasattr(compiled, "in_avals") else compiled.args_info
    shardings = compiled.input_shardings[0]
    key = jax.random.key(0)

    def fill(info: Any, sharding: Any) -> jax.Array:
        if jnp.issubdtype(info.dtype, jnp.integer):
            return jnp.zeros(info.shape, info.dtype, device=sharding)
        drawn = info.dtype if info.dtype.itemsize > 1 else jnp.bfloat16  # nobody draws numbers of 8 bits
        make = jax.jit(lambda: (jax.random.normal(key, info.shape, drawn) * 0.02).astype(info.dtype),
                       out_shardings=sharding)
        return make()

    weights = jax.tree.map(fill, leaves, shardings[0])
    zeros = jax.tree.map(lambda info, sharding: jnp.zeros(info.shape, info.dtype, device=sharding), state, shardings[1])
    return weights, zeros


def _decode_inputs(step: Step, options: StepOptions) -> tuple[np.ndarray, np.ndarray]:
    """Every sequence in blocks of its own, spread over the cache, decoding greedily."""
    layout = BatchLayout(step.bucket, -(-(options.max_model_len + 1) // options.block_size))
    ints, floats, views = layout.host_buffers()
    blocks = np.random.default_rng(0).permutation(np.arange(1, step.cache.num_blocks))
    first = 0
    for seq, length in enumerate(step.context_lens):
        count = -(-length // options.block_size)
        views["block_tables"][seq, :count] = blocks[first:first + count]
        first += count
    count = len(step.context_lens)
    views["context_lens"][:count] = step.context_lens
    views["samples"][:count] = 1
    views["slots"][:] = options.batch  # of no request
    views["slots"][:count] = np.arange(count)
    return ints, floats
