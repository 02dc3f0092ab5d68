"""An answer that comes piece by piece, from blocking code."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jaxserve.request import RequestMetrics, RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from rich.status import Status

    from jaxserve import AsyncLLM
    from jaxserve.cli.options import ModelOptions


# All but tab and newline: a model's escape sequences could do anything to a terminal.
_CONTROL_PICTURES = ({code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
                     | dict.fromkeys(range(0x7F, 0xA0), 0xFFFD))


@contextmanager
def streaming_llm(model: ModelOptions, first_prompt: Any = "") -> Iterator[AsyncLLM]:
    """A model that can stream; shows a spinner while it loads. Executables are loaded for the first prompt, if it is
    known."""
    if model.executables:  # before anything else is imported, be it only for the spinner
        from jaxserve.executables import ahead

        ahead.start(model.executables, ahead.tokens_in(str(first_prompt)))
    with spinner("loading jax") as loading:
        from jaxserve import AsyncLLM

        loading.update("loading the model")
        llm = AsyncLLM(**model.arguments())
    try:
        yield llm
    except KeyboardInterrupt:
        raise  # the engine's thread may be in a compilation, which nothing can end: `main` leaves at once
    except BaseException:
        llm.shutdown()
        raise
    llm.shutdown()


@dataclass
class Answer:
    """What there is of a streamed completion.

    Attributes:
      finish_reason: as in `CompletionOutput`; None while it goes on.
    """

    text: str = ""
    num_tokens: int = 0
    finish_reason: str | None = None
    metrics: RequestMetrics | None = None

    @property
    def speed(self) -> str:
        """Such as "64 tokens, 25.1 tokens/s, first token after 0.12 s"; the rate is of the tokens after the first."""
        parts = [f"{self.num_tokens} tokens"]
        if self.metrics is not None and self.metrics.first_token_time_s is not None:
            first, last = self.metrics.first_token_time_s, self.metrics.last_token_time_s
            if last is not None and last > first:
                parts.append(f"{(self.num_tokens - 1) / (last - first):.1f} tokens/s")
            parts.append(f"first token after {self.metrics.time_to_first_token_s:.2f} s")
        return ", ".join(parts)


def stream(llm: AsyncLLM, prompt: Any, params: SamplingParams, answer: Answer, on_text: Callable[[str], None]) -> None:
    """Generates one completion into `answer` and hands over its text as it comes.

    Raises:
      InvalidInputError: the prompt or a parameter is wrong.
      KeyboardInterrupt: Ctrl-C; the request is aborted, `answer` has what came before.
    """
    params = replace(params, output_kind=RequestOutputKind.DELTA)

    async def run() -> None:
        async with aclosing(llm.generate(prompt, params)) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                completion = output.outputs[0]
                answer.text += completion.text
                answer.num_tokens += len(completion.token_ids)
                answer.finish_reason, answer.metrics = completion.finish_reason, output.metrics
                on_text(completion.text)

    asyncio.run(run())


def spinner(text: str, *, shown: bool = True) -> Status:
    """Shows on stderr, if that is a terminal, that something is being waited for."""
    from rich.console import Console

    return Console(stderr=True, quiet=not (shown and sys.stderr.isatty())).status(text)


def write(text: str) -> None:
    """Prints a piece of a model's text at once; on a terminal with pictures of control characters in their place."""
    sys.stdout.write(text.translate(_CONTROL_PICTURES) if sys.stdout.isatty() else text)
    sys.stdout.flush()
