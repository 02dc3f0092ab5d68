"""Peak memory of the throughput run, each engine in a process of its own, and what of it is neither weights nor KV
cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import adapters, report, workload
from jaxserve.text import Tokenizer

STAGES = ("imported", "loaded", "warm")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = _arguments(argv)
    if args.measure:
        print(json.dumps(_measure(args)))
        return {}
    results = {name: _in_process(name, sys.argv[1:] if argv is None else argv) for name in args.engines}
    columns = ("weights", "kv_cache", *STAGES, "peak", "other")
    report.show("resident memory, MB", ["engine", "weights", "KV cache", *STAGES, "peak", "peak - both"],
                [[name, *(_mb(found.get(column)) for column in columns)] for name, found in results.items()])
    return report.write_json(args.json, {"bytes": results})


def _arguments(argv: Sequence[str] | None) -> Any:
    parser = report.parser("bench.memory", __doc__)
    report.engine_options(parser)
    parser.add_argument("--engines", type=adapters.names(adapters.BATCH), default=["jaxserve"],
                        help=f"comma-separated, of {', '.join(adapters.BATCH)}; default: jaxserve")
    parser.add_argument("--num-requests", type=int, default=32)
    parser.add_argument("--longest", type=int, default=512, help="prompt, in tokens; default 512")
    parser.add_argument("--num-new-tokens", type=int, default=64)
    parser.add_argument("--measure", choices=list(adapters.BATCH), help="this engine, in this process; prints JSON")
    return parser.parse_args(argv)


def _in_process(name: str, argv: Sequence[str]) -> dict[str, int]:
    command = [sys.executable, "-m", "bench.memory", *argv, "--measure", name]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=Path(__file__).parent.parent)
    return json.loads(result.stdout.splitlines()[-1])


def _measure(args: Any) -> dict[str, int]:
    """Bytes. The peak is the kernel's own record of the process."""
    found = {"imported": _status("VmRSS")}
    data = adapters.open_model(args.model).tokenizer()
    work = workload.batch(Tokenizer(data.backend, data.config), num_requests=args.num_requests, longest=args.longest,
                          num_new_tokens=args.num_new_tokens)
    options = dict(args.engine_options) if args.measure == "jaxserve" else {}
    engine = adapters.BATCH[args.measure](args.model, **options)
    found["loaded"] = _status("VmRSS")
    engine.warm_up(work.prompts, work.num_new_tokens)
    found["warm"] = _status("VmRSS")
    engine.generate(work.prompts, work.num_new_tokens)
    found["peak"] = _status("VmHWM")
    if isinstance(engine, adapters.Jaxserve):
        found |= engine.memory()
        found["other"] = found["peak"] - found["weights"] - found["kv_cache"]
    engine.close()
    return found


def _status(field: str) -> int:
    lines = Path(f"/proc/{os.getpid()}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def _mb(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 1e6:,.0f}"


if __name__ == "__main__":
    main()
