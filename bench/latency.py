"""One request alone: time to the first token, and tokens per second after it, by the time each token arrives."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench import adapters, report, workload
from jaxserve.text import Tokenizer


@dataclass(frozen=True)
class Stream:
    """One answer: its tokens and when each arrived, in seconds since the request."""

    token_ids: list[int]
    times_s: list[float]

    @property
    def first_token_s(self) -> float:
        return self.times_s[0]

    @property
    def decode_tokens_per_s(self) -> float:
        return (len(self.times_s) - 1) / (self.times_s[-1] - self.times_s[0])


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = _arguments(argv)
    data = adapters.open_model(args.model).tokenizer()
    work = workload.single(Tokenizer(data.backend, data.config), length=args.prompt_tokens,
                           num_new_tokens=args.num_new_tokens)
    engines = {name: adapters.STREAM[name](args.model, **(args.engine_options if name == "jaxserve" else {}))
               for name in args.engines}
    for engine in engines.values():
        engine.warm_up(work.prompts, work.num_new_tokens)
    samples = report.in_turn(args.engines, args.repeat, lambda name: _run(engines[name], work))
    for engine in engines.values():
        engine.close()
    results = {"num_prompt_tokens": work.num_prompt_tokens, "num_new_tokens": work.num_new_tokens,
               "engine_options": args.engine_options, "engines": _summarise(samples)}
    _show(results, report.warnings(samples))
    return report.write_json(args.json, results)


def _arguments(argv: Sequence[str] | None) -> Any:
    parser = report.parser("bench.latency", __doc__)
    report.engine_options(parser)
    parser.add_argument("--engines", type=adapters.names(adapters.STREAM), default=list(adapters.STREAM),
                        help=f"comma-separated, of {', '.join(adapters.STREAM)}; default: all")
    parser.add_argument("--repeat", type=int, default=5, help="rounds; default 5")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--num-new-tokens", type=int, default=64)
    args = parser.parse_args(argv)
    args.engine_options = dict(args.engine_options)
    return args


def _run(engine: adapters.StreamEngine, work: workload.Workload) -> Stream:
    stream = Stream(*engine.stream(work.prompts[0], work.num_new_tokens))
    if not len(stream.token_ids) == len(stream.times_s) == work.num_new_tokens:
        sys.exit(f"{type(engine).__name__}: {len(stream.token_ids)} tokens at {len(stream.times_s)} times, wanted "
                 f"{work.num_new_tokens}")
    return stream


def _summarise(samples: dict[str, list[report.Sample]]) -> dict[str, Any]:
    firsts = {name: [sample.result.first_token_s for sample in rounds] for name, rounds in samples.items()}
    speeds = {name: [sample.result.decode_tokens_per_s for sample in rounds] for name, rounds in samples.items()}
    engines: dict[str, Any] = {}
    for name, rounds in samples.items():
        engines[name] = {"first_token_s": median(firsts[name]), "decode_tokens_per_s": median(speeds[name]),
                         "first_token_s_rounds": firsts[name], "decode_tokens_per_s_rounds": speeds[name],
                         "noise_cores": [sample.noise_cores for sample in rounds]}
        if "jaxserve" in samples and name != "jaxserve":
            engines[name] |= {
                "jaxserve_first_token_ratio": report.median_ratio(firsts["jaxserve"], firsts[name]),
                "jaxserve_decode_ratio": report.median_ratio(speeds["jaxserve"], speeds[name]),
                "agreement": report.agreement([samples["jaxserve"][0].result.token_ids], [rounds[0].result.token_ids])}
    return engines


def _show(results: dict[str, Any], notes: list[str]) -> None:
    rows = []
    for name, engine in results["engines"].items():
        compared = "agreement" in engine
        rows.append([name, 1e3 * engine["first_token_s"], engine["decode_tokens_per_s"],
                     f"{engine['jaxserve_first_token_ratio']:.2f}x" if compared else "",
                     f"{engine['jaxserve_decode_ratio']:.2f}x" if compared else "",
                     f"{engine['agreement']['equal_tokens']:.1%}" if compared else "", max(engine["noise_cores"])])
    report.show(f"one request, {results['num_prompt_tokens']} prompt tokens, {results['num_new_tokens']} new tokens",
                ["engine", "first token, ms", "then tokens/s", "jaxserve's first token", "jaxserve's tokens/s",
                 "same tokens", "noise, cores"], rows, notes)


if __name__ == "__main__":
    main()
