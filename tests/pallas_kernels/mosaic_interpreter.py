"""JAX's GPU interpreter for Mosaic kernels: races are errors, and what it costs is kept down.

As a program, `python -m tests.pallas_kernels.mosaic_interpreter FAULT`: breaks the synchronisation of the decode kernel
and says what became of it. An error leaves the interpreter unusable, so this has a process of its own.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dispatch import Target
from pallas_kernels.paged_attention import mosaic_ops, mosaic_tiles
from pallas_kernels.paged_attention.mosaic_decode import decode
from pallas_kernels.paged_attention.mosaic_ragged import ragged
from pallas_kernels.paged_attention.triton_tiles import Cache
from tests.pallas_kernels.attention_steps import SCALE, Step

CPU = Target("cpu")


def run_decode(step: Step, *, window: int | None = None, soft_cap: float | None = None, **options: Any) -> np.ndarray:
    """[S, K, G, H] float32; rows are the sequences'. Raises RuntimeError if there was a race."""
    scoring: dict[str, Any] = {"scale": SCALE, "window": window, "soft_cap": soft_cap, "target": CPU}
    scoring["interpret"] = mosaic_ops.interpret_params()

    def run(q: Any, k: Any, v: Any, tables: Any, context_lens: Any) -> jax.Array:
        return decode(q, Cache(k, v, None, None), tables, context_lens, **scoring, **options)

    return _run(run, step.q, step.k_cache, step.v_cache, step.block_tables, step.context_lens)


def run_ragged(step: Step, *, window: int | None = None, soft_cap: float | None = None, **options: Any) -> np.ndarray:
    """[T, K, G, H] float32. Raises RuntimeError if there was a race."""
    scoring: dict[str, Any] = {"scale": SCALE, "window": window, "soft_cap": soft_cap, "target": CPU}
    scoring["interpret"] = mosaic_ops.interpret_params()

    def run(q: Any, k: Any, v: Any, *rows: Any) -> jax.Array:
        attend: Any = ragged
        return attend(q, Cache(k, v, None, None), *rows, **scoring, **options)

    return _run(run, *step.ragged_arrays())


def _run(kernel: Callable[..., jax.Array], *arrays: Any) -> np.ndarray:
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    with _programs_compiled_once():
        out = np.asarray(jax.jit(kernel)(*arrays).astype(jnp.float32))
    if interpret_pallas_call.get_races().races_found:
        raise RuntimeError("race")
    return out


@contextlib.contextmanager
def _programs_compiled_once() -> Iterator[None]:
    """JAX 0.10.2 compiles what it interprets anew for each warpgroup of each program: a second or two each time."""
    if jax.__version_info__ >= (0, 11):
        yield
        return
    from jax._src.pallas.mosaic.interpret import thread_map

    def evaluate(jaxpr: Any, consts: Any, *args: Any) -> None:
        jax.core.eval_jaxpr(jaxpr, consts, *args)

    evaluate_jit, lock = jax.jit(evaluate, static_argnums=0), threading.Lock()
    compiled: dict[int, tuple[Any, Any]] = {}  # holds each jaxpr, so that its id stays its own

    def run(jaxpr: Any, consts: Any, *args: Any) -> None:
        with lock:
            if id(jaxpr) not in compiled:
                compiled[id(jaxpr)] = jaxpr, evaluate_jit.lower(jaxpr, consts, *args).compile()
        compiled[id(jaxpr)][1](consts, *args)

    with mock.patch.object(thread_map, "_run_jaxpr", run):
        yield


FAULTS = {"none": None, "read before full": "await_full", "refill before free": "await_free"}
"""What is left out."""


def main(fault: str) -> None:
    """Prints "right", "wrong", or what the interpreter caught."""
    step = Step([260], [], heads=(1, 3, 64), seqs=1, rows=1, dtype=jnp.bfloat16)
    left_out = FAULTS[fault]
    broken = mock.patch.object(mosaic_tiles, left_out, lambda barrier: None) if left_out else contextlib.nullcontext()
    try:
        with mock.patch.dict(mosaic_tiles.STAGES, {64: 2}), broken:
            error = step.error(run_decode(step))
    except Exception as exception:
        text = str(exception)
        print("race" if "RACE" in text.upper() else "barrier" if "Barrier" in text else text)
    else:
        print("right" if error < 1e-2 else "wrong")


if __name__ == "__main__":
    main(sys.argv[1])
