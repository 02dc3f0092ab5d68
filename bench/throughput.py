"""Output tokens per second of many requests at once: jaxserve and others in turn, in one run.

32 English prompts of 8 to 512 tokens (4,022 in all), 64 greedy tokens each. Ratios are medians over the rounds, each
round's engines compared with each other.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from bench import adapters, report, workload
from jaxserve.text import Tokenizer


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = _arguments(argv)
    data = adapters.open_model(args.model).tokenizer()
    work = workload.batch(Tokenizer(data.backend, data.config), num_requests=args.num_requests, longest=args.longest,
                          num_new_tokens=args.num_new_tokens)
    engines = {name: adapters.BATCH[name](args.model, **(args.engine_options if name == "jaxserve" else {}))
               for name in args.engines}
    for engine in engines.values():
        engine.warm_up(work.prompts, work.num_new_tokens)
    gc.freeze()  # transformers' continuous batching collects garbage in every call, which costs a second otherwise
    samples = report.in_turn(args.engines, args.repeat, lambda name: _run(engines[name], work))
    for engine in engines.values():
        engine.close()
    results = {"num_requests": len(work.prompts), "num_prompt_tokens": work.num_prompt_tokens,
               "num_new_tokens": work.num_new_tokens, "engine_options": args.engine_options,
               "engines": _summarise(samples, work)}
    _show(results, report.warnings(samples))
    return report.write_json(args.json, results)


def _arguments(argv: Sequence[str] | None) -> Any:
    parser = report.parser("bench.throughput", __doc__)
    report.engine_options(parser)
    parser.add_argument("--engines", type=adapters.names(adapters.BATCH), default=list(adapters.BATCH),
                        help=f"comma-separated, of {', '.join(adapters.BATCH)}; default: all")
    parser.add_argument("--repeat", type=int, default=3, help="rounds; default 3")
    parser.add_argument("--num-requests", type=int, default=32)
    parser.add_argument("--longest", type=int, default=512, help="prompt, in tokens; default 512")
    parser.add_argument("--num-new-tokens", type=int, default=64)
    args = parser.parse_args(argv)
    args.engine_options = dict(args.engine_options)
    return args


def _run(engine: adapters.BatchEngine, work: workload.Workload) -> tuple[float, list[list[int]]]:
    start = time.perf_counter()
    outputs = engine.generate(work.prompts, work.num_new_tokens)
    seconds = time.perf_counter() - start
    lengths = {len(token_ids) for token_ids in outputs}
    if len(outputs) != len(work.prompts) or lengths != {work.num_new_tokens}:
        sys.exit(f"{type(engine).__name__}: {len(outputs)} outputs of {sorted(lengths)} tokens, wanted "
                 f"{len(work.prompts)} of {work.num_new_tokens}")
    return seconds, outputs


def _summarise(samples: dict[str, list[report.Sample]], work: workload.Workload) -> dict[str, Any]:
    speeds = {name: [work.num_output_tokens / sample.result[0] for sample in rounds]
              for name, rounds in samples.items()}
    engines: dict[str, Any] = {}
    for name, rounds in samples.items():
        engines[name] = {"output_tokens_per_s": median(speeds[name]), "rounds": speeds[name],
                         "noise_cores": [sample.noise_cores for sample in rounds]}
        if "jaxserve" in samples and name != "jaxserve":
            engines[name]["jaxserve_ratio"] = report.median_ratio(speeds["jaxserve"], speeds[name])
            engines[name]["agreement"] = report.agreement(samples["jaxserve"][0].result[1], rounds[0].result[1])
    return engines


def _show(results: dict[str, Any], notes: list[str]) -> None:
    rows = []
    for name, engine in results["engines"].items():
        same = engine.get("agreement")
        rows.append([name, engine["output_tokens_per_s"], f"{min(engine['rounds']):.1f}-{max(engine['rounds']):.1f}",
                     f"{engine['jaxserve_ratio']:.2f}x" if same else "",
                     f"{same['equal_outputs']:.1%} / {same['equal_tokens']:.1%}" if same else "",
                     max(engine["noise_cores"])])
    report.show(f"{results['num_requests']} requests, {results['num_prompt_tokens']:,} prompt tokens, "
                f"{results['num_new_tokens']} new tokens each",
                ["engine", "output tokens/s", "min-max", "jaxserve is", "same outputs / tokens", "noise, cores"],
                rows, notes)


if __name__ == "__main__":
    main()
