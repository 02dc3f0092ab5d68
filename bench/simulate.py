"""Serves a trace in virtual time, without a device: the real Scheduler and BlockPool, driven by a model of how long a
step takes on a card.

    python -m bench.simulate --trace sharegpt-like --rate 20 --target h200 --model llama-8b

The time of a step is a MODEL, NOT A MEASUREMENT: the roofline of its bytes and FLOPs on the card (planning.roofline),
divided by --efficiency (default 0.7), plus --step-overhead-ms (default 1). Both defaults are assumptions. What the
scheduler does (batches, blocks, preemptions, order) is real; seconds are as good as the model. Padding to the engine's
step shapes is counted, unless --no-padding.

A trace is "sharegpt-like" (log-normal lengths with ShareGPT's means of 161 prompt and 338 output tokens, as published
in arXiv:2309.06180), or a file: .jsonl with an object a line, or .csv with a header, fields arrival_s, prompt_tokens
and output_tokens. --rate replaces its arrival times by a Poisson process, or "inf": all at once.

--fit measures instead what a call of schedule() costs as more requests run or wait.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench import report
from bench.simulation.clock import Simulation
from bench.simulation.fit import fit
from bench.simulation.meters import PERCENTILES, summary
from bench.simulation.plot import check_plot, plot
from bench.simulation.step_time import StepTime, buckets_of, plan_card
from bench.simulation.trace import Trace, read_trace, sharegpt_like
from jaxserve.errors import InvalidInputError
from jaxserve.planning import Plan
from jaxserve.runner.blueprint import blocks_per_seq
from jaxserve.scheduling.scheduler import Scheduler

LATENCIES = {"queue": "queue_s", "first token": "first_token_s", "between tokens": "between_tokens_s",
             "end to end": "end_to_end_s", "schedule() call (real)": "schedule_s"}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.fit:
        return report.write_json(args.json, {"fit": fit()})
    try:
        if args.plot:
            check_plot(args.plot)
        trace = _trace(args)
        card = _card(args)
        simulation = _simulation(args, card, trace)
    except (ValueError, ImportError) as error:
        parser.error(str(error))
    start = time.monotonic(), time.process_time()
    with tqdm(total=len(trace), unit="request", disable=None) as bar:
        simulation.run(on_finish=bar.update)
    results = _results(args, card, simulation) | {
        "wall_s": time.monotonic() - start[0], "processor_s": time.process_time() - start[1]}
    _show(_title(args, card, len(trace)), results)
    if args.plot:
        plot(args.plot, simulation, _title(args, card, len(trace)))
    return report.write_json(args.json, results)


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench.simulate", description=(__doc__ or "").strip(),
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--trace", default="sharegpt-like", help="sharegpt-like, or a .jsonl or .csv file")
    made.add_argument("--rate", type=float, help="requests/s, or inf; default: a file's own arrival times, else inf")
    made.add_argument("--num-requests", type=int, help="default 10,000, or all of a file")
    made.add_argument("--shared-prefix", type=int, default=0, metavar="TOKENS", help="before each prompt, equal in all")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--model", default="llama-8b", help="a checkpoint, a config.json, or a name as for jaxserve plan")
    made.add_argument("--target", default="h200", help="card; default h200")
    made.add_argument("--tensor-parallel-size", type=int, default=1)
    made.add_argument("--quantization", help="of the weights: gptq, awq, int4 or fp8")
    made.add_argument("--kv-cache-dtype", default="auto")
    made.add_argument("--max-model-len", type=int)
    made.add_argument("--max-num-seqs", type=int, help="default 256")
    made.add_argument("--max-num-batched-tokens", type=int, help="default 8192")
    made.add_argument("--block-size", type=int, default=16)
    made.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    made.add_argument("--num-blocks", type=int, help="default: as many as the card holds beside the model")
    made.add_argument("--no-prefix-caching", action="store_true")
    made.add_argument("--efficiency", type=float, default=0.7, help="share of the roofline reached; an assumption")
    made.add_argument("--step-overhead-ms", type=float, default=1.0, help="of every step; an assumption")
    made.add_argument("--no-padding", action="store_true", help="steps of any size, not of the engine's few shapes")
    made.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    made.add_argument("--plot", type=Path, metavar="FILE.png", help="also draw them (needs matplotlib)")
    made.add_argument("--fit", action="store_true", help="measure schedule() instead")
    return made


def _trace(args: argparse.Namespace) -> Trace:
    if args.num_requests is not None and args.num_requests < 1:
        raise InvalidInputError("num_requests", args.num_requests, "at least 1")
    if args.trace == "sharegpt-like":
        trace = sharegpt_like(args.num_requests or 10_000, args.seed)
    else:
        trace = read_trace(Path(args.trace), args.num_requests)
    trace = trace.with_prefix(args.shared_prefix)
    return trace if args.rate is None else trace.at_rate(args.rate, args.seed)


def _card(args: argparse.Namespace) -> Plan:
    names = ("quantization", "kv_cache_dtype", "target", "tensor_parallel_size", "max_model_len", "max_num_seqs",
             "max_num_batched_tokens", "block_size", "gpu_memory_utilization")
    return plan_card(args.model, **{name: getattr(args, name) for name in names})


def _simulation(args: argparse.Namespace, card: Plan, trace: Trace) -> Simulation:
    config = card.config
    assert config.max_num_seqs and config.max_num_batched_tokens
    scheduler = Scheduler(
        num_blocks=card.num_blocks if args.num_blocks is None else args.num_blocks, block_size=config.block_size,
        max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens,
        max_blocks_per_seq=blocks_per_seq(config), enable_prefix_caching=not args.no_prefix_caching)
    trace.check(max_model_len=card.max_model_len, capacity_tokens=scheduler.capacity_tokens)
    step_time = StepTime(card.roofline, None if args.no_padding else buckets_of(card), args.efficiency,
                         args.step_overhead_ms / 1e3)
    return Simulation(scheduler, trace, step_time, max_num_seqs=config.max_num_seqs)


def _results(args: argparse.Namespace, card: Plan, simulation: Simulation) -> dict[str, Any]:
    scheduler, occupancy, trace = simulation.scheduler, simulation.occupancy, simulation.trace
    config = card.config
    virtual_s = simulation.now_s - float(trace.arrival_s[0])
    needed = int(trace.prompt_tokens.sum(dtype="int64") + trace.output_tokens.sum(dtype="int64")) - len(trace)
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()},
        "max_num_seqs": config.max_num_seqs, "max_num_batched_tokens": config.max_num_batched_tokens,
        "num_blocks": scheduler.pool.num_blocks, "block_size": config.block_size,
        "requests": simulation.num_finished, "steps": simulation.num_steps, "virtual_s": virtual_s,
        "requests_per_s": simulation.num_finished / virtual_s,
        "output_tokens_per_s": simulation.num_output_tokens / virtual_s,
        "output_tokens": simulation.num_output_tokens, "computed_tokens": simulation.num_computed_tokens,
        "computed_share": simulation.num_computed_tokens / needed,
        "latencies": {name: summary(getattr(simulation, attribute)) for name, attribute in LATENCIES.items()},
        "whole_run": occupancy.shares(occupancy.all), "saturated": occupancy.shares(occupancy.saturated),
        "waste": occupancy.waste, "preemptions": scheduler.num_preemptions,
        "schedule_processor_s": simulation.schedule_s.sum_s,
        "peak_rss_bytes": rss * (1 if sys.platform == "darwin" else 1024),
        "curve": occupancy.curve.columns(),
    }


def _title(args: argparse.Namespace, card: Plan, num_requests: int) -> str:
    rate = "its own arrival times" if args.rate is None and args.trace != "sharegpt-like" else (
        "all at once" if args.rate in (None, float("inf")) else f"{args.rate:g} requests/s")
    name = args.trace if args.trace == "sharegpt-like" else Path(args.trace).name
    return (f"{args.model} on {card.tensor_parallel_size} x {card.target.name}, {name}, {num_requests:,} requests, "
            f"{rate}, {card.config.max_num_seqs} sequences at most")


def _show(title: str, found: dict[str, Any]) -> None:
    report.show(title, ["seconds", "mean", *(f"p{percent}" for percent in PERCENTILES)],
                [[name, *("-" if value is None else f"{value:,.4g}" for value in row.values())]
                 for name, row in found["latencies"].items()])
    whole, saturated = found["whole_run"], found["saturated"]

    def percent(share: float | None) -> str:
        return "-" if share is None else f"{100 * share:.2f} %"

    report.show("utilisation over virtual time", ["", "whole run", "saturated"], [
        ["seconds", whole["seconds"], saturated["seconds"]],
        ["running sequences, of max_num_seqs", *(percent(share["batch_occupancy"]) for share in (whole, saturated))],
        [f"blocks in use, of {found['num_blocks'] - 1:,}",
         *(percent(share["block_utilisation"]) for share in (whole, saturated))],
        ["slots in held blocks without a token", percent(found["waste"]), ""]],
        ["saturated: requests wait for a slot or for blocks, not for the token budget"])
    report.show("totals", ["", "value"], [
        ["requests/s", found["requests_per_s"]], ["output tokens/s", found["output_tokens_per_s"]],
        ["steps", f"{found['steps']:,}"], ["preemptions", f"{found['preemptions']:,}"],
        ["tokens computed, of all", percent(found["computed_share"])],
        ["virtual seconds", found["virtual_s"]], ["real seconds", found["wall_s"]],
        ["processor seconds", found["processor_s"]], ["of those in schedule()", found["schedule_processor_s"]],
        ["peak memory, MB", f"{found['peak_rss_bytes'] / 1e6:,.0f}"]],
        [f"Times are a model's: roofline / {found['options']['efficiency']} + "
         f"{found['options']['step_overhead_ms']} ms a step; not measured on a card.",
         "Tokens computed: more than all after preemptions, fewer with shared prefixes."])


if __name__ == "__main__":
    main()
