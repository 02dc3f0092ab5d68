"""A stand-in for the model: the real engine, with real scheduler, tokenizer and outputs, emits token sequences that a
test chose."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from jaxserve import LLM, AsyncLLM, SamplingParams
from jaxserve.config import EngineConfig
from jaxserve.engine.build import Serving
from jaxserve.engine.engine import Engine
from jaxserve.engine.inputs import InputProcessor
from jaxserve.request import Request, RequestOutputKind
from jaxserve.runner.model_runner import Dispatched
from jaxserve.runner.state import StepOutputs
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.text import Tokenizer

EOS = "<|end|>"


def _byte_letters() -> dict[int, str]:
    """Byte -> the letter that stands for it in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


class Vocabulary:
    """A byte-level tokenizer whose tokens are the 256 bytes, `pieces` and an end token; prompts become bytes."""

    def __init__(self, pieces: Iterable[str | bytes]):
        letters = _byte_letters()
        raw = [bytes([byte]) for byte in range(256)]
        raw += [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
        self._ids = {piece: index for index, piece in enumerate(dict.fromkeys(raw))}
        vocab = {"".join(letters[byte] for byte in piece): index for piece, index in self._ids.items()}
        backend = Backend(models.BPE(vocab, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([EOS])
        self.tokenizer = Tokenizer(backend, {"eos_token": EOS})
        eos = self.tokenizer.eos_token_id
        assert eos is not None
        self.eos: int = eos

    def ids(self, *pieces: str | bytes) -> list[int]:
        """One id for each piece, which must be a token."""
        return [self._ids[piece.encode() if isinstance(piece, str) else piece] for piece in pieces]


class ScriptedRunner:
    """Emits, for a prompt whose first token is k, the tokens of `scripts[k]`, then the filler for ever."""

    def __init__(self, scripts: Mapping[int, Sequence[int]], filler: int):
        self._scripts, self._filler = scripts, filler
        self.num_dispatched = 0

    def dispatch(self, plan: StepPlan) -> Dispatched:
        self.num_dispatched += 1
        # A decode's own new token is counted as in flight already, and so is a chunk's that samples.
        token_ids = np.array([self._next(request) for request in plan.rows()], np.int32)
        return Dispatched(plan, StepOutputs(token_ids, None, None))  # type: ignore[arg-type]

    def is_compiled(self, plan: StepPlan) -> bool:
        return True

    def close(self) -> None:
        pass

    def _next(self, request: Request) -> int:
        script = self._scripts.get(request.prompt_token_ids[0], ())
        index = len(request.output_token_ids) + max(request.num_inflight - 1, 0)
        return script[index] if index < len(script) else self._filler


def scripted_serving(vocabulary: Vocabulary, scripts: Mapping[str, Sequence[int]], *, overlap: bool = True,
                     eos_token_ids: Iterable[int] | None = None, num_blocks: int = 200, max_num_seqs: int = 4,
                     max_model_len: int = 128) -> Serving:
    """An engine that answers a prompt beginning with the letter k with `scripts[k]`."""
    scheduler = Scheduler(num_blocks=num_blocks, block_size=4, max_num_seqs=max_num_seqs, max_num_batched_tokens=32,
                          max_blocks_per_seq=-(-(max_model_len + 1) // 4))
    by_token = {vocabulary.ids(letter)[0]: script for letter, script in scripts.items()}
    runner: Any = ScriptedRunner(by_token, vocabulary.ids("~")[0])
    engine = Engine(scheduler, runner, vocabulary.tokenizer, overlap=overlap)
    eos = [vocabulary.eos] if eos_token_ids is None else eos_token_ids
    inputs = InputProcessor(vocabulary.tokenizer, vocab_size=vocabulary.tokenizer.vocab_size, seed=0,
                            max_model_len=max_model_len, capacity_tokens=scheduler.capacity_tokens,
                            eos_token_ids=eos)
    model: Any = None
    return Serving(engine, inputs, vocabulary.tokenizer, model, EngineConfig(), SamplingParams())


@contextmanager
def scripted_llm(*args: Any, **options: Any) -> Iterator[LLM]:
    """`LLM` around `scripted_serving`."""
    with patch("jaxserve.llm.build", lambda *_, **__: scripted_serving(*args, **options)), LLM() as llm:
        yield llm
        scheduler = llm._engine.scheduler
        scheduler.check_integrity()
        assert not scheduler.has_requests and scheduler.pool.num_used == 0


def scripted_async_llm(*args: Any, **options: Any) -> AsyncLLM:
    """`AsyncLLM` around `scripted_serving`."""
    with patch("jaxserve.engine.async_llm.build", lambda *_, **__: scripted_serving(*args, **options)):
        return AsyncLLM()


@dataclass
class Answer:
    """What a caller has after a whole answer, however it came."""

    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    deltas: list[str]


async def stream(llm: AsyncLLM, prompt: Any, params: SamplingParams) -> Answer:
    """One request in deltas, put together."""
    outputs = [output.outputs[0] async for output in
               llm.generate(prompt, replace(params, output_kind=RequestOutputKind.DELTA))]
    assert all(output.finish_reason is None for output in outputs[:-1])
    return Answer("".join(output.text for output in outputs), [i for output in outputs for i in output.token_ids],
                  outputs[-1].finish_reason, outputs[-1].stop_reason, [output.text for output in outputs])


def answers(vocabulary: Vocabulary, scripts: Mapping[str, Sequence[int]], params: SamplingParams,
            **options: Any) -> list[Answer]:
    """The answers to the prompts `scripts`, all at once: the same whether they are streamed or not, and with steps
    overlapping or not."""
    found = []
    for overlap in (True, False):
        with scripted_llm(vocabulary, scripts, overlap=overlap, **options) as llm:
            outputs = [output.outputs[0] for output in llm.generate(list(scripts), params, use_tqdm=False)]
            found.append([Answer(o.text, o.token_ids, o.finish_reason, o.stop_reason, [o.text]) for o in outputs])
        found.append(asyncio.run(_streamed(vocabulary, scripts, params, overlap=overlap, **options)))
    for other in found:
        assert [replace(a, deltas=[]) for a in other] == [replace(a, deltas=[]) for a in found[0]]
    assert [a.deltas for a in found[1]] == [a.deltas for a in found[3]], "overlap changes what is streamed"
    return found[1]


async def _streamed(vocabulary: Vocabulary, scripts: Mapping[str, Sequence[int]], params: SamplingParams,
                    **options: Any) -> list[Answer]:
    llm = scripted_async_llm(vocabulary, scripts, **options)
    try:
        return await asyncio.gather(*(stream(llm, prompt, params) for prompt in scripts))
    finally:
        llm.shutdown()
