"""What a parameter must be."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp


@dataclass(frozen=True)
class ParamSpec:
    """What one parameter must be.

    Attributes:
      axes: per axis its logical name ("vocab", "embed", "table_width", "kv_heads", "head", "mlp") or
        None; sharding derives from it.
    """

    shape: tuple[int, ...]
    dtype: jnp.dtype
    axes: tuple[str | None, ...]
