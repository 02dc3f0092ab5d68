"""What only a GPU can tell, in one command of under five minutes: are the kernels right on this card, how near do they
come to its memory's speed, and how fast are a small real model and the decode step of a large one.

Kernels are compared with the jax.numpy reference on the same device. Bandwidth is measured first, with an elementwise
kernel over a large array, and the kernels' bytes per second (weights or live KV, each once) are given as a share of it.
`--dry-run` goes the same way on a CPU, with small shapes and the kernels in Pallas' interpreter: it shows that the
script works, its speeds mean nothing.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench import report


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="the results; default: a file in bench/results")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU: small shapes, interpreted kernels")
    args = parser.parse_args(argv)
    import jax

    start = time.perf_counter()
    device = jax.devices()[0]
    if not args.dry_run and device.platform != "gpu":
        raise SystemExit(f"bench.gpu_check: JAX's default device is a {device.platform}; --dry-run works without a GPU")
    results: dict[str, Any] = {"device": device.device_kind, "jax": jax.__version__, "python": sys.version.split()[0],
                               "date": datetime.date.today().isoformat(), "dry_run": args.dry_run}
    backends = _backends(args.dry_run, device)
    parts: dict[str, Callable[[bool], Any]] = {
        "kernels": partial(_kernels, backends), "speeds": partial(_speeds, backends), "end_to_end": _end_to_end,
    }
    for name, run in parts.items():
        results[name] = run(args.dry_run)
        results["seconds"] = time.perf_counter() - start
        report.write_json(args.json or _default_file(results), results)  # what is known so far, should the next fail
    print(f"took {results['seconds']:.0f} s")
    if not all(kernel["is_right"] for kernel in results["kernels"]):
        raise SystemExit("bench.gpu_check: a kernel differs from the reference")
    return results


def _default_file(results: dict[str, Any]) -> Path | None:
    if results["dry_run"]:
        return None
    card = "-".join(results["device"].lower().split())
    return Path(__file__).parent / "results" / f"gpu-check-{card}-{results['date']}.json"


def _backends(dry_run: bool, device: Any) -> list[str]:
    """By name, so that a kernel that cannot run is an error and never the reference compared with itself."""
    if dry_run:
        return ["triton_interpret"]
    return ["triton", "mosaic"] if str(device.compute_capability).startswith("9.") else ["triton"]


def _kernels(backends: list[str], dry_run: bool) -> list[dict[str, Any]]:
    from bench.gpu.kernels import LIMIT, compare_all

    found = [(backend, each) for backend in backends for each in compare_all(backend, only_first=dry_run)]
    report.show("kernels against the reference", ["case", "backend", "relative error", "right"],
                [[each.name, backend, f"{each.error:.1e}", each.is_right] for backend, each in found],
                [f"limit {LIMIT}"])
    return [{"name": each.name, "backend": backend, "error": each.error, "is_right": each.is_right}
            for backend, each in found]


def _speeds(backends: list[str], dry_run: bool) -> dict[str, Any]:
    from bench.gpu.kernels import memory_bandwidth, speeds

    bandwidth = memory_bandwidth(1 << (20 if dry_run else 30))
    shape = dict(num_seqs=2, context=40, num_in=256, num_out=128) if dry_run else dict(
        num_seqs=64, context=4096, num_in=4096, num_out=28672)
    found = [(backend, each) for backend in backends for each in speeds(backend, **shape)]
    report.show(f"speed; the memory gives {bandwidth / 1e9:,.0f} GB/s",
                ["kernel", "backend", "microseconds", "share of bandwidth"],
                [[each.name, backend, each.seconds * 1e6, f"{each.num_bytes / each.seconds / bandwidth:.0%}"]
                 for backend, each in found])
    return {"bandwidth_bytes_per_s": bandwidth,
            "kernels": [{"name": each.name, "backend": backend, "seconds": each.seconds, "bytes": each.num_bytes}
                        for backend, each in found]}


def _end_to_end(dry_run: bool) -> dict[str, Any]:
    from bench.compiled.lowering import StepOptions
    from bench.gpu.steps import decode_step, smollm2
    from jaxserve.planning.known import read_model

    if dry_run:
        smallest = replace(read_model("llama-3.1-8b"), num_layers=2, layer_windows=(None, None), hidden_size=128,
                           intermediate_size=256, vocab_size=512, num_heads=4, num_kv_heads=2, head_dim=32)
        options = StepOptions(batch=2, context=40, max_model_len=64, dtype="float32")
        large = [decode_step("tiny llama", options, model=smallest)]
        small = smollm2(2, 4, max_num_seqs=2, max_num_batched_tokens=64)
    else:
        large = [decode_step("llama-3.1-8b", StepOptions(), quantization=quantization)
                 for quantization in (None, "int4")]
        small = smollm2(64, 128)
    report.show("end to end", ["what", "milliseconds a step", "tokens/s"], [
        ["SmolLM2-135M, {requests} requests".format(**small), "", small["output_tokens_per_s"]],
        *(["decode step of {model} {quantization}, {sequences} x {context} tokens".format(**step),
           step["seconds"] * 1e3, step["sequences"] / step["seconds"]] for step in large)], [repr(small["answer"])])
    return {"smollm2": small, "decode_steps": large}


if __name__ == "__main__":
    main()
