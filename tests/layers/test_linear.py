"""Projections: every way in which a dot is written gives the same numbers and gradients."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.layers.embedding import Embedding
from jaxserve.layers.linear import Linear, project

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("num_rows", [1, 2, 7, 64, 65])
@pytest.mark.parametrize("keep_axes", [False, True])
def test_project_over_several_axes(num_rows: int, keep_axes: bool) -> None:
    x = RNG.standard_normal((num_rows, 3, 4), np.float32)
    weight = RNG.standard_normal((5, 2, 3, 4), np.float32)
    y = jax.jit(lambda x, w: project(x, w, 2, keep_axes=keep_axes))(x, weight)
    np.testing.assert_allclose(y, np.einsum("tab,opab->top", x, weight), atol=1e-5)


@pytest.mark.parametrize("num_rows", [4, 70])
def test_project_is_differentiable(num_rows: int) -> None:
    x, weight = RNG.standard_normal((num_rows, 6), np.float32), RNG.standard_normal((5, 6), np.float32)
    grad_x, grad_w = jax.jit(jax.grad(lambda x, w: jnp.sum(project(x, w) ** 2) / 2, argnums=(0, 1)))(x, weight)
    y = x @ weight.T
    np.testing.assert_allclose(grad_x, y @ weight, atol=1e-4)
    np.testing.assert_allclose(grad_w, y.T @ x, atol=1e-4)


def test_out_dtype() -> None:
    x, weight = jnp.ones((3, 300), jnp.bfloat16), jnp.ones((2, 300), jnp.bfloat16)
    assert project(x, weight).dtype == jnp.bfloat16
    wide = project(x, weight, out_dtype=jnp.float32)
    assert wide.dtype == jnp.float32 and np.all(wide == 300)


def test_linear_declares_shapes_and_axes_once() -> None:
    linear = Linear((6,), (2, 5), axes=(None, "mlp", "embed"), use_bias=True, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert linear.weight.get_value().shape == (2, 5, 6) and linear.weight.get_metadata("axes") == (None, "mlp", "embed")
    assert linear.bias is not None
    assert linear.bias.get_value().shape == (2, 5) and linear.bias.get_metadata("axes") == (None, "mlp")
    assert linear(jnp.ones((4, 6), jnp.bfloat16)).shape == (4, 2, 5)


@pytest.mark.parametrize("num_rows", [1, 48, 80])
def test_no_copy_of_a_weight_in_the_compiled_dot(num_rows: int) -> None:
    """A dot over more axes than two would be preceded by a transposed copy of its weight, at every step."""
    x, weight = jax.ShapeDtypeStruct((num_rows, 64), jnp.float32), jax.ShapeDtypeStruct((2, 96, 64), jnp.float32)
    text = jax.jit(project).lower(x, weight).compile().as_text()
    weight_shapes = r"f32\[(?:2,96,64|192,64|64,192|64,2,96)\]\S*"
    assert text is not None and not re.findall(weight_shapes + r" (?:copy|transpose)\(", text)


def test_embedding_takes_rows() -> None:
    embed = Embedding(7, 3, axes=("vocab", "embed"), dtype=jnp.float32, rngs=nnx.Rngs(0))
    ids = jnp.asarray([6, 0, 6], jnp.int32)
    np.testing.assert_array_equal(embed(ids), embed.weight.get_value()[np.array([6, 0, 6])])
    assert np.isfinite(embed(jnp.asarray([-5, 100], jnp.int32))).all()
