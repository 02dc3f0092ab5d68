"""Bytes that kernels move, against hand arithmetic, and copies of arguments."""

import jax
import jax.numpy as jnp
import pytest

from jaxserve.targets import compile_for, get_target
from jaxserve.targets.traffic import Moved, Paged, Traffic
from tests.targets import kernels

H200 = get_target("h200")


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def moved(function, *args, donate_argnums=()):
    traffic = Traffic(compile_for(function, *args, target=H200, donate_argnums=donate_argnums))
    assert not traffic.open_loops
    return traffic.total


def test_elementwise_and_reduction():
    assert moved(jnp.sin, shape(1000, 64)) == Moved(256000, 256000)
    assert moved(lambda x: x.sum(axis=1), shape(1000, 64)) == Moved(256000, 4000)


def test_matrix_product_counts_no_workspace():
    x, w = shape(32, 64, dtype=jnp.bfloat16), shape(64, 128, dtype=jnp.bfloat16)
    assert moved(jnp.dot, x, w) == Moved(2 * (32 * 64 + 64 * 128), 2 * 32 * 128)


def test_matrix_product_of_a_slice():
    x, w = shape(32, 64, dtype=jnp.bfloat16), shape(64, 128, dtype=jnp.bfloat16)
    found = moved(lambda x, w: x[8:16] @ w, x, w)
    slice_bytes = 2 * 8 * 64
    extra = found.written_bytes - 2 * 8 * 128
    assert extra in (0, slice_bytes)  # older compilers slice in a kernel of its own
    assert found.read_bytes == slice_bytes + 2 * 64 * 128 + extra


def test_gather_reads_rows_only():
    def rows(table, index):
        return table.at[index].get(mode="promise_in_bounds") * 2

    assert moved(rows, shape(5000, 64), shape(8, dtype=jnp.int32)) == Moved(8 * 64 * 4 + 8 * 4, 8 * 64 * 4)


def test_update_in_place_writes_rows_only():
    def write(cache, rows, index):
        return cache.at[index].set(rows, mode="promise_in_bounds", unique_indices=True)

    args = shape(5000, 64), shape(8, 64), shape(8, dtype=jnp.int32)
    assert moved(write, *args, donate_argnums=0) == Moved(8 * 64 * 4 + 8 * 4, 8 * 64 * 4)
    copy = 2 * 5000 * 64 * 4
    assert moved(write, *args).num_bytes == 2 * 8 * 64 * 4 + 8 * 4 + copy


def test_loop_of_known_length_counts_every_round():
    def repeat(x, times):
        return jax.lax.fori_loop(0, times, lambda _, x: jnp.sort(x), x)

    once, often = (moved(lambda x, times=times: repeat(x, times), shape(64, 64)).num_bytes for times in (2, 9))
    assert often - once >= 7 * 2 * 64 * 64 * 4


def test_open_loop_is_named_not_counted():
    def repeat(x, times):
        return jax.lax.fori_loop(0, times, lambda _, x: jnp.sort(x), jnp.exp(x))

    traffic = Traffic(compile_for(repeat, shape(64, 64), shape(dtype=jnp.int32), target=H200))
    assert list(traffic.open_loops) == ["jit(repeat)/while"]
    assert 2 * 64 * 64 * 4 <= traffic.total.num_bytes < 2 * 64 * 64 * 4 + 100


def test_cheapest_branch_counts():
    def either(x, n):
        return jax.lax.cond(n > 0, lambda x: jnp.sort(x, axis=0) @ x, jnp.sin, x)

    least = 2 * 256 * 256 * 4
    assert least <= moved(either, shape(256, 256), shape(dtype=jnp.int32)).num_bytes < least + 100


def test_of_three_branches_the_cheapest_counts():
    def choose(x, n):
        return jax.lax.switch(n, [lambda x: jnp.sort(x) @ x, lambda x: x @ x, lambda x: x @ x @ x], x)

    traffic = Traffic(compile_for(choose, shape(256, 256), shape(dtype=jnp.int32), target=H200))
    ran = [kernel for kernel, _ in traffic.running() if kernel.within]
    assert [kernel.kind for kernel in ran] == ["gemm"]
    assert ran[0].within[0].endswith(":branch_1")


def copied(function, *args, donate_argnums=()):
    program = compile_for(function, *args, target=H200, donate_argnums=donate_argnums)
    traffic = Traffic(program)
    return [argument for kernel in program.kernels for argument in traffic.copied(kernel)]


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda x, w: x @ w, []),
        (lambda x, w: x @ jnp.sin(w.T), ["w"]),
        (lambda x, w: (x @ w, w.astype(jnp.bfloat16)), ["w"]),
        (lambda x, w: x[:4] @ w, []),
    ],
    ids=["plain product", "weight made anew", "weight converted", "rows of x"],
)
def test_copied_weights(function, found):
    assert copied(function, shape(16, 256), shape(256, 256)) == found


def test_copied_cache_behind_an_update_and_inside_a_loop():
    def step(cache, rows, index, n):
        cache = cache.at[index].set(rows, mode="promise_in_bounds", unique_indices=True)
        total = jax.lax.fori_loop(0, n, lambda i, total: total + jnp.sum(cache[index] * i), 0.0)
        return cache, total

    args = shape(5000, 64), shape(8, 64), shape(8, dtype=jnp.int32), shape(dtype=jnp.int32)
    assert copied(step, *args, donate_argnums=0) == []
    assert "cache" in copied(step, *args)


def test_paged_argument_of_our_own_kernel():
    def function(cache, x):
        return kernels.double(cache.at[0].set(x)), kernels.double(x)

    def touched(kernel, argument):
        assert kernel.name.startswith("double")
        return Paged(100, 200) if argument == "cache" else None

    program = compile_for(function, shape(64, 64), shape(64), target=H200)
    plain, paged = (Traffic(program, given) for given in (None, touched))
    reads = [[traffic.of(kernel).read_bytes for kernel in program.pallas_kernels] for traffic in (plain, paged)]
    assert sorted(reads[0]) == [64 * 4, 64 * 64 * 4]
    assert reads[1] == reads[0]  # not donated, so the kernel reads a copy, which is not the argument
    program = compile_for(lambda cache: kernels.double(cache), shape(64, 64), target=H200)
    assert Traffic(program, touched).total == Moved(100, 64 * 64 * 4)
