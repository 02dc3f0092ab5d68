"""The Mosaic attention kernels in JAX's GPU interpreter, race detection on, against dense attention in numpy."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Target
from pallas_kernels.paged_attention import mosaic_decode, mosaic_ragged, mosaic_tiles
from tests.pallas_kernels.attention_steps import Step
from tests.pallas_kernels.mosaic_interpreter import FAULTS, run_decode, run_ragged

TOLERANCE = 1e-2  # bfloat16 and float16 inputs
HOPPER = Target("gpu", (9, 0), 132)
RISING = 0.3  # the last 11 tokens of a context have 96 % of the weight, give or take the rest of the data


@pytest.fixture(autouse=True)
def short_ring(monkeypatch):
    """Two slots, so that short contexts go round the ring."""
    for width in mosaic_tiles.STAGES:
        monkeypatch.setitem(mosaic_tiles.STAGES, width, 2)


def decode_step(contexts, heads=(1, 3, 64), **options):
    """One row of padding behind the decodes."""
    seqs = len(contexts) + 1
    return Step(contexts, [], heads=heads, seqs=seqs, rows=seqs, dtype=options.pop("dtype", jnp.bfloat16), **options)


@pytest.mark.parametrize("options", [
    {},
    {"window": 1},
    {"window": 70, "soft_cap": 5.0},
    {"num_splits": 2, "split_keys": 64},
    {"num_splits": 4, "split_keys": 64, "window": 150},
], ids=str)
def test_decode_matches_dense(options):
    step = decode_step([1, 203, 64])
    scoring = {name: options[name] for name in ("window", "soft_cap") if name in options}
    step.check(run_decode(step, **options), TOLERANCE, **scoring)


@pytest.mark.parametrize(("heads", "block_size", "dtype"), [
    ((2, 1, 128), 32, jnp.float16),
    ((1, 16, 64), 16, jnp.bfloat16),
    ((2, 7, 256), 32, jnp.bfloat16),
], ids=str)
def test_decode_heads_and_dtypes(heads, block_size, dtype):
    step = decode_step([139], heads, block_size=block_size, columns=10, dtype=dtype)
    step.check(run_decode(step, num_splits=2, split_keys=64), TOLERANCE)


@pytest.mark.parametrize("options", [{}, {"window": 30, "soft_cap": 3.0}], ids=str)
def test_ragged_matches_dense(options):
    """A tile that is full, tiles that are not, one token, contexts from before the step; more items than programs."""
    step = Step([33, 1], [(70, 90), (1, 1), (5, 140)], heads=(1, 3, 64), rows=96, dtype=jnp.bfloat16)
    step.check(run_ragged(step, num_programs=3, **options), TOLERANCE, **options)


def test_ragged_with_fewer_rows_than_a_tile():
    step = Step([], [(7, 20)], heads=(2, 1, 128), rows=16, seqs=2, columns=2, block_size=32, dtype=jnp.float16)
    step.check(run_ragged(step, num_programs=1), TOLERANCE)


def test_step_without_prompts():
    """No tile at all."""
    step = Step([40], [], heads=(1, 2, 64), rows=16, seqs=2, columns=3, dtype=jnp.bfloat16)
    step.check(run_ragged(step, num_programs=2), TOLERANCE)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_synchronisation_are_caught(fault):
    """Left out: a wait for a copy into a tile; a wait before its slot is refilled."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.pallas_kernels.mosaic_interpreter", fault]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.split()[-1:] == ["right"] if fault == "none" else done.stdout.split()[-1] in ("barrier", "race")


def dropped_tail(context, *options):
    keys = split_keys(context, *options)
    return keys._replace(num_tiles=jnp.maximum(keys.num_tiles - 1, 0))


split_keys = mosaic_decode._split_keys


@pytest.mark.parametrize(("module", "name", "fault"), [
    (mosaic_decode, "_split_keys", dropped_tail),
    (mosaic_tiles, "_rescale", lambda high, new_high: jnp.ones_like(high)),
    (mosaic_tiles, "_clear_unseen_rows", lambda *args: None),
], ids=["dropped tail", "missing rescale", "poison not cleared"])
def test_faults_of_arithmetic_show(module, name, fault):
    step = decode_step([139], rising=RISING)
    with mock.patch.object(module, name, fault):
        assert step.error(run_decode(step)) > 10 * TOLERANCE


def test_a_wrong_block_table_shows():
    step = decode_step([139], rising=RISING)
    step.block_tables[0, 8] = step.block_tables[0, 0]  # of 9 blocks, the last one is wrong
    assert step.error(run_decode(step)) > 10 * TOLERANCE


BFLOAT16 = jnp.dtype(jnp.bfloat16)


@pytest.mark.parametrize(("target", "q", "cache", "dtype", "reason"), [
    (Target("gpu", (10, 0), 148), (4, 2, 4, 128), (9, 16, 2, 128), BFLOAT16, "9.0, not 10.0"),
    (HOPPER, (4, 2, 4, 80), (9, 16, 2, 80), BFLOAT16, "head width 80"),
    (HOPPER, (4, 2, 4, 128), (9, 8, 2, 128), BFLOAT16, "block size 8"),
    (HOPPER, (4, 2, 17, 128), (9, 16, 2, 128), BFLOAT16, "17 query heads"),
    (HOPPER, (4, 2, 4, 128), (9, 16, 2, 128), jnp.dtype(jnp.int8), "k_cache int8"),
    (HOPPER, (4, 2, 4, 128), (9, 16, 2, 128), jnp.dtype(jnp.float32), "k_cache float32"),
], ids=lambda value: str(value))
def test_what_it_cannot_serve_it_refuses(target, q, cache, dtype, reason):
    query, k = jax.ShapeDtypeStruct(q, jnp.bfloat16), jax.ShapeDtypeStruct(cache, dtype)
    for kernel in (mosaic_decode, mosaic_ragged):
        assert reason in (kernel.refusal(target, query, k) or "")
    scoring: Any = {"scale": 1.0, "window": None, "soft_cap": None, "target": target}
    arrays: Any = (query, mosaic_decode.Cache(k, k, None, None), np.zeros((4, 2), np.int32), np.zeros(4, np.int32))
    with pytest.raises(NotImplementedError, match=reason):
        mosaic_decode.decode(*arrays, **scoring)


def test_it_serves_the_usual_models():
    k = jax.ShapeDtypeStruct((9, 16, 8, 128), BFLOAT16)
    for group_heads in (1, 4, 6, 7, 8, 16):
        query = jax.ShapeDtypeStruct((4, 8, group_heads, 128), BFLOAT16)
        assert mosaic_decode.refusal(HOPPER, query, k) is None
        assert mosaic_ragged.refusal(HOPPER, query, k) is None


def test_ragged_refuses_the_widest_heads():
    query, k = jax.ShapeDtypeStruct((4, 8, 1, 256), BFLOAT16), jax.ShapeDtypeStruct((9, 16, 8, 256), BFLOAT16)
    assert mosaic_decode.refusal(HOPPER, query, k) is None
    assert "head width 256" in (mosaic_ragged.refusal(HOPPER, query, k) or "")


@pytest.mark.parametrize(("num_programs", "most_keys", "splits"), [
    (8, 4096, 8),  # by length: none below 512 tokens
    (8, 131072, 16),  # by the card: 132 cores
    (1024, 4096, 1),
    (1024, 131072, 8),  # by length: none above 16384 tokens
])
def test_number_of_splits(num_programs, most_keys, splits):
    assert mosaic_decode.choose_num_splits(num_programs, most_keys, 132) == splits
