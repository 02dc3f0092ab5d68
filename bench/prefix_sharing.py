"""What sharing prefixes saves: the same requests, all beginning with the same tokens, with prefix caching and without,
in one run. Seconds, prompt tokens computed, and the most KV memory held at once; the tokens generated must agree."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench import report
from jaxserve import LLM, SamplingParams
from jaxserve.runner.kv_cache import block_bytes
from jaxserve.scheduling.plan import StepPlan


@dataclass
class Used:
    """One run: what it took."""

    seconds: float = 0.0
    prompt_tokens: int = 0
    peak_blocks: int = 0
    peak_kv_megabytes: float = 0.0


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = _arguments(argv)
    draw = random.Random(0)
    found: dict[bool, tuple[Used, list[list[int]]]] = {}
    for caching in (False, True):
        with LLM(args.model, enable_prefix_caching=caching) as llm:
            vocab_size = llm._serving.model.vocab_size
            if not found:
                prefix = _tokens(draw, args.prefix_tokens, vocab_size)
                prompts = [prefix + _tokens(draw, args.own_tokens, vocab_size) for _ in range(args.num_requests)]
            llm.warmup()
            found[caching] = _serve(llm, prompts, args.new_tokens)
    if found[True][1] != found[False][1]:
        raise SystemExit("the tokens differ")
    without, shared = found[False][0], found[True][0]
    rows = [[name.replace("_", " "), getattr(without, name), getattr(shared, name),
             getattr(shared, name) / getattr(without, name)] for name in asdict(shared)]
    report.show(f"{args.num_requests} requests with {args.prefix_tokens} tokens in common, {args.own_tokens} of their "
                f"own, {args.new_tokens} new", ["", "alone", "shared", "ratio"], rows)
    return report.write_json(args.json, {"alone": asdict(without), "shared": asdict(shared)})


def _arguments(argv: Sequence[str] | None) -> Any:
    parser = report.parser("bench.prefix_sharing", __doc__)
    parser.add_argument("--num-requests", type=int, default=100)
    parser.add_argument("--prefix-tokens", type=int, default=512)
    parser.add_argument("--own-tokens", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=4)
    return parser.parse_args(argv)


def _tokens(draw: random.Random, count: int, vocab_size: int) -> list[int]:
    return [draw.randrange(vocab_size // 2, vocab_size) for _ in range(count)]


def _serve(llm: LLM, prompts: list[list[int]], new_tokens: int) -> tuple[Used, list[list[int]]]:
    scheduler, used = llm._serving.engine.scheduler, Used()
    schedule = scheduler.schedule

    def watched() -> StepPlan:
        plan = schedule()
        used.prompt_tokens += sum(chunk.num_tokens for chunk in plan.chunks)
        used.peak_blocks = max(used.peak_blocks, scheduler.pool.num_used)
        return plan

    scheduler.schedule = watched  # type: ignore[method-assign]
    start = time.monotonic()
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    used.seconds = time.monotonic() - start
    used.peak_kv_megabytes = used.peak_blocks * block_bytes(llm._engine.runner.blueprint.cache) / 1e6
    scheduler.schedule = schedule  # type: ignore[method-assign]
    return used, [output.outputs[0].token_ids for output in outputs]


if __name__ == "__main__":
    main()
