"""How much KV cache is held without holding a token, and that no sequence ever holds more than
ceil((tokens + 1) / block_size) blocks: checked after every step of a mixed run on a stubbed device."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench import report
from bench.stub import StubServing
from jaxserve.request import SamplingParams


@dataclass
class Held:
    """Sums over all steps and running sequences."""

    slots: int = 0
    tokens: int = 0
    sequences: int = 0
    worst: list[float] = field(default_factory=lambda: [0.0])

    @property
    def waste(self) -> float:
        return 1 - self.tokens / self.slots


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = _arguments(argv)
    serving = StubServing(args.model, max_num_seqs=args.num_seqs, max_num_batched_tokens=512, max_model_len=2048,
                          block_size=args.block_size, num_gpu_blocks_override=args.num_blocks)
    held, num_steps = _mixed_run(serving, args)
    scheduler, stats = serving.engine.scheduler, serving.engine.stats
    scheduler.check_integrity()
    assert scheduler.pool.num_used == 0, f"{scheduler.pool.num_used} blocks are still held"
    results = {
        "num_requests": args.num_requests, "block_size": args.block_size, "steps": num_steps, "waste": held.waste,
        "wasted_slots_per_sequence": (held.slots - held.tokens) / held.sequences, "worst_step_waste": max(held.worst),
        "preemptions": scheduler.num_preemptions, "aborted": stats.num_aborted, "finished": stats.num_finished,
        "blocks_held_at_end": scheduler.pool.num_used}
    report.show(f"KV blocks of {args.block_size} tokens, {args.num_requests} requests in {num_steps} steps",
                ["", "value"], [
                    ["waste, %", 100 * held.waste], ["slots without a token, per sequence",
                                                     results["wasted_slots_per_sequence"]],
                    ["waste in the worst step, %", 100 * results["worst_step_waste"]],
                    ["preemptions", scheduler.num_preemptions], ["aborted", stats.num_aborted],
                    ["blocks held at the end", scheduler.pool.num_used]],
                ["no sequence ever held more than ceil((tokens + 1) / block_size) blocks"])
    serving.engine.close()
    return report.write_json(args.json, results)


def _arguments(argv: Sequence[str] | None) -> Any:
    parser = report.parser("bench.kv_waste", __doc__)
    parser.add_argument("--num-requests", type=int, default=300)
    parser.add_argument("--num-seqs", type=int, default=32)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--num-blocks", type=int, default=400, help="few enough that some are preempted; default 400")
    return parser.parse_args(argv)


def _mixed_run(serving: StubServing, args: Any) -> tuple[Held, int]:
    """Requests of all lengths come while others run; some are stopped by a token, some aborted, some preempted."""
    draw = random.Random(0)
    engine, held, num_steps, num_added = serving.engine, Held(), 0, 0
    alive: list[str] = []
    while num_added < args.num_requests or engine.has_unfinished:
        if num_added < args.num_requests and draw.random() < 0.4:
            alive.append(_add(serving, draw))
            num_added += 1
        if alive and draw.random() < 0.01:
            engine.abort(alive.pop(draw.randrange(len(alive))))
        engine.step()
        num_steps += 1
        _check(serving, held)
    return held, num_steps


def _add(serving: StubServing, draw: random.Random) -> str:
    length = draw.choice([draw.randint(1, 20), draw.randint(20, 300), draw.randint(300, 700)])
    first, last = 100, serving.tokenizer.vocab_size - 1
    prompt = [draw.randint(min(first, last), last) for _ in range(length)]
    stops = [draw.randint(0, last) for _ in range(20)]
    return serving.add(prompt, SamplingParams(temperature=0.0, max_tokens=draw.randint(1, 200), stop_token_ids=stops))


def _check(serving: StubServing, held: Held) -> None:
    scheduler = serving.engine.scheduler
    scheduler.check_integrity()
    size, slots, tokens = scheduler.block_size, 0, 0
    for request in scheduler.running:
        most = -(-(request.num_tokens + 1) // size)
        assert len(request.block_ids) <= most, f"{len(request.block_ids)} blocks for {request.num_tokens} tokens"
        slots += size * len(request.block_ids)
        tokens += request.num_computed_tokens
    held.slots, held.tokens = held.slots + slots, held.tokens + tokens
    held.sequences += len(scheduler.running)
    if slots:
        held.worst.append(1 - tokens / slots)


if __name__ == "__main__":
    main()
