"""Other weights for a running engine, from whatever form a trainer holds them in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.errors import CheckpointError

Params = dict[str, jax.Array]


def as_params(given: Any, current: Params, from_hf_names: Callable[[Mapping[str, Any]], Params]) -> Params:
    """Weights by dotted path, placed and typed like the current ones.

    Args:
      given: a `Decoder`, its nnx state, any nested mapping with the same names, a flat mapping by dotted path, or
        one by Hugging Face names.
      current: the weights in use.
      from_hf_names: converts the last kind.

    Raises:
      CheckpointError: listing all that is missing, unexpected or misshapen.
    """
    named = _flat(given)
    strange = [f"{path or 'params'} is a {type(value).__name__}, not an array" for path, value in named.items()
               if not hasattr(value, "shape")]
    if strange:
        raise CheckpointError("weights do not fit the model: " + "; ".join(strange[:20]))
    if 2 * len(named.keys() & current.keys()) < len(named):  # not none: "lm_head.weight" is a name of both kinds
        named = from_hf_names(named)
    problems = [f"{path} is missing" for path in current if path not in named]
    problems += [f"{path} is unexpected" for path in named if path not in current]
    problems += [f"{path} is {list(named[path].shape)}, expected {list(array.shape)}"
                 for path, array in current.items() if path in named and named[path].shape != array.shape]
    if problems:
        raise CheckpointError("weights do not fit the model: " + "; ".join(problems[:20]))
    # device_put is free where dtype and sharding agree already.
    return {path: jax.device_put(_array(named[path], array.dtype), array.sharding) for path, array in current.items()}


def _array(value: Any, dtype: Any) -> jax.Array:
    if isinstance(value, np.ndarray):  # copied: on a CPU JAX would share its memory, which the caller may write to
        value = value.astype(dtype)
    return jnp.asarray(value, dtype)


def _flat(given: Any) -> dict[str, Any]:
    from flax import nnx  # a third of a second to import; an engine that loads its steps does without

    if isinstance(given, nnx.Module):
        given = nnx.state(given, nnx.Param)
    if isinstance(given, nnx.State):
        given = nnx.to_pure_dict(given)
    flat: dict[str, Any] = {}

    def visit(value: Any, path: str) -> None:
        if isinstance(value, Mapping):
            for key, item in value.items():
                visit(item, f"{path}.{key}" if path else str(key))
        else:
            flat[path] = value.get_value() if isinstance(value, nnx.Variable) else value

    visit(given, "")
    return flat
