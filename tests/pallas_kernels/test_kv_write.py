"""kv_write: the right slots, nothing else, and no copy of the cache."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kv_write, paged_attention_decode, paged_attention_ragged


@pytest.mark.parametrize("num_tokens", [1, 2, 37])
@pytest.mark.parametrize("cache_dtype", [jnp.float32, jnp.bfloat16])
def test_writes_its_slots_only(num_tokens, cache_dtype):
    rng = np.random.default_rng(3)
    k, v = rng.normal(size=(2, num_tokens, 3, 8)).astype(np.float32)
    before = rng.normal(size=(2, 9, 16, 3, 8)).astype(cache_dtype)
    slots = rng.permutation(np.arange(16, 9 * 16)).astype(np.int32)[:num_tokens]
    after = jax.jit(kv_write)(k, v, before[0], before[1], slots)
    for rows, old, new in zip((k, v), before, after, strict=True):
        want = old.reshape(-1, 3, 8).copy()
        want[slots] = rows.astype(cache_dtype)
        np.testing.assert_array_equal(np.asarray(new).reshape(-1, 3, 8), want)


def test_padding_rows_share_a_slot_of_block_0():
    k = jnp.ones((4, 1, 8))
    cache = jnp.zeros((3, 4, 1, 8))
    new, _ = jax.jit(kv_write)(k, k, cache, cache, jnp.array([5, 0, 0, 0], jnp.int32))
    assert new[1:].sum() == 8


@pytest.mark.parametrize(("num_tokens", "ragged"), [(1, False), (2, False), (8, False), (48, True)])
def test_donated_caches_are_written_in_place(num_tokens, ragged):
    """Two layers of write and attention: the compiled program holds no copy of a cache."""
    num_blocks, num_seqs = 1237, min(num_tokens, 8)

    def step(caches, q, tables, lens, slots):
        written = []
        for k_cache, v_cache in caches:
            k_cache, v_cache = kv_write(q[:, :, 0], q[:, :, 1], k_cache, v_cache, slots)
            if ragged:
                counts = [lens[0], lens, lens, lens[1]]
                q = q + paged_attention_ragged(q, k_cache, v_cache, tables, lens, lens, lens, *counts, scale=1.0)
            else:
                q = q + paged_attention_decode(q, k_cache, v_cache, tables, lens, scale=1.0)
            written.append((k_cache, v_cache))
        return written, q

    cache = jax.ShapeDtypeStruct((num_blocks, 16, 3, 64), jnp.float32)
    q = jax.ShapeDtypeStruct((num_tokens, 3, 3, 64), jnp.float32)
    shapes = ((num_seqs, 16), (num_seqs,), (num_tokens,))
    tables, lens, slots = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes)
    compiled: Any = jax.jit(step, donate_argnums=0).lower([(cache, cache)] * 2, q, tables, lens, slots).compile()
    sizes = f"({num_blocks},16|{num_blocks * 16}),"
    assert not re.findall(rf"= f32\[{sizes}[^ ]* copy\(.*", compiled.as_text())
    memory = compiled.memory_analysis()
    cache_bytes = num_blocks * 16 * 3 * 64 * 4
    assert memory.alias_size_in_bytes >= 4 * cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": (4, 3, 7)}, "v "),
        ({"k_cache": (9, 16, 2, 8)}, "k_cache"),
        ({"v_cache": (8, 16, 3, 8)}, "v_cache"),
        ({"slot_mapping": (5,)}, "slot_mapping"),
    ],
)
def test_bad_input_is_named(change, message):
    shapes = {"k": (4, 3, 8), "v": (4, 3, 8), "k_cache": (9, 16, 3, 8), "v_cache": (9, 16, 3, 8)}
    arrays: dict[str, Any] = {name: jnp.zeros(change.get(name, shape)) for name, shape in shapes.items()}
    slots = jnp.zeros(change.get("slot_mapping", (4,)), jnp.int32)
    with pytest.raises(ValueError, match=message):
        kv_write(**arrays, slot_mapping=slots)
