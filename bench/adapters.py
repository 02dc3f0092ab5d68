"""The engines that are compared. To add one: a class with these methods, and a line in `BATCH` or `STREAM`."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from convert.packaged import packaged_smollm2
from convert.source import Source, TensorSource, open_source
from jaxserve import LLM, AsyncLLM, SamplingParams
from jaxserve.request import RequestOutputKind

Prompts = Sequence[list[int]]


_NOTHING_FOUND = {"enable_prefix_caching": False}
"""The warm-up has served the same prompts: what is measured would be found in the cache."""


class BatchEngine(Protocol):
    """Answers many prompts at once. Made with a checkpoint's path and the engine's own options."""

    def warm_up(self, prompts: Prompts, num_new_tokens: int) -> None:
        """Whatever an engine does only once, so that it is not measured."""

    def generate(self, prompts: Prompts, num_new_tokens: int) -> list[list[int]]:
        """Exactly `num_new_tokens` greedy tokens for each prompt, in order."""

    def close(self) -> None: ...


class StreamEngine(Protocol):
    """Answers one prompt, token by token."""

    def warm_up(self, prompts: Prompts, num_new_tokens: int) -> None: ...

    def stream(self, prompt: list[int], num_new_tokens: int) -> tuple[list[int], list[float]]:
        """The tokens, and when each was there: seconds since the call."""

    def close(self) -> None: ...


def open_model(path: str | None) -> Source:
    return open_source(packaged_smollm2() if path is None else path)


class Jaxserve:
    """Our own engine."""

    def __init__(self, model: str | None, **options: Any):
        self.llm = LLM(model, **(_NOTHING_FOUND | options))

    def warm_up(self, prompts: Prompts, num_new_tokens: int) -> None:
        self.generate(prompts, num_new_tokens)  # the same work once: it compiles just what it needs

    def generate(self, prompts: Prompts, num_new_tokens: int) -> list[list[int]]:
        outputs = self.llm.generate([list(prompt) for prompt in prompts], _greedy(num_new_tokens), use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    def memory(self) -> dict[str, int]:
        """Bytes of weights and of the KV cache."""
        runner = self.llm._serving.engine.runner
        return {"weights": sum(array.nbytes for array in runner.params().values()),
                "kv_cache": runner.blueprint.cache.num_bytes}

    def close(self) -> None:
        self.llm.close()


class JaxserveStream:
    """Our own engine as a server uses it: in its own thread, tokens through an async iterator."""

    def __init__(self, model: str | None, **options: Any):
        self._llm = AsyncLLM(model, **(_NOTHING_FOUND | options))

    def warm_up(self, prompts: Prompts, num_new_tokens: int) -> None:
        self.stream(prompts[0], num_new_tokens)

    def stream(self, prompt: list[int], num_new_tokens: int) -> tuple[list[int], list[float]]:
        return asyncio.run(self._stream(prompt, num_new_tokens))

    async def _stream(self, prompt: list[int], num_new_tokens: int) -> tuple[list[int], list[float]]:
        token_ids: list[int] = []
        times: list[float] = []
        start = time.perf_counter()
        async for output in self._llm.generate(prompt, _greedy(num_new_tokens, RequestOutputKind.DELTA)):
            new = output.outputs[0].token_ids
            token_ids += new
            times += [time.perf_counter() - start] * len(new)
        return token_ids, times

    def close(self) -> None:
        self._llm.shutdown()


def _greedy(num_new_tokens: int, kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_new_tokens, ignore_eos=True, output_kind=kind)


class Transformers:
    """transformers in float32 on all cores: one left-padded batch, or one prompt streamed."""

    def __init__(self, model: str | None, **options: Any):
        import torch

        torch.set_num_threads(os.cpu_count() or 1)
        self.torch = torch
        self.model = load_transformers(open_model(model))
        self._options = options

    def warm_up(self, prompts: Prompts, num_new_tokens: int) -> None:
        self.generate(prompts[:2], 4)

    def generate(self, prompts: Prompts, num_new_tokens: int) -> list[list[int]]:
        return self._generate(prompts, num_new_tokens)

    def stream(self, prompt: list[int], num_new_tokens: int) -> tuple[list[int], list[float]]:
        streamer = _Streamer()
        start = time.perf_counter()
        (token_ids,) = self._generate([prompt], num_new_tokens, streamer=streamer)
        return token_ids, [when - start for when in streamer.times[1:]]  # the first is the prompt itself

    def close(self) -> None:
        del self.model

    def _generate(self, prompts: Prompts, num_new_tokens: int, **options: Any) -> list[list[int]]:
        torch, longest = self.torch, max(map(len, prompts))
        input_ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            output = self.model.generate(input_ids, attention_mask=mask, do_sample=False, pad_token_id=0,
                                         eos_token_id=None, min_new_tokens=num_new_tokens,
                                         max_new_tokens=num_new_tokens, **self._options, **options)
        return output[:, longest:].tolist()


class TransformersContinuous(Transformers):
    """transformers' continuous batching, with as much cache as the work needs (left alone it takes most of the
    machine's memory) and our own budget of 512 tokens a step."""

    PAGE_SIZE = 32

    def generate(self, prompts: Prompts, num_new_tokens: int) -> list[list[int]]:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        pages = sum(-(-(len(prompt) + num_new_tokens) // self.PAGE_SIZE) for prompt in prompts)
        batching = ContinuousBatchingConfig(**{
            "page_size": self.PAGE_SIZE, "num_blocks": pages + 8, "max_batch_tokens": 512,
            "max_requests_per_batch": len(prompts), "allow_block_sharing": False} | self._options)
        greedy = GenerationConfig(max_new_tokens=num_new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        with self.torch.inference_mode():
            found = self.model.generate_batch([list(prompt) for prompt in prompts], generation_config=greedy,
                                              continuous_batching_config=batching)
        return [output.generated_tokens for output in found.values()]


class _Streamer:
    """Notes when `generate` hands over a token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...


def load_transformers(source: Source) -> Any:
    """The checkpoint as a float32 transformers model, through our own reader: transformers' GGUF reader is slow.

    Raises:
      TypeError: a checkpoint converted by `jaxserve convert`, which has no Hugging Face tensors any more.
    """
    import torch
    import transformers

    if not isinstance(source, TensorSource):
        raise TypeError(f"{source.name}: transformers cannot read a converted checkpoint; give its source")
    config = transformers.AutoConfig.for_model(**source.hf_config)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    weights = {name: torch.from_numpy(array.astype("float32", copy=False)) for name, array in source.tensors()}
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise TypeError(f"{source.name} does not fit transformers' model: missing {missing}, unexpected {unexpected}")
    return model.eval()


BATCH: Mapping[str, Callable[..., BatchEngine]] = {
    "jaxserve": Jaxserve,
    "transformers-static": Transformers,
    "transformers-cb": TransformersContinuous,
}
STREAM: Mapping[str, Callable[..., StreamEngine]] = {"jaxserve": JaxserveStream, "transformers": Transformers}


def names(known: Mapping[str, Any]) -> Callable[[str], list[str]]:
    """An argparse type: a comma-separated choice of engines."""
    def choose(text: str) -> list[str]:
        chosen = text.split(",")
        for name in chosen:
            if name not in known:
                raise ValueError(name)
        return chosen

    choose.__name__ = f"choice of {', '.join(known)}: value"
    return choose
