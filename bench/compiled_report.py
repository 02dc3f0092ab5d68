"""What the compiler makes of the engine's step on a GPU, told without one: kernels per layer, copies, collectives,
bytes against the unavoidable, memory, and registers and spills of our own kernels.

The step is the engine's own, for the decode bucket (`--batch` sequences, one token each) and the mixed bucket (all but
one of them decode, one prompt without cached context fills `--tokens`), compiled for the target. How the figures come
about:

- Kernels: every launch in XLA's thunk sequence, copies and collectives included. Of conditionals (the sampler's) the
  branch that does least; loops of unknown length (prompt logprobs) not at all, they are named instead. A layer begins
  with the first kernel that reads one of its weights and ends where the next begins; printed is the one in the middle.
- Copies: kernels anywhere in the program that make another array of a cache array or of a weight, be it a plain copy
  or a conversion. There must be none.
- Bytes: what each kernel reads and writes by its HLO, each operand and result once; of an array that is sliced or
  gathered from only the slices, of one that is updated in place only the updates, of the cache in our own attention
  kernels the live tokens (`--context`; a ragged kernel's tiles are taken to share the cache's blocks through L2).
  Unavoidable are the weights once, without the embedding table's unused rows, and the live keys and values once. In a
  mixed step the inputs and outputs of matrix products weigh too and are shown for themselves.
- GEMMs are cuBLAS's: nothing is autotuned without a GPU. Times are not measured, of course; the least time is bytes
  over the card's bandwidth.

All bytes are per device.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import report

if TYPE_CHECKING:
    from bench.compiled.measure import Launch, Measured
    from jaxserve.targets import Kernel

_KINDS = ("decode", "mixed")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = _arguments(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before jax is imported: its CUDA plugin wants a GPU otherwise
    from bench.compiled.lowering import StepOptions, lower_step
    from bench.compiled.measure import Measured
    from jaxserve.config import check_divisible
    from jaxserve.errors import JaxserveError
    from jaxserve.planning.known import read_model
    from jaxserve.targets import get_target, lowering_for, read_program

    try:
        model, target = read_model(args.model, args.quantization), get_target(args.target.lower())
        options = StepOptions(batch=args.batch, tokens=args.tokens, context=args.context, block_size=args.block_size,
                              max_model_len=args.max_model_len)
        if args.tensor_parallel_size < 1:
            raise ValueError(f"tensor_parallel_size={args.tensor_parallel_size}: must be at least 1")
        mesh = target.mesh(args.tensor_parallel_size)
        check_divisible(model, args.tensor_parallel_size)
    except (ValueError, JaxserveError) as error:
        raise SystemExit(f"bench.compiled_report: {error}") from error
    results: dict[str, Any] = {}
    for kind in args.steps:
        try:
            with lowering_for(target, mesh):
                step = lower_step(kind, model, mesh, options)
        except (ValueError, JaxserveError) as error:  # e.g. 4-bit weights on several devices
            raise SystemExit(f"bench.compiled_report: {error}") from error
        measured = Measured(step, read_program(step.lowered, target))
        _show(kind, measured, args)
        results[kind] = measured.as_json()
    return report.write_json(args.json, {"model": args.model, "quantization": args.quantization, "target": args.target,
                                         **results})


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.compiled_report", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="as for `jaxserve plan`: a config.json or its folder, or a name: llama-3.1-8b")
    parser.add_argument("--target", default="h200", help="a100, a10g, l4, rtx4090, h100, h200 or b200")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N")
    parser.add_argument("--quantization", choices=["int4", "fp8"],
                        help="of the projections' weights; 4 bits in groups of 128")
    parser.add_argument("--batch", type=int, default=32, metavar="S",
                        help="sequences; also the most that the engine would run")
    parser.add_argument("--tokens", type=int, default=2048, metavar="T", help="of the mixed step")
    parser.add_argument("--context", type=int, default=1024, metavar="N", help="tokens of each decoding sequence")
    parser.add_argument("--block-size", type=int, default=16, metavar="P")
    parser.add_argument("--max-model-len", type=int, default=8192, metavar="N")
    parser.add_argument("--steps", nargs="+", choices=_KINDS, default=_KINDS)
    parser.add_argument("--outside", action="store_true", help="list the kernels outside the layers too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    return parser.parse_args(argv)


def _show(kind: str, measured: Measured, args: argparse.Namespace) -> None:
    number = measured.step.model.num_layers // 2
    name = " ".join(filter(None, [args.model, args.quantization]))
    title = f"{kind} step of {name} on {measured.step.mesh.size} x {args.target}: {measured.step.bucket}"
    header = ["kernel", "kind", "grid", "reads MB", "writes MB", "weights, or where from"]
    report.show(f"{title}; layer {number}", header, _rows(measured.representative_layer), _notes(measured))
    if args.outside:
        report.show("outside the layers", header, _rows(measured.outside))
    resources = measured.program.resources()
    if resources:
        report.show("our own kernels", ["kernel", "registers", "spilled B", "shared memory B"], [
            [used.kernel, used.registers, used.spill_bytes, used.shared_memory_bytes] for used in resources])


def _rows(launches: Sequence[Launch]) -> list[list[object]]:
    rows: list[list[object]] = []
    for launch in launches:
        kernel, within = launch.kernel, "".join("  " for _ in launch.kernel.within)
        grid = "x".join(map(str, kernel.grid)) if kernel.grid else ""
        origin = ", ".join(path.split(".", 2)[-1] if path.startswith("layers.") else path for path in launch.weights)
        rows.append([within + kernel.name, kernel.kind, grid, launch.moved.read_bytes / 1e6,
                     launch.moved.written_bytes / 1e6, origin or "/".join(kernel.op_name.split("/")[-3:])])
    return rows


def _notes(measured: Measured) -> list[str]:
    counts, total, memory = measured.layer_counts, measured.traffic.total, measured.program.memory
    middle = Counter(counts).most_common(1)[0][0]
    bandwidth = measured.program.target.bandwidth_bytes_per_s
    collectives = Counter((launch.kernel.name, launch.layer is not None) for launch in measured.collectives)
    in_layers = {name: count / len(counts) for (name, inside), count in collectives.items() if inside}
    outside = {name: count for (name, inside), count in collectives.items() if not inside}
    notes = [
        f"kernels: {middle} a layer ({min(counts)} to {max(counts)}), "
        f"{sum(launch.times for launch in measured.outside)} outside the layers",
        f"copies of the cache: {_copies(measured.cache_copies)}; of weights: {_copies(measured.weight_copies)}",
        f"bytes: {total.num_bytes / 1e9:.3f} GB, of which unavoidable {measured.unavoidable_bytes / 1e9:.3f} "
        f"(weights {measured.weight_bytes / 1e9:.3f}, live KV {measured.live_kv_bytes / 1e9:.3f}): "
        f"{total.num_bytes / measured.unavoidable_bytes:.3f} times; inputs and outputs of matrix products "
        f"{measured.product_bytes / 1e9:.3f}",
        f"least time: {total.num_bytes / bandwidth * 1e3:.2f} ms at {bandwidth / 1e12:.2f} TB/s",
        f"memory: arguments {memory.argument_bytes / 1e9:.3f} GB (by hand {measured.argument_bytes / 1e9:.3f}), "
        f"temporaries {memory.temp_bytes / 1e6:.1f} MB; compiled in {measured.program.compile_s:.1f} s",
    ]
    if loops := measured.traffic.open_loops:
        named = ", ".join(f"{name.removeprefix('jit(step)/')} ({count} kernels)" for name, count in loops.items())
        notes.insert(1, f"not counted, in loops of unknown length: {named}")
    if measured.step.mesh.size > 1:
        notes.insert(1, f"collectives a layer: {in_layers or 'none'}; outside: {outside or 'none'}")
    return notes


def _copies(copies: Sequence[tuple[Kernel, str]]) -> str:
    return str(len(copies)) + "".join(f" [{kernel.name}: {what}]" for kernel, what in copies[:5])


if __name__ == "__main__":
    main()
