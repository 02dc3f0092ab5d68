"""The decoder's parameters by dotted path: what should be there, what is there, and a flat tuple for the jit boundary.

An nnx object crossing the jit boundary costs milliseconds a call; a flat tuple of arrays does not. So a model is split
once at load, and merged inside the trace, where it costs nothing at run time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.tree_util import PyTreeDef

from jaxserve.config import ModelConfig
from jaxserve.errors import CheckpointError
from jaxserve.models.decoder import Decoder
from jaxserve.models.spec import ParamSpec


def abstract_model(config: ModelConfig, *, tensor_parallel_size: int = 1, dtype: Any = jnp.float32) -> Decoder:
    """A decoder whose parameters are `jax.ShapeDtypeStruct`s. The same one for the same arguments: do not change it."""
    return _abstract_model(config, tensor_parallel_size, jnp.dtype(dtype))


class _OneKey(nnx.Rngs):
    """For initialisers of which only shapes are wanted: streams of keys take half of the time to trace them."""

    def __init__(self) -> None:
        super().__init__()
        self.key = jax.random.key(0)

    def params(self) -> jax.Array:
        return self.key


@lru_cache(maxsize=4)  # asked for by loader, runner and checks; tracing all the initialisers takes a fifth of a second
def _abstract_model(config: ModelConfig, tensor_parallel_size: int, dtype: jnp.dtype) -> Decoder:
    return nnx.eval_shape(lambda: Decoder(config, tensor_parallel_size=tensor_parallel_size, dtype=dtype,
                                          rngs=_OneKey()))


def abstract_params(config: ModelConfig, *, tensor_parallel_size: int = 1,
                    dtype: Any = jnp.float32) -> dict[str, ParamSpec]:
    """Every parameter's path and spec, in the order of `split`."""
    model = abstract_model(config, tensor_parallel_size=tensor_parallel_size, dtype=dtype)
    specs = {}
    for path, param in jax.tree.leaves_with_path(model, is_leaf=lambda node: isinstance(node, nnx.Param)):
        value = param.get_value()
        specs[_dotted(path)] = ParamSpec(tuple(value.shape), jnp.dtype(value.dtype), param.get_metadata("axes"))
    return specs


def flatten(model: nnx.Module) -> dict[str, jax.Array]:
    """Every parameter's array by path, in the order of `split`."""
    _, leaves, paths = split(model)
    return dict(zip(paths, leaves, strict=True))


def split(model: nnx.Module) -> tuple[PyTreeDef, tuple[jax.Array, ...], tuple[str, ...]]:
    """Takes a model apart into structure (hashable), arrays, and the arrays' paths, in an order that depends only on
    the structure."""
    leaves, graphdef = jax.tree.flatten_with_path(model)
    return graphdef, tuple(leaf for _, leaf in leaves), tuple(_dotted(path) for path, _ in leaves)


def merge(graphdef: PyTreeDef, leaves: Sequence[Any]) -> Any:
    """The model again, from `split`'s structure and its arrays (or tracers, or shardings); cheap inside a trace."""
    return jax.tree.unflatten(graphdef, leaves)


def model_from_params(config: ModelConfig, params: Mapping[str, Any], *, tensor_parallel_size: int = 1,
                      dtype: Any = jnp.float32) -> Decoder:
    """The decoder with these arrays as its parameters; they are taken as they are, sharding included.

    Raises:
      CheckpointError: names, shapes or dtypes are not those of `abstract_params`; all differences are named.
    """
    specs = abstract_params(config, tensor_parallel_size=tensor_parallel_size, dtype=dtype)
    problems = [f"{path} is missing" for path in specs.keys() - params.keys()]
    problems += [f"{path} is unexpected" for path in params.keys() - specs.keys()]
    for path in specs.keys() & params.keys():
        spec, shape, found = specs[path], tuple(params[path].shape), jnp.dtype(params[path].dtype)
        if (shape, found) != (spec.shape, spec.dtype):
            problems.append(f"{path} is {found}{list(shape)}, expected {spec.dtype}{list(spec.shape)}")
    if problems:
        raise CheckpointError("parameters do not fit the config: " + "; ".join(sorted(problems)))
    graphdef, _, paths = split(abstract_model(config, tensor_parallel_size=tensor_parallel_size, dtype=dtype))
    return merge(graphdef, [params[path] for path in paths])


def _dotted(path: tuple[Any, ...]) -> str:
    # A Param is itself a node of the tree: its array sits one step below it, under "value".
    names = [str(key.idx) if isinstance(key, jax.tree_util.SequenceKey) else key.name for key in path]
    return ".".join(names[:-1] if names[-1] == "value" else names)
