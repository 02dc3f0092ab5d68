"""The host's side of `SamplingState`: which requests need a row, and what stands in it. Numpy only, no jax."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from jaxserve.request import SamplingParams

MAX_COUNT = int(np.iinfo(np.int16).max)


def needs_row(params: SamplingParams) -> bool:
    """Whether the request's logits are changed by anything but temperature, min-p, top-k and top-p."""
    return bool(
        params.has_penalties
        or params.logit_bias
        or params.allowed_token_ids is not None
        or params.bad_words
        or params.min_tokens > 0
    )


def seed_words(seed: int) -> np.ndarray:
    """The low and the high 32 bits of a 64-bit seed (negative ones in two's complement), as int32 [2]."""
    return np.array([seed & (2**64 - 1)], np.uint64).view(np.dtype("<i4"))


def build_rows(
    params: SamplingParams,
    vocab_size: int,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    banned_ids: Iterable[int] = (),
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A slot's rows, for `state.set_row`: prompt mask bool [V], output counts int16 [V], bias float32 [V]."""
    prompt_mask = np.zeros(vocab_size, np.bool_)
    prompt_mask[np.asarray(prompt_ids, np.int64)] = True
    counts = np.bincount(np.asarray(output_ids, np.int64), minlength=vocab_size)
    output_counts = np.minimum(counts, MAX_COUNT).astype(np.int16)
    return prompt_mask, output_counts, build_bias(params, vocab_size, banned_ids)


def build_bias(params: SamplingParams, vocab_size: int, banned_ids: Iterable[int] = ()) -> np.ndarray:
    """What is added to the logits, float32 [V]: logit_bias, and -inf for all that may not be chosen."""
    bias = np.zeros(vocab_size, np.float32)
    for token_id, value in (params.logit_bias or {}).items():
        bias[token_id] = value
    if params.allowed_token_ids is not None:
        allowed = np.zeros(vocab_size, np.bool_)
        allowed[list(params.allowed_token_ids)] = True
        bias[~allowed] = -np.inf
    unbanned = bias.copy()
    bias[list(banned_ids)] = -np.inf
    # Bans that leave nothing to choose from give way: a token from the allowed ones must come out.
    return unbanned if np.isneginf(bias).all() else bias


def banned_ids(
    params: SamplingParams,
    output_ids: Sequence[int],
    num_output_tokens: int,
    end_ids: Iterable[int],
    bad_words_ids: Iterable[Sequence[int]] = (),
) -> set[int]:
    """Ids that the next token may not have: ends before `min_tokens`, and last tokens of bad words.

    Args:
      output_ids: tokens generated so far and known.
      num_output_tokens: tokens before the one to be chosen, with those in flight.
      end_ids: EOS and stop token ids.
      bad_words_ids: the bad words as token ids, each non-empty.
    """
    banned = set(end_ids) if num_output_tokens < params.min_tokens else set()
    for word in bad_words_ids:
        start = len(output_ids) - (len(word) - 1)
        if start >= 0 and list(output_ids[start:]) == list(word[:-1]):
            banned.add(word[-1])
    return banned
