"""Outputs of a given form: whether they have it, over 100 JSON schemas that get nastier, and what it costs.

Each schema is asked of the model with a few seeds; every output that ended by itself is checked with `jsonschema`. The
cost is the time of a step with all sequences guided, through a list that does not end, against the same without a form.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from bench import report

NAMES = ["plain", "guided"]
ENDLESS = {"type": "array", "minItems": 10_000, "items": {"type": "object", "properties": {
    "name": {"type": "string"}, "age": {"type": "integer"}, "kind": {"enum": ["fox", "dog"]}},
    "required": ["name", "age", "kind"], "additionalProperties": False}}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = _arguments(argv)
    from jaxserve import LLM

    with LLM(args.model, **({"max_num_seqs": args.streams} | dict(args.engine_options))) as llm:
        llm.warmup()
        finished, invalid = _validity(llm, args)
        for name in NAMES:
            _seconds_per_step(llm, args, name)
        samples = report.in_turn(NAMES, args.repeat, lambda name: _seconds_per_step(llm, args, name))
    times = {name: [sample.result for sample in samples[name]] for name in NAMES}
    ratio = report.median_ratio(times["guided"], times["plain"])
    report.show(f"{args.streams} sequences of {args.max_tokens} tokens", ["", "ms a step", "all rounds"],
                [[name, 1e3 * median(times[name]), " ".join(f"{1e3 * time:.1f}" for time in times[name])]
                 for name in NAMES],
                [f"guided / plain: {ratio:.3f} (bar: 1.15)",
                 f"{args.schemas} schemas, {finished} outputs ended by themselves, {len(invalid)} of them are invalid"])
    for schema, text in invalid[:5]:
        print(f"invalid: {json.dumps(schema)}\n  {text!r}", file=sys.stderr)
    return report.write_json(args.json, {"seconds_per_step": times, "ratio": ratio, "schemas": args.schemas,
                                         "finished": finished, "invalid": len(invalid)})


def _arguments(argv: Sequence[str] | None) -> Any:
    parser = report.parser("bench.structured_output", __doc__)
    report.engine_options(parser)
    parser.add_argument("--schemas", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    return parser.parse_args(argv)


def _validity(llm: Any, args: Any) -> tuple[int, list[tuple[Any, str]]]:
    """How many outputs ended by themselves, and those of them that are not valid."""
    import jsonschema

    from jaxserve import SamplingParams, StructuredOutputsParams

    schemas = [nasty_schema(index) for index in range(args.schemas) for _ in range(args.seeds)]
    prompts = [[{"role": "user", "content": f"Answer with JSON of this schema: {json.dumps(schema)[:300]}"}]
               for schema in schemas]
    params = [SamplingParams(temperature=0.8, seed=seed, max_tokens=384,
                             structured_outputs=StructuredOutputsParams(json=schema))
              for seed, schema in enumerate(schemas)]
    finished, invalid = 0, []
    for schema, output in zip(schemas, llm.chat(prompts, params, use_tqdm=False), strict=True):
        answer = output.outputs[0]
        if answer.finish_reason != "stop":
            continue
        finished += 1
        try:
            jsonschema.validate(json.loads(answer.text), schema)
        except (ValueError, jsonschema.ValidationError):
            invalid.append((schema, answer.text))
    return finished, invalid


def _seconds_per_step(llm: Any, args: Any, name: str) -> float:
    from jaxserve import SamplingParams, StructuredOutputsParams

    form = StructuredOutputsParams(json=ENDLESS) if name == "guided" else None
    prompts = [[10 + (row * 7 + column) % 200 for column in range(16)] for row in range(args.streams)]
    params = [SamplingParams(temperature=1.0, seed=row, max_tokens=args.max_tokens, ignore_eos=True,
                             structured_outputs=form) for row in range(args.streams)]
    begin = time.monotonic()
    llm.generate(prompts, params, use_tqdm=False)
    return (time.monotonic() - begin) / args.max_tokens


def nasty_schema(index: int) -> dict[str, Any]:
    """The index-th of a sequence of JSON schemas that get deeper and use more of the language."""
    rng = random.Random(index)
    schema = _object(rng, depth=1 + index // 34, nastiness=index / 100)
    if index % 5 == 4:
        schema["$defs"] = {"node": {"type": "object", "properties": {
            "value": {"type": "integer", "minimum": -9, "maximum": 9},
            "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["value", "next"], "additionalProperties": False}}
        schema["properties"]["tree"] = {"$ref": "#/$defs/node"}
        schema["required"] = [*schema["required"], "tree"]
    return schema


def _object(rng: random.Random, depth: int, nastiness: float) -> dict[str, Any]:
    names = rng.sample(["name", "größe", "年齢", "a b", 'quo"te', "line\nbreak", "x", "$ref-like", "emoji😀", "_"],
                       rng.randint(1, 2 + int(2 * nastiness)))
    properties = {name: _value(rng, depth - 1, nastiness) for name in names}
    required = [name for name in names if rng.random() < 0.8]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _value(rng: random.Random, depth: int, nastiness: float) -> dict[str, Any]:
    plain: list[dict[str, Any]] = [
        {"type": "integer", "minimum": rng.randint(-50, 0), "maximum": rng.randint(1, 2000)},
        {"type": "boolean"}, {"type": "null"}, {"type": "string", "maxLength": rng.randint(1, 12)},
        {"enum": ["red", "grün", 3, None, {"a": [1]}]}, {"const": rng.choice(["fixed", 7, [1, 2]])}]
    nasty: list[dict[str, Any]] = [
        {"type": "string", "pattern": r"^[A-Z]{2}-\d{1,4}$"}, {"type": "string", "format": "date"},
        {"type": "string", "format": "uuid"}, {"type": "number", "exclusiveMinimum": -1, "maximum": 12.5},
        {"type": ["string", "null"], "maxLength": 4}, {"type": "string", "minLength": 3, "maxLength": 6}]
    if depth > 0 and rng.random() < 0.6:
        return rng.choice([
            lambda: _object(rng, depth, nastiness),
            lambda: {"type": "array", "items": _value(rng, depth - 1, nastiness), "minItems": rng.randint(0, 2),
                     "maxItems": 3},
            lambda: {"type": "array", "prefixItems": [_value(rng, depth - 1, nastiness) for _ in range(2)],
                     "items": False, "minItems": 2},
            lambda: {"anyOf": [_value(rng, depth - 1, nastiness), _value(rng, depth - 1, nastiness)]}])()
    return rng.choice(nasty if rng.random() < nastiness else plain)


if __name__ == "__main__":
    main()
