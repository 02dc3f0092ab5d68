"""Sends the requests and writes down when what came back."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

from jaxserve.errors import InvalidInputError, JaxserveError
from jaxserve.server.bench.prompts import Prompt

try:
    import aiohttp
except ImportError as error:
    raise JaxserveError("the benchmark needs aiohttp: pip install 'jaxserve[server]'") from error

ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


@dataclass
class Timeline:
    """One request, in seconds of one clock.

    Attributes:
      start: when it was sent, after it waited for `max_concurrency`.
      arrivals: when text came; several tokens that came together are one.
      end: when the answer was complete.
      num_prompt_tokens, num_output_tokens: as the server counts; without its count the output is taken to be a token an
        arrival.
      error: what kind of failure, None if the answer is complete.
    """

    start: float
    arrivals: list[float] = field(default_factory=list)
    end: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where requests go and what they carry.

    Attributes:
      base_url: up to, and without, /v1.
      backend: one of `ENDPOINTS`.
      endpoint: path, instead of the backend's.
      more: further fields of every request.
      timeout_s: of a request.
    """

    base_url: str
    backend: str = "openai"
    endpoint: str | None = None
    model: str | None = None
    api_key: str | None = None
    more: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 6 * 3600.0

    def __post_init__(self) -> None:
        if self.backend not in ENDPOINTS:
            raise InvalidInputError("backend", self.backend, f"one of {', '.join(ENDPOINTS)}")

    @property
    def url(self) -> str:
        return self.base_url.rstrip("/") + (self.endpoint or ENDPOINTS[self.backend])

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def body(self, prompt: Prompt) -> dict[str, Any]:
        chat = (self.endpoint or ENDPOINTS[self.backend]).endswith("/chat/completions")
        asked = {"messages": [{"role": "user", "content": prompt.text}]} if chat else {"prompt": prompt.text}
        return {"model": self.model, **asked, "max_tokens": prompt.max_tokens, "stream": True,
                "stream_options": {"include_usage": True}, **self.more}


async def measure(target: Target, prompts: Sequence[Prompt], send_at: Sequence[float], *,
                  max_concurrency: int | None = None, num_warmups: int = 0,
                  on_done: Callable[[], None] = lambda: None) -> list[Timeline]:
    """Sends every prompt at its time, counted from when the warm-ups are over.

    Args:
      max_concurrency: so many at most are under way; others wait here, which counts in no latency.
      num_warmups: so many of the first prompts are sent before, one after another.
      on_done: called after every request.

    Raises:
      JaxserveError: the server is not there, or refused a warm-up.
    """
    gate = asyncio.Semaphore(max_concurrency or max(len(prompts), 1))
    # No limit of connections: requests must not wait where nobody sees it.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=target.headers,
                                     timeout=aiohttp.ClientTimeout(total=target.timeout_s)) as session:
        if target.model is None:
            target = Target(**{**vars(target), "model": await _first_model(session, target)})
        for prompt in prompts[:num_warmups]:
            if (error := (await _ask(session, target, prompt)).error) is not None:
                raise JaxserveError(f"{target.url} does not answer: {error}")
        begin = time.perf_counter()

        async def ask(prompt: Prompt, at: float) -> Timeline:
            await asyncio.sleep(begin + at - time.perf_counter())
            async with gate:
                timeline = await _ask(session, target, prompt)
            on_done()
            return timeline

        return await asyncio.gather(*map(ask, prompts, send_at))


async def _first_model(session: aiohttp.ClientSession, target: Target) -> str:
    url = target.base_url.rstrip("/") + "/v1/models"
    try:
        async with session.get(url) as response:
            response.raise_for_status()
            found: str = (await response.json())["data"][0]["id"]
            return found
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
        raise JaxserveError(f"{url} names no model ({type(error).__name__}: {error})") from error


async def _ask(session: aiohttp.ClientSession, target: Target, prompt: Prompt) -> Timeline:
    """One request; a failure is written down, not raised."""
    timeline = Timeline(time.perf_counter())
    try:
        async with session.post(target.url, json=target.body(prompt)) as response:
            if response.status != 200:
                timeline.error = f"HTTP {response.status}: {_message(await response.text())}"
            else:
                await _read(events(response.content.iter_any()), timeline)
    except TimeoutError:
        timeline.error = "timeout"
    except (aiohttp.ClientError, OSError) as error:
        timeline.error = f"connection: {type(error).__name__}"
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        timeline.error = f"stream: {error}"
    timeline.end = timeline.end or time.perf_counter()
    return timeline


async def _read(stream: AsyncIterator[str], timeline: Timeline) -> None:
    """The events of an answer.

    Raises:
      ValueError: it holds an error, or no answer, or ends too early.
    """
    counted = False
    async for data in stream:
        now = time.perf_counter()
        if data == "[DONE]":
            timeline.end = now
            continue  # to where the connection can be used again
        event = json.loads(data)
        if "error" in event:
            _fail(str(event["error"].get("message", event["error"])))
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            if choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"):
                timeline.arrivals.append(now)
        if usage := event.get("usage"):
            counted = True
            timeline.num_prompt_tokens, timeline.num_output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    if not timeline.end:
        _fail("ended without [DONE]")
    if not timeline.arrivals:
        _fail("no text came")
    if not counted:
        timeline.num_output_tokens = len(timeline.arrivals)


def _fail(what: str) -> NoReturn:
    raise ValueError(what[:80])


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The data of server-sent events, however they are cut into chunks."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode()


def _message(body: str) -> str:
    """Of an error in the API's form, short enough to be counted by."""
    with suppress(ValueError, LookupError, TypeError):
        body = json.loads(body)["error"]["message"]
    return str(body)[:80]
