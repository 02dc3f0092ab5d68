"""Seconds from starting `jaxserve generate` in a fresh process to the first token on its stdout: with an empty
compilation cache, with an empty cache but the executables that `jaxserve compile` wrote, and with what the first run
left in its cache. All must print the same. Medians; of the ratios too."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import truediv
from pathlib import Path
from statistics import median
from typing import IO, Any

from bench import report

_LOADED = re.compile(r"loaded .* in ([\d.]+) s")
_COMPILED = re.compile(r"(?:compiled|took) (.*?)(?: from its file)? in ([\d.]+) s")
BARS = {"cold": "30 s", "executables": "cold / 3", "warm": "6 s"}


@dataclass
class Start:
    """One run: seconds since the process was started.

    Attributes:
      log: lines of stderr, each with when it came.
    """

    text: str = ""
    first_token_s: float = 0.0
    end_s: float = 0.0
    log: list[tuple[float, str]] = field(default_factory=list)

    def breakdown(self) -> dict[str, Any]:
        """Where the time went, by what the engine logs (`--verbose`): loading is logged when it is over."""
        found: dict[str, Any] = {"first_token_s": self.first_token_s, "total_s": self.end_s, "compiled": []}
        for when, line in self.log:
            if match := _LOADED.search(line):
                found |= {"imports_s": when - float(match[1]), "load_s": float(match[1]), "loaded_s": when}
            elif (match := _COMPILED.search(line)) and when < self.first_token_s:
                found["compiled"].append({"program": match[1], "s": float(match[2]), "ready_s": when})
        ready = max((program["ready_s"] for program in found["compiled"]), default=found.get("loaded_s", 0.0))
        if "loaded_s" in found:
            found |= {"compile_s": ready - found["loaded_s"], "first_step_s": self.first_token_s - ready}
        return found


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = _arguments(argv)
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in BARS}
    noise = report.Noise()
    with tempfile.TemporaryDirectory() as executables:
        compile_s = _compile(args, executables)
        for _ in range(args.repeat):
            with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as empty:
                starts = {"cold": _start(args, cache),  # what is compared stands together: the machine may change
                          "executables": _start(args, empty, "--executables", executables),
                          "warm": _start(args, cache)}
            if len(texts := {start.text for start in starts.values()}) != 1:
                sys.exit(f"the texts differ: {texts}")
            for kind, start in starts.items():
                runs[kind].append(start.breakdown())
    first = {kind: [run["first_token_s"] for run in found] for kind, found in runs.items()}
    parts = ("imports_s", "load_s", "compile_s", "first_step_s")
    rows = [[kind, BARS[kind], median(first[kind]), median(map(truediv, first["cold"], first[kind])),
             *(median(run.get(part, float("nan")) for run in found) for part in parts)]
            for kind, found in runs.items()]
    report.show("seconds to the first token of `jaxserve generate`",
                ["start", "bar", "first token", "sooner than cold", "imports", "load", "until compiled", "first steps"],
                rows,
                [f"{kind}, before the first token: {program['program']} took {program['s']:.1f} s"
                 for kind, found in runs.items() for program in found[-1]["compiled"]]
                + [f"all programs compiled ahead in {compile_s:.0f} s"]
                + [f"other processes kept {noise.cores():.2f} cores busy (the measured ones included)"])
    return report.write_json(args.json, {"runs": runs, "compile_s": compile_s})


def _arguments(argv: Sequence[str] | None) -> Any:
    parser = report.parser("bench.cold_start", __doc__)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--prompt", default="What is the capital of France?")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("rest", nargs="*", metavar="OPTION", help="more engine options of the commands, after --")
    return parser.parse_args(argv)


def _compile(args: Any, folder: str) -> float:
    """Seconds that `jaxserve compile` takes."""
    begin = time.monotonic()
    command = [sys.executable, "-m", "jaxserve", "compile", *([args.model] if args.model else []), "--target", "cpu",
               "--out", folder, *args.rest]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    if done.returncode:
        sys.exit(f"jaxserve compile failed:\n{done.stderr}")
    return time.monotonic() - begin


def _start(args: Any, cache: str, *options: str) -> Start:
    command = [sys.executable, "-m", "jaxserve", "generate", "--verbose", "--compilation-cache-dir", cache,
               "--max-tokens", str(args.max_tokens), "--temperature", "0", "--ignore-eos", *options, *args.rest]
    command += ["--model", args.model] if args.model else []
    run, begin = Start(), time.monotonic()
    process = subprocess.Popen([*command, args.prompt], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, cwd=Path(__file__).parent.parent)
    assert process.stdout is not None and process.stderr is not None
    reader = threading.Thread(target=_read_log, args=(process.stderr, begin, run.log))
    reader.start()
    first = process.stdout.read(1)
    run.first_token_s = time.monotonic() - begin
    run.text = (first + process.stdout.read()).decode(errors="replace")
    process.wait()
    reader.join()
    run.end_s = time.monotonic() - begin
    if process.returncode or not first:
        sys.exit("jaxserve generate failed:\n" + "\n".join(line for _, line in run.log))
    return run


def _read_log(stream: IO[bytes], begin: float, log: list[tuple[float, str]]) -> None:
    for line in stream:
        log.append((time.monotonic() - begin, line.decode(errors="replace").rstrip()))


if __name__ == "__main__":
    main()
