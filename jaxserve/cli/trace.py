"""Puts the scopes of the model's code into a trace whose device events only have the names of compiled operations.

XLA names what it made of a program (`fusion.12`); the scope that the source gave it stays behind in the program's text:

    %fusion.12 = f32[8,576]{1,0} fusion(...), metadata={op_name="jit(run_step)/jit(_apply_layer)/attention/dot_general"}
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

HOST_SCOPES = ("schedule", "step", "outputs")
DEVICE_SCOPES = ("embed", "attention", "mlp", "logits", "sample")

_INSTRUCTION = re.compile(r'^\s*(?:ROOT )?%?(\S+) = .*? ([a-z][\w-]*)\((?:.*op_name="([^"]*)")?', re.MULTILINE)
_CONTAINERS = ("while", "call", "conditional")  # what they run has events of its own

Event = dict[str, Any]


class Operation(NamedTuple):
    """One instruction of a compiled program."""

    opcode: str
    op_name: str

    @property
    def scope(self) -> str:
        """The innermost known scope, or "other"."""
        return next((part for part in reversed(self.op_name.split("/")) if part in DEVICE_SCOPES), "other")


def annotate(trace: Path, programs: Iterable[str], out: Path) -> dict[str, float]:
    """Writes the scopes' part of a trace.

    Args:
      trace: as JAX's profiler writes it for Perfetto (gzipped JSON).
      programs: texts of the compiled programs that may have run.
      out: the same form, with the host's scopes and the device's operations as "scope: operation".

    Returns:
      Seconds in each scope; on the device summed over its threads, with "other" for the rest.
    """
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    tables = [operations(text) for text in programs]
    times = dict.fromkeys((*HOST_SCOPES, *DEVICE_SCOPES, "other"), 0.0)
    kept = []
    for run in _runs(events):
        table = _table_of(run, tables)
        for event in run:
            operation = table[event["args"]["hlo_op"]] if table is not None else Operation("", "")
            if operation.opcode not in _CONTAINERS:
                times[operation.scope] += event["dur"] / 1e6
            kept.append(event | {"name": f"{operation.scope}: {event['name']}",
                                 "args": event["args"] | {"op_name": operation.op_name}})
    for event in events:
        if event.get("name") in HOST_SCOPES and "dur" in event:
            times[event["name"]] += event["dur"] / 1e6
            kept.append(event)
        elif event.get("ph") == "M":  # names of processes and threads
            kept.append(event)
    out.write_bytes(gzip.compress(json.dumps({"displayTimeUnit": "ms", "traceEvents": kept}).encode()))
    return times


def operations(program: str) -> dict[str, Operation]:
    """Every instruction of a compiled program's text by name."""
    return {name: Operation(opcode, op_name) for name, opcode, op_name in _INSTRUCTION.findall(program)}


def _runs(events: Iterable[Event]) -> list[list[Event]]:
    """The events of compiled operations, those of one run of one program together."""
    runs: dict[tuple[Any, ...], list[Event]] = defaultdict(list)
    for event in events:
        args = event.get("args", {})
        if "hlo_op" in args and "dur" in event:
            runs[args.get("hlo_module"), args.get("program_id"), args.get("run_id")].append(event)
    return list(runs.values())


def _table_of(run: list[Event], tables: list[dict[str, Operation]]) -> dict[str, Operation] | None:
    """The program of a run: the one that has all its operations (all programs bear the same name). None: no step."""
    names = {event["args"]["hlo_op"] for event in run}
    return next((table for table in tables if names <= table.keys()), None)
