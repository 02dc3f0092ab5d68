"""From what the caller passes to requests that the engine can take; every check of user input that needs the model."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from jaxserve.config import check_finite, check_positive
from jaxserve.engine.outputs import RequestGroup
from jaxserve.errors import InvalidInputError, PromptTooLongError
from jaxserve.request import Request, RequestMetrics, SamplingParams
from jaxserve.structured_outputs import StructuredOutputsParams
from jaxserve.text import Tokenizer
from jaxserve.text.guides import Guide, Guides

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message] | Mapping[str, Any]
"""A text, token ids, chat messages, or vLLM's {"prompt": text} or {"prompt_token_ids": ids}."""


def split_prompts(prompts: Any) -> tuple[list[Prompt], bool]:
    """One prompt or a list of prompts -> the list, and whether it was a single one.

    Raises:
      InvalidInputError: neither.
    """
    prompts = _plain(prompts)
    if isinstance(prompts, (str, Mapping)) or _is_token_ids(prompts) or _is_messages(prompts):
        return [prompts], True
    if isinstance(prompts, Iterable):
        return list(prompts), False
    raise InvalidInputError("prompts", prompts, "a text, token ids, chat messages, or a list of these")


def _plain(value: Any) -> Any:
    """Arrays of numpy, JAX or torch as lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, Sequence) and len(value) > 0 and all(isinstance(item, (int, np.integer)) for item in value)


def _is_messages(value: Any) -> TypeGuard[Sequence[Message]]:
    return (isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
            and all(isinstance(item, Mapping) and "role" in item for item in value))


class InputProcessor:
    """Tokenises, checks and completes requests.

    Args:
      vocab_size: ids below it are valid; the model's, which may be larger than the tokenizer's.
      max_model_len: most tokens of a sequence.
      capacity_tokens: tokens that fit into the whole KV cache.
      eos_token_ids: what ends a text, by the checkpoint's generation config and tokenizer.
      seed: of the seeds drawn for requests that bring none.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, vocab_size: int, max_model_len: int, capacity_tokens: int,
                 eos_token_ids: Iterable[int], seed: int):
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._capacity_tokens = capacity_tokens
        self._eos_token_ids = frozenset(eos_token_ids)
        self._seeds = np.random.default_rng(seed)
        self._guides = None if tokenizer is None else Guides(tokenizer, vocab_size, self._eos_token_ids)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a text."""
        return self._eos_token_ids

    @property
    def vocab_size(self) -> int:
        """Ids below it are valid."""
        return self._vocab_size

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence."""
        return self._max_model_len

    @property
    def max_tokens(self) -> int:
        """Of a prompt and its completion, as they fit into context and cache."""
        return min(self._max_model_len, self._capacity_tokens)

    def encode(self, prompt: Prompt, field: str = "prompt", *, add_special_tokens: bool = True,
               chat_options: Mapping[str, Any] | None = None) -> list[int]:
        """Token ids of a text or of chat messages, whatever their number; raises as `make`."""
        if not isinstance(prompt, str) and not _is_messages(prompt):
            raise InvalidInputError(field, prompt, "a text or chat messages")
        return self._encode_text(prompt, field, chat_options or {}, add_special_tokens=add_special_tokens)[1]

    def token_ids(self, prompt: Prompt, field: str = "prompt") -> tuple[list[int], str | None]:
        """Of an acceptable prompt, and its cache_salt; raises as `make`."""
        prompt, cache_salt = _without_salt(prompt, field)
        _, token_ids = self._tokenise(prompt, field, {})
        self._check_prompt(token_ids, field)
        return token_ids, cache_salt

    def make(self, request_id: str, prompt: Prompt, params: SamplingParams, *, priority: int = 0,
             business_value: float = 0.0, deadline_s: float | None = None, arrival_time_s: float | None = None,
             field: str = "prompt",
             chat_options: Mapping[str, Any] | None = None) -> tuple[RequestGroup, list[Request]]:
        """A caller's request and its n sequences.

        Args:
          priority, business_value: see `scheduling.policy`.
          deadline_s: seconds from now at which it ends, finished or not.
          field: what to call the prompt in errors.
          chat_options: for the chat template, if the prompt is messages.

        Raises:
          InvalidInputError: what is wrong with prompt or parameters.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidInputError("sampling_params", params, "SamplingParams")
        if deadline_s is not None:
            check_positive("deadline_s", deadline_s)
        check_finite("priority", priority)
        check_finite("business_value", business_value)
        prompt, cache_salt = _without_salt(prompt, field)
        text, token_ids = self._tokenise(prompt, field, chat_options or {})
        self._check_prompt(token_ids, field)
        params.check_vocab(self._vocab_size)
        self._check_allowed(params)
        bad_words_ids = self._bad_words_ids(params)
        guide = self._guide(params)
        needs_text = params.stop or params.bad_words
        if self.tokenizer is None and needs_text:
            raise InvalidInputError("stop" if params.stop else "bad_words", needs_text, "none without a tokenizer")
        arrival = time.monotonic() if arrival_time_s is None else arrival_time_s
        group = RequestGroup(request_id, text, token_ids, params, RequestMetrics(arrival), deadline_s=deadline_s)
        requests = []
        for index in range(params.n):
            own = params.for_completion(index)
            seed = int(self._seeds.integers(2**63)) if own.seed is None else own.seed % 2**64
            requests.append(Request(
                f"{request_id}-{index}" if params.n > 1 else request_id, token_ids, own,
                self._max_total_tokens(len(token_ids), params), arrival, priority, business_value, seed,
                self._stop_ids(params), bad_words_ids, cache_salt=cache_salt,
                guide=None if guide is None else guide.copy(),
                needs_host_tokens=guide is not None or any(len(word) > 1 for word in bad_words_ids)))
        return group, requests

    def _tokenise(self, prompt: Prompt, field: str, chat_options: Mapping[str, Any]) -> tuple[str | None, list[int]]:
        prompt = _plain(prompt)
        if isinstance(prompt, Mapping):
            prompt = {key: _plain(value) for key, value in prompt.items()}
            known = {"prompt": str, "prompt_token_ids": Sequence}
            given = [key for key in known if prompt.get(key) is not None]
            if len(given) != 1 or not isinstance(prompt[given[0]], known[given[0]]):
                raise InvalidInputError(field, dict(prompt), '{"prompt": text} or {"prompt_token_ids": ids}')
            return self._tokenise(prompt[given[0]], f"{field}.{given[0]}", chat_options)
        if isinstance(prompt, str) or _is_messages(prompt):
            # Templates write special tokens themselves.
            return self._encode_text(prompt, field, chat_options, add_special_tokens=isinstance(prompt, str))
        is_list = isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray))
        if is_list and all(_is_id(item) for item in prompt):
            return None, [int(token_id) for token_id in prompt]  # type: ignore[arg-type]
        raise InvalidInputError(field, prompt, "a text, token ids (integers) or chat messages")

    def _encode_text(self, prompt: str | Sequence[Message], field: str, chat_options: Mapping[str, Any], *,
                     add_special_tokens: bool) -> tuple[str, list[int]]:
        """A text, or that of chat messages, and its tokens."""
        tokenizer = self._need_tokenizer(field, prompt)
        text = prompt if isinstance(prompt, str) else tokenizer.chat.render(prompt, **chat_options)
        self._check_length(tokenizer, text, field)
        return text, _encode(tokenizer, text, field, add_special_tokens=add_special_tokens)

    def _check_length(self, tokenizer: Tokenizer, text: str, field: str) -> None:
        """A text that can't but be too long is not tokenised: ten million characters take seconds, and gigabytes."""
        if len(text) > self._max_model_len and len(text) > (most := self._max_model_len * tokenizer.longest_token):
            raise PromptTooLongError(field, f"{len(text)} characters",
                                     f"at most {self._max_model_len} tokens (max_model_len), so {most} characters")

    def _need_tokenizer(self, field: str, prompt: Any) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidInputError(field, prompt, "token ids: this engine has no tokenizer")
        return self.tokenizer

    def _check_prompt(self, token_ids: Sequence[int], field: str) -> None:
        if not token_ids:
            raise InvalidInputError(field, token_ids, "at least one token")
        for token_id in token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise InvalidInputError(field, token_id, f"token ids from 0 to {self._vocab_size - 1}")
        for limit, name in ((self._max_model_len, "max_model_len"), (self._capacity_tokens, "the KV cache's tokens")):
            if len(token_ids) > limit:
                raise PromptTooLongError(field, f"{len(token_ids)} tokens", f"at most {limit} tokens ({name})")

    def _guide(self, params: SamplingParams) -> Guide | None:
        form = StructuredOutputsParams.of(params.structured_outputs)
        if form is None:
            return None
        if self._guides is None:
            raise InvalidInputError("structured_outputs", form, "none without a tokenizer")
        return self._guides.make(form)

    def _check_allowed(self, params: SamplingParams) -> None:
        """Something must be left to choose while `min_tokens` holds off the end."""
        allowed = params.allowed_token_ids
        if params.min_tokens and allowed is not None and self._stop_ids(params).issuperset(allowed):
            raise InvalidInputError("allowed_token_ids", allowed,
                                    f"some that do not end the text, with min_tokens={params.min_tokens}")

    def _max_total_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        # The last token of a sequence is only sampled, it takes no room: a prompt may fill all there is.
        limit = min(max(self._max_model_len, num_prompt_tokens + 1), self._capacity_tokens + 1)
        return limit if params.max_tokens is None else min(limit, num_prompt_tokens + params.max_tokens)

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        own = frozenset(params.stop_token_ids or ())
        return own if params.ignore_eos else own | self._eos_token_ids

    def _bad_words_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each word as it reads at the start of a text and after a space."""
        if self.tokenizer is None or not params.bad_words:
            return ()
        found: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            for text in (word, f" {word.lstrip()}"):
                token_ids = tuple(_encode(self.tokenizer, text, "bad_words", add_special_tokens=False))
                if token_ids:
                    found[token_ids] = None
        return tuple(found)


def _without_salt(prompt: Any, field: str) -> tuple[Any, str | None]:
    """vLLM's prompts may carry a "cache_salt": prefixes are shared only with requests that bring the same one."""
    if not isinstance(prompt, Mapping) or "cache_salt" not in prompt:
        return prompt, None
    salt = prompt["cache_salt"]
    if salt is not None and (not isinstance(salt, str) or not salt or not _is_unicode(salt)):
        raise InvalidInputError(f"{field}.cache_salt", salt, "valid Unicode text that is not empty, or None")
    return {key: value for key, value in prompt.items() if key != "cache_salt"}, salt


def _is_unicode(text: str) -> bool:
    """Whether it has no lone surrogates, which JSON can bring."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _encode(tokenizer: Tokenizer, text: str, field: str, *, add_special_tokens: bool) -> list[int]:
    if not _is_unicode(text):
        raise InvalidInputError(field, text, "valid Unicode (no lone surrogates)")
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def _is_id(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
