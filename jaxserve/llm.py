"""The blocking face of the engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxserve.beam_search import BeamSearchOutput, BeamSearchParams, beam_search
from jaxserve.engine import profiling
from jaxserve.engine.build import Serving, build
from jaxserve.engine.inputs import Message, Prompt, split_prompts
from jaxserve.engine.interrupts import interrupts_held
from jaxserve.errors import EngineDeadError, InvalidInputError
from jaxserve.request import RequestMetrics, RequestOutput, RequestOutputKind, SamplingParams
from jaxserve.runner.embedder import Pooling, check_pooling, vectors
from jaxserve.scheduling.report import MemoryReport


class LLM:
    """A model ready to generate, in this process. Arguments are named as vLLM's. Calls from several threads wait for
    each other; `AsyncLLM` serves many callers at once.

    Args:
      model: a Hugging Face folder, a GGUF file or a folder made by `jaxserve convert`; None: the packaged
        SmolLM2-135M-Instruct.
      tokenizer: folder of another tokenizer.
      skip_tokenizer_init: no tokenizer; prompts are token ids.
      options: see `EngineConfig` (max_model_len, max_num_seqs, dtype, mesh, tensor_parallel_size, ...).

    Raises:
      JaxserveError: what is wrong with model or options.
    """

    def __init__(self, model: str | None = None, *, tokenizer: str | None = None, skip_tokenizer_init: bool = False,
                 **options: Any):
        self._serving: Serving = build(model, tokenizer=tokenizer, skip_tokenizer_init=skip_tokenizer_init, **options)
        self._engine = self._serving.engine
        self._num_requests = 0
        self._lock = threading.RLock()
        self._closed = False

    def generate(self, prompts: Any, sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
                 use_tqdm: bool = True, priority: Sequence[int] | None = None) -> list[RequestOutput]:
        """Completes prompts.

        Args:
          prompts: one or many, each a text, token ids, or chat messages (see `chat`).
          sampling_params: one for all or one for each; None: the checkpoint's defaults.
          use_tqdm: show a progress bar.
          priority: of each prompt, lower first, with a scheduling policy that looks at it.

        Returns:
          One output per prompt, in their order. Where one of several prompts was not acceptable its output has no
          completions and carries the `error`; the others are answered.

        Raises:
          InvalidInputError: no prompt was acceptable, or the numbers of prompts and parameters differ.
        """
        return self._run(prompts, sampling_params, use_tqdm, priority, {})

    def chat(self, messages: Sequence[Message] | Sequence[Sequence[Message]],
             sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *, use_tqdm: bool = True,
             chat_template: str | None = None, add_generation_prompt: bool = True,
             continue_final_message: bool = False, tools: list[dict[str, Any]] | None = None,
             chat_template_kwargs: Mapping[str, Any] | None = None) -> list[RequestOutput]:
        """Answers one conversation or many; see `generate` and `text.chat.ChatTemplate.render`."""
        options = dict(chat_template_kwargs or {}, chat_template=chat_template, tools=tools,
                       add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message)
        return self._run(messages, sampling_params, use_tqdm, None, options)

    def beam_search(self, prompts: Any, params: BeamSearchParams) -> list[BeamSearchOutput]:
        """The likeliest continuations of each prompt that beam search finds, as vLLM's method of this name.

        Args:
          prompts: as for `generate`.

        Raises:
          InvalidInputError: a prompt or the parameters are not acceptable.
        """
        if not isinstance(params, BeamSearchParams):
            raise InvalidInputError("params", params, "BeamSearchParams")
        inputs, tokenizer = self._serving.inputs, self.get_tokenizer()
        items, _ = split_prompts(prompts)
        with self._lock:
            return beam_search(
                [inputs.token_ids(item, f"prompts[{index}]") for index, item in enumerate(items)], params,
                stop_ids=inputs.eos_token_ids, max_tokens=inputs.max_tokens,
                decode=tokenizer.decode if tokenizer is not None else lambda _: "",
                generate=lambda beams, one_token: self.generate(beams, one_token, use_tqdm=False))

    def memory_report(self) -> MemoryReport:
        """What the KV cache's blocks are used for at this moment."""
        with self._lock:
            return self._engine.memory_report()

    def embed(self, prompts: Any, *, pooling: Pooling = "last", normalize: bool = True) -> list[np.ndarray]:
        """An embedding for each prompt: the decoder's last hidden state of its last token, or the mean of all tokens'.

        Args:
          prompts: as for `generate`; at most `max_num_batched_tokens` tokens each.
          normalize: to length 1.

        Returns:
          float32 [hidden_size] for each, in order.

        Raises:
          InvalidInputError: what is wrong with a prompt; then none is computed.
        """
        check_pooling(pooling)
        given, is_one = split_prompts(prompts)
        with self._lock:
            self._check_open()
            embedder, token_ids = self._engine.embedder, []
            for index, prompt in enumerate(given):
                field = "prompt" if is_one else f"prompts[{index}]"
                token_ids.append(self._serving.inputs.token_ids(prompt, field)[0])
                embedder.check(token_ids[-1], field)
            return [vector for batch in embedder.batches(token_ids)
                    for vector in vectors(self._engine.embed(batch, pooling), batch, normalize=normalize)]

    def get_tokenizer(self) -> Any:
        """The model's tokenizer (None with skip_tokenizer_init)."""
        return self._serving.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation config suggests."""
        return self._serving.default_sampling

    def update_weights(self, params: Any) -> None:
        """Swaps in other weights between two steps, without compiling anything.

        Args:
          params: a pytree like the model's Flax module (the module, its nnx state, nested or dotted names), or a
            mapping by Hugging Face names. Arrays that have the right dtype and sharding are used as they are, not
            copied: do not donate them elsewhere while the engine lives.

        Raises:
          CheckpointError: listing what is missing, unexpected or misshapen; the old weights stay.
        """
        with self._lock:
            self._check_open()
            self._serving.update_weights(params)

    def warmup(self) -> float:
        """Compiles every program this engine can need; returns the seconds it took. Without it they are compiled
        when first needed."""
        return self._engine.runner.warm_up()

    def start_profile(self, directory: str = "profile") -> None:
        """Records what host and device do, until `stop_profile`, as a trace for xprof or Perfetto."""
        profiling.start(directory)

    def stop_profile(self) -> None:
        profiling.stop()

    def close(self) -> None:
        """Frees threads and device memory; the LLM can't be used afterwards."""
        with self._lock:
            self._closed = True
            self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, prompts: Any, sampling_params: Any, use_tqdm: bool, priority: Sequence[int] | None,
             chat_options: Mapping[str, Any]) -> list[RequestOutput]:
        with self._lock:
            return self._run_alone(prompts, sampling_params, use_tqdm, priority, chat_options)

    def _run_alone(self, prompts: Any, sampling_params: Any, use_tqdm: bool, priority: Sequence[int] | None,
                   chat_options: Mapping[str, Any]) -> list[RequestOutput]:
        self._check_open()
        items, _ = split_prompts(prompts)
        params = self._params_for(items, sampling_params)
        if priority is not None:
            priority = priority.tolist() if isinstance(priority, np.ndarray) else priority
            if not isinstance(priority, Sequence) or len(priority) != len(items):
                raise InvalidInputError("priority", priority, f"one for each of the {len(items)} prompts")
        outputs: dict[str, RequestOutput] = {}
        request_ids = []
        try:
            for index, (item, own) in enumerate(zip(items, params, strict=True)):
                request_id = str(self._num_requests)
                self._num_requests += 1
                request_ids.append(request_id)
                self._add(request_id, item, own, 0 if priority is None else priority[index], chat_options, outputs,
                          field="prompt" if len(items) == 1 else f"prompts[{index}]")
            self._raise_if_all_failed(outputs, request_ids)
            self._finish(outputs, len(request_ids), use_tqdm)
        except BaseException:  # Ctrl-C too: nothing of this call may stay in the engine
            with interrupts_held():
                for request_id in request_ids:
                    self._engine.abort(request_id)
                self._engine.drain()
            raise
        return [outputs[request_id] for request_id in request_ids]

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDeadError("the LLM was closed")

    def _params_for(self, items: list[Prompt], given: Any) -> list[SamplingParams]:
        if given is None:
            given = self._serving.default_sampling
        if isinstance(given, SamplingParams):
            given = [given] * len(items)
        if not isinstance(given, Sequence) or not all(isinstance(params, SamplingParams) for params in given):
            raise InvalidInputError("sampling_params", given, "SamplingParams, or a list of them")
        if len(given) != len(items):
            raise InvalidInputError("sampling_params", f"{len(given)} of them",
                                    f"one, or one for each of the {len(items)} prompts")
        return [replace(params, output_kind=RequestOutputKind.FINAL_ONLY) for params in given]

    def _add(self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int,
             chat_options: Mapping[str, Any], outputs: dict[str, RequestOutput], field: str) -> None:
        try:
            group, requests = self._serving.inputs.make(request_id, prompt, params, priority=priority, field=field,
                                                        chat_options=chat_options)
            with interrupts_held():
                self._engine.add(group, requests, bounded=False)
        except InvalidInputError as error:
            text = prompt if isinstance(prompt, str) else None
            outputs[request_id] = RequestOutput(request_id, text, [], [], finished=True, error=error,
                                                metrics=RequestMetrics(time.monotonic()))

    def _raise_if_all_failed(self, outputs: dict[str, RequestOutput], request_ids: list[str]) -> None:
        if request_ids and len(outputs) == len(request_ids):
            error = outputs[request_ids[0]].error
            assert error is not None
            raise error

    def _finish(self, outputs: dict[str, RequestOutput], total: int, use_tqdm: bool) -> None:
        """Steps until the outputs of all requests are there."""
        start, num_tokens = time.monotonic(), 0
        with tqdm(total=total, initial=len(outputs), desc="generate", unit="req", disable=not use_tqdm) as bar:
            while len(outputs) < total:
                with interrupts_held():
                    finished = self._engine.step()
                for output in finished:
                    outputs[output.request_id] = output
                    num_tokens += sum(len(completion.token_ids) for completion in output.outputs)
                    bar.set_postfix_str(f"{num_tokens / (time.monotonic() - start):.1f} tokens/s", refresh=False)
                    bar.update()


def generate(prompts: Any, model: str | None = None, sampling_params: Any = None, mesh: Any = None, *,
             use_tqdm: bool = False, **options: Any) -> list[RequestOutput]:
    """Loads a model, completes prompts with it and lets it go; see `LLM` and `LLM.generate`."""
    with LLM(model, mesh=mesh, **options) as llm:
        return llm.generate(prompts, sampling_params, use_tqdm=use_tqdm)
