"""Run as a program on 8 simulated devices: compares sharded with unsharded sampling, exits non-zero if they differ."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.request import SamplingParams
from jaxserve.sampling.logprobs import logprobs
from jaxserve.sampling.rows import build_rows
from jaxserve.sampling.sampler import sample
from jaxserve.sampling.state import init_state, set_row
from tests.sampling.helpers import make_inputs

NUM_ROWS, NUM_SLOTS, VOCAB_SIZE = 8, 8, 16384


@jax.jit
def step(logits, inputs, state):
    token_ids, state = sample(logits, inputs, state)
    return token_ids, state, logprobs(logits, token_ids, inputs.wants_logprobs)


def run(place):
    rng = np.random.default_rng(0)
    state = place(init_state(NUM_SLOTS, VOCAB_SIZE))
    params = SamplingParams(logit_bias={3: 5.0}, min_tokens=1)
    for slot in range(NUM_SLOTS):
        state = set_row(state, slot, *build_rows(params, VOCAB_SIZE, range(slot, 900), [9, 9], [1]))
    results = []
    for i, values in enumerate([
        {}, {"temperature": 0.8}, {"temperature": 0.9, "top_k": 40, "top_p": 0.9}, {"temperature": 2.0, "top_p": 0.95},
        {"temperature": 1.0, "uses_row": 1, "repetition": 1.3, "presence": 0.5}, {"uses_row": 1, "frequency": 1.0},
        {"temperature": 1.0, "top_k": 300, "min_p": 0.01},
    ]):  # fmt: skip
        rows = range(NUM_ROWS)
        inputs = make_inputs(NUM_ROWS, seed=i, position=rows, slot=rows, wants_logprobs=1, **values)
        logits = place(jnp.asarray(rng.normal(size=(NUM_ROWS, VOCAB_SIZE)) * 3, jnp.float32))
        token_ids, state, values_of_tokens = step(logits, inputs, state)
        results.append((token_ids, *values_of_tokens))
    return jax.tree.map(np.asarray, (results, state))


def main() -> None:
    expected = run(lambda tree: tree)
    for num_devices in (2, 4):
        mesh = jax.make_mesh(
            (num_devices,), ("tensor",), devices=jax.devices()[:num_devices], axis_types=(jax.sharding.AxisType.Auto,)
        )
        sharding = NamedSharding(mesh, PartitionSpec(None, "tensor"))
        got = run(lambda tree, sharding=sharding: jax.device_put(tree, sharding))
        for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            if ours.dtype == np.float32:
                np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=1e-5)
            else:
                np.testing.assert_array_equal(ours, theirs)


if __name__ == "__main__":
    main()
