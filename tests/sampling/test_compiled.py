"""The compiled step: nothing of the state is copied; a vocabulary sharded over devices gives the same tokens."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.sampling.logprobs import logprobs
from jaxserve.sampling.sampler import sample
from jaxserve.sampling.state import init_state
from tests.sampling.helpers import make_inputs


def test_state_passes_in_place():
    num_rows, num_slots, vocab_size = 4, 10, 16384

    def step(logits, inputs, state):
        token_ids, state = sample(logits, inputs, state)
        return token_ids, state, logprobs(logits, token_ids, inputs.wants_logprobs)

    arguments = jnp.ones((num_rows, vocab_size)), make_inputs(num_rows), init_state(num_slots, vocab_size)
    compiled: Any = jax.jit(step, donate_argnums=2).lower(*arguments).compile()
    made = re.findall(rf"= \S*\[{num_slots + 1},{vocab_size}\]\S* ([\w-]+)\(.*", compiled.as_text())
    assert "copy" not in made and "copy-start" not in made
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(arguments[2]))
    assert compiled.memory_analysis().alias_size_in_bytes >= state_bytes


def test_sharded_vocabulary_gives_the_same_tokens():
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-m", "tests.sampling.sharded"], env=env, cwd=root, check=True)
