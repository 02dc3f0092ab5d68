"""When requests arrive and how long they are: drawn, or read from a file."""

from __future__ import annotations

import csv
import json
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from jaxserve.errors import InvalidInputError

FIELDS = ("arrival_s", "prompt_tokens", "output_tokens")
_FORMAT = f"a .jsonl file of objects, or a .csv file with a header, with the fields {', '.join(FIELDS)}"


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their arrival: 16 bytes each, so that millions fit.

    Attributes:
      arrival_s: float64 [requests], never falling.
      prompt_tokens, output_tokens: int32 [requests], at least 1 each.
      num_shared: tokens that every prompt begins with.
    """

    arrival_s: np.ndarray
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    num_shared: int = 0

    def __len__(self) -> int:
        return len(self.arrival_s)

    def at_rate(self, rate: float, seed: int) -> Trace:
        """The same requests as a Poisson process of `rate` requests/s; infinity: all at once."""
        if math.isnan(rate) or rate <= 0:
            raise InvalidInputError("rate", rate, "requests/s, above 0, or inf for all at once")
        gaps_s = np.random.default_rng([seed, 1]).exponential(1 / rate, len(self)) if rate < math.inf else 0.0
        return replace(self, arrival_s=np.cumsum(np.broadcast_to(gaps_s, len(self))))

    def with_prefix(self, num_shared: int) -> Trace:
        """The same requests with so many more tokens before each prompt, equal in all."""
        if not 0 <= num_shared < 2**30:
            raise InvalidInputError("shared_prefix", num_shared, "an integer, at least 0")
        return replace(self, prompt_tokens=self.prompt_tokens + np.int32(num_shared), num_shared=num_shared)

    def check(self, *, max_model_len: int, capacity_tokens: int) -> None:
        """Raises InvalidInputError for the first request that could never run."""
        total = self.prompt_tokens.astype(np.int64) + self.output_tokens
        most = min(max_model_len, capacity_tokens + 1)  # the last token is not written into the cache
        if (total > most).any():
            index = int(np.argmax(total > most))
            raise InvalidInputError(f"prompt_tokens + output_tokens of request {index}", int(total[index]),
                                    f"at most {most}: max_model_len is {max_model_len}, and the cache holds "
                                    f"{capacity_tokens}")


SHAREGPT_MEANS = (161.31, 337.99)
"""Prompt and output tokens."""

SHAREGPT_SIGMAS = (1.3, 0.9)
"""Our choice: standard deviations of the logarithms, so that most prompts are short and a few long."""

SHAREGPT_MOST = (1024, 1024)
"""Longer ones are cut, as benchmarks on this data set do; the means above are those after cutting."""


def sharegpt_like(num_requests: int, seed: int) -> Trace:
    """Lengths like those of conversations: log-normal, cut at `SHAREGPT_MOST`, with ShareGPT's mean lengths as
    published with PagedAttention (Kwon et al. 2023, arXiv:2309.06180, figure 11). All arrive at once."""
    if num_requests < 1:
        raise InvalidInputError("num_requests", num_requests, "at least 1")
    draws = np.random.default_rng([seed, 0])
    prompts, outputs = (_lognormal(draws, num_requests, *shape)
                        for shape in zip(SHAREGPT_MEANS, SHAREGPT_SIGMAS, SHAREGPT_MOST, strict=True))
    return Trace(np.zeros(num_requests), prompts, outputs)


def _lognormal(draws: np.random.Generator, count: int, mean: float, sigma: float, most: int) -> np.ndarray:
    """Integers from 1 to `most` whose mean is `mean` after they are cut."""
    low, high = 0.0, 2 * math.log(most)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _cut_mean(middle, sigma, most) < mean else (low, middle)
    return np.clip(np.rint(draws.lognormal(low, sigma, count)), 1, most).astype(np.int32)


def _cut_mean(mu: float, sigma: float, most: int) -> float:
    """Of min(X, most), where log X is normal."""
    below = NormalDist().cdf
    edge = (math.log(most) - mu) / sigma
    return math.exp(mu + sigma**2 / 2) * below(edge - sigma) + most * (1 - below(edge))


def read_trace(path: Path, num_requests: int | None = None) -> Trace:
    """Reads the first `num_requests` requests, or all; arrival times need not be in order.

    Raises:
      InvalidInputError: the file or one of its rows is not as it must be; the message names the row.
    """
    if not path.is_file():
        raise InvalidInputError("trace", str(path), f"sharegpt-like, or {_FORMAT}")
    columns: tuple[array[Any], ...] = (array("d"), array("i"), array("i"))
    for number, row in enumerate(_rows(path), start=1):
        for column, field in zip(columns, FIELDS, strict=True):
            column.append(_number(row, field, number, column.typecode == "i"))
        if number == num_requests:
            break
    arrival_s, prompts, outputs = (np.array(column) for column in columns)
    if not len(arrival_s):
        raise InvalidInputError("trace", str(path), "at least one request")
    order = np.argsort(arrival_s, kind="stable")
    return Trace(arrival_s[order], prompts[order].astype(np.int32), outputs[order].astype(np.int32))


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            yield from csv.DictReader(file)
        elif path.suffix == ".jsonl":
            for number, line in enumerate(file, start=1):
                if line.strip():
                    try:
                        yield json.loads(line)
                    except ValueError as error:
                        raise InvalidInputError(f"line {number} of trace", str(path), f"JSON ({error})") from error
        else:
            raise InvalidInputError("trace", str(path), f"sharegpt-like, or {_FORMAT}")


def _number(row: Any, field: str, number: int, is_count: bool) -> Any:
    """The field as a finite number of seconds, or as a count."""
    allowed = "an integer, at least 1" if is_count else "seconds, at least 0"
    name = f"{field} of request {number}"
    if not isinstance(row, dict) or row.get(field) is None:
        raise InvalidInputError(name, None, f"{allowed}; a trace is {_FORMAT}")
    try:
        value = float(row[field])
    except (TypeError, ValueError) as error:
        raise InvalidInputError(name, row[field], allowed) from error
    ok = 1 <= value < 2**31 and value == int(value) if is_count else 0 <= value < math.inf
    if not ok:
        raise InvalidInputError(name, row[field], allowed)
    return int(value) if is_count else value
