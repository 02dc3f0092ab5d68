"""`jaxserve convert`: a checkpoint that loads without being converted again."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer


def convert(
    src: Annotated[str, typer.Argument(help="Hugging Face folder or GGUF file.")],
    dst: Annotated[Path, typer.Argument(help="New or empty folder.")],
    *,
    dtype: Annotated[str | None, typer.Option(
        help="float32, bfloat16 or float16. Default: the checkpoint's own; float32 for a quantised GGUF.")] = None,
) -> None:
    """Write a checkpoint as an Orbax checkpoint, with config and tokenizer beside it.

    DST can then be given as --model; it loads faster, and straight into a sharding.
    """
    from convert.checkpoint import convert_checkpoint

    start = time.monotonic()
    convert_checkpoint(src, dst, dtype)
    size = sum(file.stat().st_size for file in dst.rglob("*") if file.is_file())
    print(f"wrote {dst} ({size / 2**20:.0f} MiB) in {time.monotonic() - start:.1f} s", file=sys.stderr)
