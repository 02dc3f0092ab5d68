"""The asynchronous face: the engine runs in a thread of its own, callers await their outputs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.engine import devices, profiling
from jaxserve.engine.build import Serving, build
from jaxserve.engine.inputs import Prompt
from jaxserve.engine.lane import Lane, settle
from jaxserve.engine.metrics import EngineSnapshot
from jaxserve.errors import EngineDeadError, InvalidInputError
from jaxserve.request import RequestOutput, RequestOutputKind, SamplingParams
from jaxserve.runner.embedder import Batch, Pooling, check_pooling, vectors
from jaxserve.scheduling.report import MemoryReport

logger = logging.getLogger(__name__)

T = TypeVar("T")


class AsyncLLM:
    """Many requests at once, each an async iterator of outputs. Arguments as for `LLM`.

    The engine's thread only ever runs what is put into its queue of commands, and steps while there is work. Usable
    from several event loops.
    """

    def __init__(self, model: str | None = None, *, tokenizer: str | None = None, skip_tokenizer_init: bool = False,
                 **options: Any):
        self._serving: Serving = build(model, tokenizer=tokenizer, skip_tokenizer_init=skip_tokenizer_init, **options)
        self._engine = self._serving.engine
        self._mailboxes: dict[str, _Mailbox] = {}
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._dead: EngineDeadError | None = None
        self._num_requests = 0
        self._embeddings, self._embedding_compiler = Lane("jaxserve-embed"), Lane("jaxserve-embed-compile")
        self._thread = threading.Thread(target=self._run, name="jaxserve-engine", daemon=True)
        self._thread.start()

    async def generate(self, prompt: Prompt, sampling_params: SamplingParams | None = None,
                       request_id: str | None = None, *, priority: int = 0, business_value: float = 0.0,
                       deadline_s: float | None = None,
                       chat_options: Mapping[str, Any] | None = None) -> AsyncIterator[RequestOutput]:
        """Completes one prompt; yields as tokens come, in the form of `sampling_params.output_kind`.

        Leaving the loop early (break, cancellation) aborts the request.

        Args:
          prompt: a text, token ids or chat messages.
          request_id: of the caller's choice; must not be in use.
          priority, business_value: with `scheduling_policy="priority"`, see `scheduling.policy`.
          deadline_s: seconds from now at which the request ends, finished or not.
          chat_options: for the chat template.

        Raises:
          InvalidInputError: at the first step of the iteration, before anything is queued.
          QueueFullError: as many requests wait as may.
          RequestTimeoutError: its deadline, or the queue's, has passed.
          EngineDeadError: the engine has failed.
        """
        stream = await self.add_request(
            prompt, sampling_params, request_id, priority=priority, business_value=business_value,
            deadline_s=deadline_s, chat_options=chat_options)
        async with contextlib.aclosing(stream):
            async for output in stream:
                yield output

    async def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None,
                          request_id: str | None = None, *, priority: int = 0, business_value: float = 0.0,
                          deadline_s: float | None = None, field: str = "prompt",
                          chat_options: Mapping[str, Any] | None = None) -> RequestStream:
        """`generate` in two steps: returns once the request is queued, or raises because it can't be. Its outputs come
        by iterating over the stream; who does not want them all must call its `aclose`.

        Args:
          field: what to call the prompt in errors.
        """
        if request_id is None:
            self._num_requests += 1
            request_id = f"request-{self._num_requests}"
        if request_id in self._mailboxes:
            raise InvalidInputError("request_id", request_id, "an id that is not in use")
        params = self._serving.default_sampling if sampling_params is None else sampling_params
        make = partial(self._serving.inputs.make, request_id, prompt, params, priority=priority, field=field,
                       business_value=business_value, deadline_s=deadline_s, chat_options=chat_options)
        # Tokenising a long text, or understanding a form, takes a while, in which the event loop should go on.
        takes_time = _is_long(prompt) or params.structured_outputs is not None
        group, requests = await asyncio.to_thread(make) if takes_time else make()
        if request_id in self._mailboxes:
            raise InvalidInputError("request_id", request_id, "an id that is not in use")
        mailbox = self._mailboxes[request_id] = _Mailbox(params.output_kind)
        stream = RequestStream(self, request_id, mailbox)
        try:
            await asyncio.wrap_future(self._submit(lambda: self._engine.add(group, requests)))
        except BaseException:
            await stream.aclose()
            raise
        return stream

    def _give_up(self, request_id: str) -> None:
        """Nobody reads a request any more. Its id is free once the engine has nothing more to say of it."""
        def command() -> None:
            self._engine.abort(request_id)
            self._mailboxes.pop(request_id, None)

        try:
            self._submit(command)
        except EngineDeadError:
            self._mailboxes.pop(request_id, None)

    async def abort(self, request_id: str) -> None:
        """Ends a request; its iterator yields once more, with finish_reason "abort". Unknown ids are ignored."""
        def command() -> None:
            output = self._engine.abort(request_id)
            if output is not None:
                self._deliver([output])

        await asyncio.wrap_future(self._submit(command))

    async def update_weights(self, params: Any) -> None:
        """See `LLM.update_weights`; running requests go on with the new weights."""
        await asyncio.wrap_future(self._submit(lambda: self._serving.update_weights(params)))

    async def warmup(self) -> float:
        """Compiles every program; returns the seconds it took."""
        return await asyncio.wrap_future(self._submit(self._engine.runner.warm_up))

    async def memory_report(self) -> MemoryReport:
        """What the KV cache's blocks are used for, between two steps."""
        return await asyncio.wrap_future(self._submit(self._engine.memory_report))

    async def encode(self, prompt: Prompt, *, add_special_tokens: bool = True, field: str = "prompt",
                     chat_options: Mapping[str, Any] | None = None) -> list[int]:
        """Token ids of a text or of chat messages; may be empty, and longer than the model can take.

        Raises:
          InvalidInputError: the prompt is neither, or there is no tokenizer.
        """
        encode = partial(self._serving.inputs.encode, prompt, field, add_special_tokens=add_special_tokens,
                         chat_options=chat_options or {})
        return await asyncio.to_thread(encode) if _is_long(prompt) else encode()

    def check_embedding(self, token_ids: Any, field: str = "prompt") -> list[int]:
        """Token ids of which `embed` can make an embedding.

        Raises:
          InvalidInputError: empty, out of range or too many.
        """
        ids, _ = self._serving.inputs.token_ids(token_ids, field)
        self._engine.embedder.check(ids, field)
        return ids

    async def embed(self, prompts: Sequence[list[int]], *, pooling: Pooling = "last",
                    normalize: bool = True) -> list[np.ndarray]:
        """See `LLM.embed`; of what `check_embedding` gave. A batch of them goes between two steps, with the weights of
        that moment; batches of several callers take turns. What has to be compiled holds up neither the steps nor
        batches of other sizes. A caller who is cancelled frees the turns that are left.

        Raises:
          EngineDeadError: the engine has failed or was shut down.
        """
        check_pooling(pooling)
        found: list[np.ndarray] = []
        embedder = self._engine.embedder
        for batch in embedder.batches(prompts):
            if not embedder.is_ready(batch):
                await self._embedding_compiler.run(partial(embedder.prepare, batch))
            found += await self._embeddings.run(partial(self._embed, batch, pooling, normalize=normalize))
        return found

    def _embed(self, batch: Batch, pooling: Pooling, *, normalize: bool) -> list[np.ndarray]:
        """One turn. It lasts until the device is done, so that no two batches go between the same two steps."""
        pooled = self._submit(lambda: self._engine.embed(batch, pooling)).result()
        return vectors(pooled, batch, normalize=normalize)

    @property
    def hidden_size(self) -> int:
        """Numbers of an embedding."""
        return self._serving.model.hidden_size

    def snapshot(self) -> EngineSnapshot:
        """What the engine does and has done; from any thread, without waiting for a step."""
        return self._engine.snapshot()

    def start_profile(self, directory: str = "profile") -> None:
        """See `LLM.start_profile`."""
        profiling.start(directory)

    def stop_profile(self) -> None:
        profiling.stop()

    def device_memory(self) -> dict[str, dict[str, int]]:
        """See `devices.memory`; of those of the mesh."""
        return devices.memory(self._engine.runner.mesh.devices.flat)

    def device_utilization(self) -> dict[str, float]:
        """See `devices.utilization`; of those of the mesh."""
        return devices.utilization(self._engine.runner.mesh.devices.flat)

    @property
    def config(self) -> EngineConfig:
        """The resolved options."""
        return self._serving.config

    @property
    def vocab_size(self) -> int:
        """Token ids below it are valid."""
        return self._serving.inputs.vocab_size

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its completion."""
        return self._serving.inputs.max_model_len

    @property
    def num_kv_blocks(self) -> int:
        """That sequences can use."""
        return self._engine.scheduler.pool.num_blocks - 1

    def get_tokenizer(self) -> Any:
        return self._serving.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        return self._serving.default_sampling

    @property
    def is_running(self) -> bool:
        return self._dead is None and not self._stopping

    def shutdown(self) -> None:
        """Aborts what runs and ends the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()
        for lane in (self._embedding_compiler, self._embeddings):
            lane.join()

    def _submit(self, function: Callable[[], T]) -> Future[T]:
        """Has the engine's thread run something between two steps."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # a caller who is cancelled stops waiting, but the command is still run
        with self._wake:
            if self._dead is not None:
                raise _again(self._dead)
            self._commands.append((function, future))
            self._wake.notify()
        return future

    def _run(self) -> None:
        """The engine's thread."""
        failure: BaseException | None = None
        try:
            while self._wait_for_work():
                self._run_commands()
                if self._engine.has_unfinished:
                    self._deliver(self._engine.step())
        except BaseException as error:
            logger.exception("the engine has failed")
            failure = error
        self._die(failure)

    def _run_commands(self) -> None:
        while self._commands:
            function, future = self._commands.popleft()
            settle(future, function)

    def _die(self, failure: BaseException | None) -> None:
        """Tells everybody who waits, and whoever comes later."""
        dead = EngineDeadError("the engine was shut down" if failure is None else
                               f"the engine has stopped after an error: {failure!r}")
        dead.__cause__ = failure
        with self._wake:
            self._dead = dead
        for _, future in self._commands:
            future.set_exception(dead)
        for lane in (self._embedding_compiler, self._embeddings):
            lane.end(partial(_again, dead))
        for mailbox in list(self._mailboxes.values()):
            mailbox.fail(dead)
        self._engine.close()

    def _wait_for_work(self) -> bool:
        with self._wake:
            while not (self._stopping or self._commands or self._engine.has_unfinished):
                self._wake.wait()
            return not self._stopping

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            mailbox = self._mailboxes.get(output.request_id)
            if mailbox is not None:
                mailbox.put(output)


class RequestStream:
    """The outputs of one request, in order; an async iterator for one reader."""

    def __init__(self, llm: AsyncLLM, request_id: str, mailbox: _Mailbox):
        self.request_id = request_id
        self._llm, self._mailbox = llm, mailbox
        self._taken: deque[RequestOutput] = deque()
        self._closed = False

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        """Raises what `AsyncLLM.generate` raises once the request is queued."""
        if self._closed:
            raise StopAsyncIteration
        try:
            if not self._taken:
                self._taken.extend(await self._mailbox.take())
        except BaseException:
            await self.aclose()
            raise
        output = self._taken.popleft()
        if output.finished:
            self._closed = True
            self._llm._mailboxes.pop(self.request_id, None)
            if output.error is not None:
                raise output.error
        return output

    async def aclose(self) -> None:
        """Aborts the request unless it has ended."""
        if not self._closed:
            self._closed = True
            self._llm._give_up(self.request_id)


class _Mailbox:
    """Outputs of one request on their way from the engine's thread to the event loop of its reader."""

    def __init__(self, kind: RequestOutputKind):
        self._replaces = kind is RequestOutputKind.CUMULATIVE
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._lock = threading.Lock()
        self._outputs: list[RequestOutput] = []
        self._error: EngineDeadError | None = None

    def put(self, output: RequestOutput) -> None:
        """Called by the engine's thread."""
        with self._lock:
            if self._replaces:  # a slow reader of cumulative outputs only needs the newest of each completion
                same = _indices(output)
                self._outputs = [waiting for waiting in self._outputs if _indices(waiting) != same]
            self._outputs.append(output)
        self._notify()

    def fail(self, error: EngineDeadError) -> None:
        """Called by the engine's thread."""
        self._error = error
        self._notify()

    async def take(self) -> list[RequestOutput]:
        """Waits for outputs; raises the engine's error once all outputs before it are taken."""
        while True:
            with self._lock:
                outputs, self._outputs = self._outputs, []
                self._ready.clear()
            if outputs:
                return outputs
            if self._error is not None:
                raise _again(self._error)
            await self._ready.wait()

    def _notify(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
            self._loop.call_soon_threadsafe(self._ready.set)


def _again(error: EngineDeadError) -> EngineDeadError:
    """A new one for each who is told: a shared exception would collect all their tracebacks."""
    new = EngineDeadError(*error.args)
    new.__cause__ = error.__cause__
    return new


def _is_long(prompt: Prompt) -> bool:
    """Whether turning it into tokens, or checking them, takes more than about a millisecond."""
    if isinstance(prompt, str):
        return len(prompt) > 4096
    if isinstance(prompt, Mapping):
        return any(_is_long(value) for value in prompt.values() if isinstance(value, str | Sequence))
    return isinstance(prompt, Sequence) and (len(prompt) > 16384 or any(
        _is_long(message.get("content") or "") for message in prompt if isinstance(message, Mapping)))


def _indices(output: RequestOutput) -> list[int]:
    return [completion.index for completion in output.outputs]
