"""What the Mosaic kernels ask of JAX: products of tiles, and every difference between JAX versions and interpretation.

Hardware: a tile of 64 rows lies in the registers of one warpgroup in the layout of wgmma, which multiplies it.

JAX's GPU interpreter (the kernels' tests) has no wgmma on transposed or register operands and, in 0.10.2, no layouts.
There the same products are dots on tiles read from shared memory, so its race detection sees every read of an operand.
"""

import dataclasses
import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_JAX_0_10 = jax.__version_info__ < (0, 11)

ROWS = 64
"""Rows of a wgmma tile."""


def interpret_params(**options: Any) -> Any:
    """Value for a kernel's `interpret`: race detection on; rows that a copy takes from beyond an array are NaN or 0."""
    home = "jax._src.pallas.mosaic_gpu.interpret.params" if _JAX_0_10 else plgpu.__name__
    options = {"detect_races": True, "out_of_bounds_reads": "uninitialized"} | options
    return importlib.import_module(home).InterpretGPUParams(**options)


def swizzled(dtype: jnp.dtype) -> tuple[Any, ...]:
    """Transforms of a shared memory tile that wgmma reads: rows of 128 bytes, swizzled."""
    return plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128)


@dataclasses.dataclass(frozen=True)
class TileOps:
    """Arithmetic on register tiles of ROWS rows."""

    interpret: bool

    def full_rows(self, value: float) -> jax.Array:
        """[ROWS] float32, one value a row."""
        values = jnp.full((ROWS,), value, jnp.float32)
        return values if self.interpret else plgpu.layout_cast(values, plgpu.Layout.WGMMA.reduce(1))

    def zeros(self, num_columns: int) -> jax.Array:
        """[ROWS, num_columns] float32."""
        values = jnp.zeros((ROWS, num_columns), jnp.float32)
        return values if self.interpret else plgpu.layout_cast(values, plgpu.Layout.WGMMA)

    def iota(self, num_columns: int, axis: int) -> jax.Array:
        """[ROWS, num_columns] int32 indices along `axis`."""
        shape = (ROWS, num_columns)
        if self.interpret:
            return lax.broadcasted_iota(jnp.int32, shape, axis)
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)

    def load(self, ref: Any, *, plain: bool = False) -> jax.Array:
        """The tile in shared memory at `ref`; plain: of rows that are not swizzled (bank conflicts: not in a loop)."""
        if self.interpret:
            return ref[...]
        options: dict[str, Any] = {"layout": plgpu.Layout.WGMMA, "optimized": not plain}
        return plgpu.load(ref, (), **options) if _JAX_0_10 else plgpu.load(ref, **options)

    def store(self, ref: Any, values: jax.Array, *, plain: bool = False) -> None:
        """Puts a tile where `load` takes it from."""
        if _JAX_0_10:
            ref[...] = values
        else:
            store: Any = plgpu.store  # type: ignore[attr-defined,unused-ignore]
            store(ref, values, optimized=not plain)

    def scores(self, q: Any, k: Any) -> jax.Array:
        """q [ROWS, H] times k [C, H] transposed, both in shared memory -> [ROWS, C] float32; both have been read."""
        if self.interpret:
            return self._dot(q[...], k[...], contract=(1, 1))

        def multiply(acc: Any) -> jax.Array:
            plgpu.wgmma(acc, q, plgpu.transpose_ref(k, (1, 0)) if _JAX_0_10 else k.T)
            return acc[...]

        return pl.run_scoped(multiply, plgpu.ACC((ROWS, k.shape[0]), jnp.float32))

    def add_product(self, acc: jax.Array, weights: jax.Array, v: Any) -> jax.Array:
        """acc [ROWS, H] float32 + weights [ROWS, C] times v [C, H] in shared memory; v has been read."""
        if self.interpret:
            return acc + self._dot(weights, v[...], contract=(1, 0))

        def multiply(acc: Any) -> None:
            plgpu.wgmma(acc, weights, v)

        return pl.run_state(multiply)(plgpu.ACC.init(acc))

    def _dot(self, a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
        plgpu.commit_smem()  # wgmma reads as a copy does, the interpreter's loads do not: order them before a refill
        axes = (((contract[0],), (contract[1],)), ((), ()))
        return lax.dot_general(a, b, axes, preferred_element_type=jnp.float32)
