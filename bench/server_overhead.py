"""What HTTP costs: tokens per second of many streams through the server, against AsyncLLM's in the same process.

Both use one engine, in turn. The HTTP clients are a process of their own, and take their share of this machine's cores.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

from bench import report

NAMES = ["AsyncLLM", "HTTP"]
CLIENT = """\
import asyncio, json, sys

url, streams, prompt_tokens, max_tokens = sys.argv[1], *map(int, sys.argv[2:])
host, port = url.removeprefix("http://").split(":")

async def ask(index):
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"prompt": [10 + (index * 7 + i) % 200 for i in range(prompt_tokens)], "max_tokens": max_tokens,
                       "temperature": 0, "ignore_eos": True, "stream": True}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\\r\\nhost: x\\r\\ncontent-type: application/json\\r\\n"
                 b"connection: close\\r\\ncontent-length: %d\\r\\n\\r\\n" % len(body) + body)
    answer = await reader.read(-1)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200") and b'"finish_reason":"length"' in answer and b"[DONE]" in answer, answer

async def main():
    await asyncio.gather(*(ask(index) for index in range(streams)))

print("ready", flush=True)
sys.stdin.readline()
asyncio.run(main())
"""


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = _arguments(argv)
    from jaxserve import AsyncLLM

    llm = AsyncLLM(args.model, **({"max_num_seqs": args.streams} | dict(args.engine_options)))
    num_tokens = args.streams * args.max_tokens
    asyncio.run(llm.warmup())  # requests that come one after the other need more programs than all at once
    with _served(llm) as url:
        run = {"AsyncLLM": lambda: _direct(llm, args), "HTTP": lambda: _over_http(url, args)}
        for name in NAMES:
            run[name]()
        samples = report.in_turn(NAMES, args.repeat, lambda name: num_tokens / run[name]())
    llm.shutdown()
    speeds = {name: [sample.result for sample in samples[name]] for name in NAMES}
    ratio = report.median_ratio(speeds["HTTP"], speeds["AsyncLLM"])
    # The clients are other processes too, so noise says nothing here.
    report.show(f"{args.streams} streams of {args.max_tokens} tokens", ["", "tokens/s", "all rounds"],
                [[name, median(speeds[name]), " ".join(f"{speed:.0f}" for speed in speeds[name])] for name in NAMES],
                [f"HTTP / AsyncLLM: {ratio:.3f} (bar: 0.9)"])
    return report.write_json(args.json, {"tokens_per_s": speeds, "ratio": ratio, "streams": args.streams})


def _arguments(argv: Sequence[str] | None) -> Any:
    parser = report.parser("bench.server_overhead", __doc__)
    report.engine_options(parser)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    return parser.parse_args(argv)


@contextmanager
def _served(llm: Any) -> Iterator[str]:
    import uvicorn

    from jaxserve.server.app import create_app
    from jaxserve.server.settings import ServerSettings

    app = create_app(llm, ServerSettings(served_model_name=("model",), warmup=False))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, access_log=False))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


def _direct(llm: Any, args: Any) -> float:
    """Seconds that all streams take without HTTP."""
    from jaxserve import RequestOutputKind, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True,
                            output_kind=RequestOutputKind.DELTA)

    async def read(index: int) -> None:
        prompt = [10 + (index * 7 + i) % 200 for i in range(args.prompt_tokens)]
        async for _ in llm.generate(prompt, params):
            pass

    async def read_all() -> None:
        await asyncio.gather(*(read(index) for index in range(args.streams)))

    start = time.perf_counter()
    asyncio.run(read_all())
    return time.perf_counter() - start


def _over_http(url: str, args: Any) -> float:
    """Seconds that they take with it."""
    numbers = map(str, (args.streams, args.prompt_tokens, args.max_tokens))
    client = subprocess.Popen([sys.executable, "-c", CLIENT, url, *numbers], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True)
    assert client.stdin is not None and client.stdout is not None
    client.stdout.readline()
    start = time.perf_counter()
    client.stdin.write("go\n")
    client.stdin.flush()
    if client.wait():
        sys.exit("a client has failed")
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
