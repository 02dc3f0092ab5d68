"""`jaxserve compile`: an engine's programs, made before it starts, on a machine without its GPU too."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from jaxserve.cli.options import EngineOptions


def compile(
    model: Annotated[str | None, typer.Argument(
        help="As for `jaxserve plan`. Default: the packaged SmolLM2.")] = None,
    *,
    target: Annotated[str, typer.Option(
        help="a100, a10g, l4, rtx4090, h100, h200 or b200, none of which need be here; cpu: this machine's processor; "
             "local: this machine's own devices.")],
    out: Annotated[Path, typer.Option(help="New or empty folder, or one to take up again.")],
    quantization: Annotated[str | None, typer.Option(help="As for `jaxserve plan`.")] = None,
    autotune_results: Annotated[Path | None, typer.Option(
        help="XLA's autotuning results, from the same kind of card: GEMMs may be Triton's then, else they are "
             "cuBLASLt's.")] = None,
    save_autotune_results: Annotated[Path | None, typer.Option(
        help="With --target local on a GPU: autotune, and write the results there.")] = None,
    options: EngineOptions,
) -> None:
    """Compile every program that an engine with these options would use, and write them to a folder.

    The engine takes them from there with --executables. May be stopped and started again: what is done stays.
    """
    from tqdm import tqdm

    from jaxserve.executables.build import build_executables, check_folder
    from jaxserve.executables.job import make_job
    from jaxserve.executables.manifest import Entry

    start = time.monotonic()
    check_folder(out)
    job = make_job(model, target=target, quantization=quantization, autotune_results=autotune_results,
                   save_autotune_results=save_autotune_results, **options.arguments())
    with tqdm(total=0, desc="compiling", unit="program", disable=not sys.stderr.isatty()) as bar:
        def on_start(total: int, done: int) -> None:
            bar.reset(total)
            bar.update(done)

        def on_done(name: str, entry: Entry) -> None:
            bar.update(1)
            bar.write(f"{name}: {entry.compile_s:.1f} s, {entry.num_bytes / 1e6:.1f} MB", file=sys.stderr)

        manifest = build_executables(job, out, on_start=on_start, on_done=on_done)
    size = sum(entry.num_bytes for entry in manifest.programs.values())
    print(f"{len(manifest.programs)} programs for {target}, {size / 1e6:.1f} MB, in {out} after "
          f"{time.monotonic() - start:.1f} s; {manifest.options['num_blocks']} KV blocks")
