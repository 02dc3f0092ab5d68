"""What is asked and when."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.errors import InvalidInputError

# So common that most tokenizers have a token for each, with the space before it.
WORDS = (
    "time people way water day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night point home room mother area money story "
    "fact month lot right study book eye job word business issue side kind head house service friend father power hour "
    "game line end member law car city community name president team minute idea body information back parent face "
    "others level office door health person art war history party result change morning reason research girl moment "
    "air teacher force education ")

CHARS_PER_TOKEN = 4
"""Of English text, roughly. For lengths of answers where no tokenizer is given."""


@dataclass(frozen=True)
class Prompt:
    """
    Attributes:
      max_tokens: length of the answer that is asked for.
    """

    text: str
    max_tokens: int


def random_prompts(num_prompts: int, input_len: int, output_len: int, range_ratio: float = 0.0, prefix_len: int = 0,
                   seed: int = 0, num_tokens: Callable[[str], int] | None = None) -> list[Prompt]:
    """Common words in random order.

    Args:
      input_len, output_len: tokens of prompt and answer; a word counts as one.
      range_ratio: both are drawn evenly from (1 - ratio) to (1 + ratio) times the given length.
      prefix_len: so many words more at the beginning, the same in all prompts.
      num_tokens: counts a text's tokens, to keep to words that are one token. Default: all words are taken to be.
    """
    if not 0 <= range_ratio < 1:
        raise InvalidInputError("random_range_ratio", range_ratio, "0 or more, and below 1")
    numbers = random.Random(seed)
    one = num_tokens("a a") - num_tokens("a") if num_tokens else 1
    words = [word for word in WORDS.split() if num_tokens is None or num_tokens(f"a {word}") - num_tokens("a") == one]
    if not words:
        raise InvalidInputError("tokenizer", "given", "one for which some common English word is one token")

    def length(mean: int) -> int:
        return numbers.randint(max(1, math.floor(mean * (1 - range_ratio))), math.ceil(mean * (1 + range_ratio)))

    prefix = numbers.choices(words, k=prefix_len)
    return [Prompt(" ".join(prefix + numbers.choices(words, k=length(input_len))), length(output_len))
            for _ in range(num_prompts)]


def file_prompts(path: Path, num_prompts: int, output_len: int | None = None, seed: int = 0,
                 num_tokens: Callable[[str], int] | None = None) -> list[Prompt]:
    """Prompts of a file, in random order, again from the start if there are too few.

    Args:
      path: ShareGPT (a JSON list of {"conversations": [{"value": ...}, ...]}: the first two turns are prompt and
        answer), JSON lines ({"prompt": ..., "output_tokens": ...}) or text, a line a prompt.
      output_len: tokens of the answers. Default: as the file's answers are long, else 128.
      num_tokens: counts a text's tokens. Default: a quarter of its characters.

    Raises:
      InvalidInputError: the file cannot be read or holds no prompt.
    """
    count = num_tokens or (lambda text: max(1, len(text) // CHARS_PER_TOKEN))
    try:
        found = list(_read(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInputError("dataset_path", str(path), f"a file of prompts ({type(error).__name__}: {error})"
                                ) from error
    if not found:
        raise InvalidInputError("dataset_path", str(path), "a file that holds prompts")
    random.Random(seed).shuffle(found)
    asked = [found[index % len(found)] for index in range(num_prompts)]
    return [Prompt(text, output_len or (count(answer) if isinstance(answer, str) else answer or 128))
            for text, answer in asked]


def _read(text: str) -> Iterator[tuple[str, str | int | None]]:
    """(prompt, answer, or its length, or nothing)."""
    if text.lstrip().startswith("["):
        for entry in json.loads(text):
            turns: Sequence[Any] = entry.get("conversations", entry.get("conversation", ()))
            if len(turns) >= 2:
                yield turns[0]["value"], turns[1]["value"]
        return
    for line in text.splitlines():
        if line.startswith("{"):
            entry = json.loads(line)
            yield entry["prompt"], entry.get("output_tokens")
        elif line.strip():
            yield line, None


def arrivals(num_requests: int, request_rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Seconds from the start at which requests are sent.

    Args:
      request_rate: a second, on average; inf: all at once.
      burstiness: shape of the gamma distribution of the time between two: 1 is a Poisson process, less comes in bursts,
        more is more even.
    """
    for name, value in (("request_rate", request_rate), ("burstiness", burstiness)):
        if not value > 0:
            raise InvalidInputError(name, value, "above 0")
    if math.isinf(request_rate):
        return [0.0] * num_requests
    numbers, times = random.Random(seed), [0.0]
    while len(times) < num_requests:
        times.append(times[-1] + numbers.gammavariate(burstiness, 1 / (request_rate * burstiness)))
    return times[:num_requests]
