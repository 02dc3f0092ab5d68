"""int4_matmul as a Pallas-Triton kernel, for compute capability 8.0 and newer.

Each program makes a tile of the transposed output, out^T = W^T x^T, over its share of the input features: the unpacked
weights are then the matrix unit's left operand, which it takes from registers. What else the shapes here owe to the
hardware:

- A decode step is bound by reading the weights, and on the largest cards almost as much by unpacking them. The layout
  (layout.py) makes that one shift, one logical instruction and one multiply-add for every two weights, and no shuffle.
- q - zero is exact in 16 bits. With few tokens the sum of a group is scaled, in float32, after its dots. With more, the
  second accumulator that this takes costs more than scaling the weights before the dot does.
- The tiles of the output alone do not fill a card. So the input features are split as well; each split's float32 sums
  are written out, and XLA adds them up in whatever reads them.
- Tiles have 32 outputs a warp: rows of scales are then one number a thread, and stay out of shared memory.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.dispatch import Target
from pallas_kernels.int4_matmul import reference
from pallas_kernels.int4_matmul.layout import BLOCK, SLAB, WORDS, Int4Weight, group_size
from pallas_kernels.int4_matmul.unpack import unpack
from pallas_kernels.tuning import look_up


@dataclass(frozen=True)
class Tiles:
    """How a matmul is cut up.

    Attributes:
        tokens, outputs: size of an output tile; tokens are 16 or more, outputs 32 a warp.
        scale_after_dot: scale sums of groups instead of weights.
        programs_per_core: about this many programs a streaming multiprocessor are wanted; input features are split to
            get them.
    """

    tokens: int
    outputs: int
    num_warps: int
    num_stages: int
    scale_after_dot: bool
    programs_per_core: int


def tiles_for(num_tokens: int, target: Target) -> Tiles | None:
    """From pallas_kernels/tuning/int4_matmul.json; None: it costs less to dequantise all weights first."""
    capability = target.capability and float("{}.{}".format(*target.capability))
    row = look_up("int4_matmul", "matmul", num_tokens=num_tokens, capability=capability)
    return Tiles(**row) if row else None


def num_splits_for(tiles: Tiles, num_tokens: int, packed: Any, target: Target) -> int:
    """Into how many parts the input features of packed [C, N, 16] are split."""
    num_tiles = pl.cdiv(num_tokens, tiles.tokens) * pl.cdiv(packed.shape[1], tiles.outputs)
    wanted = round(tiles.programs_per_core * target.num_cores / num_tiles)
    # A split writes and reads back 8 bytes a token and output, a block of its weights has 66: at most a quarter.
    fewest_blocks = min(-(-num_tokens // 2), 16)
    return max(min(wanted, packed.shape[0] // fewest_blocks), 1)


def int4_matmul(
    x: jax.Array, weight: Int4Weight, bias: jax.Array | None, *, target: Target, interpret: bool = False
) -> jax.Array:
    """See api.int4_matmul; `interpret` runs the kernel in Pallas' interpreter."""
    tiles = tiles_for(x.shape[0], target)
    if tiles is None or (x.dtype == jnp.float32 and not interpret):  # matrix units take 16 bits
        return reference.int4_matmul_dense(x, weight, bias)
    num_splits = num_splits_for(tiles, x.shape[0], weight.packed, target)
    return tiled_matmul(x, weight, bias, tiles=tiles, num_splits=num_splits, interpret=interpret)


def tiled_matmul(
    x: jax.Array, weight: Int4Weight, bias: jax.Array | None, *, tiles: Tiles, num_splits: int, interpret: bool = False
) -> jax.Array:
    """int4_matmul with these tiles and number of splits of the input features."""
    num_tokens, num_outputs = x.shape[0], weight.packed.shape[1]
    arrays = {"x": x, "bias": bias, **weight._asdict()}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    whole = pl.BlockSpec(memory_space=pl.ANY)
    sums = pl.pallas_call(
        functools.partial(_kernel, tiles=tiles, group=group_size(weight), interpret=interpret),
        name="int4_matmul",
        grid=(pl.cdiv(num_tokens, tiles.tokens), pl.cdiv(num_outputs, tiles.outputs), num_splits),
        in_specs=[dict.fromkeys(arrays, whole)],
        out_specs=whole,
        out_shape=jax.ShapeDtypeStruct(
            (num_splits, num_tokens, num_outputs), x.dtype if num_splits == 1 else jnp.float32
        ),
        compiler_params=plt.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
    )(arrays)
    return sums[0] if num_splits == 1 else sums.sum(axis=0).astype(x.dtype)


def _kernel(ref: dict[str, Any], out: Any, *, tiles: Tiles, group: int, interpret: bool) -> None:
    """One tile of the output, summed over one split of the input features."""
    num_tokens, num_features = ref["x"].shape
    num_blocks, num_outputs, _ = ref["packed"].shape
    token = pl.program_id(0) * tiles.tokens + jnp.arange(tiles.tokens)
    output = pl.program_id(1) * tiles.outputs + jnp.arange(tiles.outputs)
    split, num_splits = pl.program_id(2), pl.num_programs(2)
    token_mask = None if num_tokens % tiles.tokens == 0 else token < num_tokens
    output_mask = None if num_outputs % tiles.outputs == 0 else output < num_outputs
    group_slabs = min(group, BLOCK) // SLAB

    def load_x(first: jax.Array) -> jax.Array:
        """x^T of a slab, [SLAB, tokens]."""
        feature = first + jnp.arange(SLAB)
        feature_mask = None if num_features % BLOCK == 0 else feature < num_features
        mask = _outer(feature_mask, token_mask, (SLAB, tiles.tokens))
        return _load(ref["x"].at[token[None, :], feature[:, None]], mask)

    def load_groups(block: jax.Array) -> dict[str, list[jax.Array]]:
        """Scales and zero-points of a block, an [outputs] array for each of its groups."""
        starts = range(0, BLOCK, group_slabs * SLAB)
        rows = [lax.div(block * BLOCK + start, jnp.int32(group)) for start in starts]
        names = [name for name in ("scales", "zeros") if name in ref]
        return {name: [_load(ref[name].at[row, output], output_mask) for row in rows] for name in names}

    def add_block(block: jax.Array, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        total, groups = carry
        # The compiler does not prefetch rows this short, so each step loads the next one's.
        next_groups = load_groups(jnp.minimum(block + 1, num_blocks - 1))
        mask = _outer(output_mask, None, (tiles.outputs, WORDS))
        words = _load(ref["packed"].at[block, output[:, None], jnp.arange(WORDS)[None, :]], mask)
        part = jnp.zeros_like(total) if tiles.scale_after_dot else total
        for slab in range(BLOCK // SLAB):
            scale, zeros = (rows and rows[slab // group_slabs] for rows in (groups["scales"], groups.get("zeros")))
            weights = unpack(
                lax.shift_right_logical(words, jnp.int32(4 * slab)),
                zeros,
                None if tiles.scale_after_dot else scale,
                ref["x"].dtype,
                interpret=interpret,
            )
            part += plt.dot(weights, load_x(block * BLOCK + slab * SLAB))
            if tiles.scale_after_dot and (slab + 1) % group_slabs == 0:
                total += part * scale.astype(jnp.float32)[:, None]
                part = jnp.zeros_like(part)
        return total if tiles.scale_after_dot else part, next_groups

    first, end = split * num_blocks // num_splits, (split + 1) * num_blocks // num_splits
    total = jnp.zeros((tiles.outputs, tiles.tokens), jnp.float32)
    total, _ = lax.fori_loop(first, end, add_block, (total, load_groups(first)))
    if "bias" in ref:
        bias = _load(ref["bias"].at[output], output_mask).astype(jnp.float32)
        total += jnp.where(split == 0, bias, 0)[:, None]
    mask = _outer(output_mask, token_mask, total.shape)
    plt.store(out.at[split, token[None, :], output[:, None]], total.astype(out.dtype), mask=mask)


def _load(ref: Any, mask: jax.Array | None) -> jax.Array:
    """What lies there, 0 where masked."""
    return plt.load(ref, mask=mask, other=None if mask is None else 0)


def _outer(rows: jax.Array | None, columns: jax.Array | None, shape: tuple[int, int]) -> jax.Array | None:
    """The mask of a matrix from its rows' and its columns'; None masks nothing."""
    masks = [] if rows is None else [rows[:, None]]
    masks += [] if columns is None else [columns[None, :]]
    return functools.reduce(jnp.logical_and, (jnp.broadcast_to(mask, shape) for mask in masks)) if masks else None
