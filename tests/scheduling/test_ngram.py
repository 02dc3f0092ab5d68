"""Guessing tokens by looking the last ones up."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import InvalidInputError
from jaxserve.request import Request, SamplingParams
from jaxserve.scheduling.ngram import NgramDrafter, SpeculativeConfig, look_up


def brute_force(tokens: list[int], least: int, longest: int, count: int) -> list[int]:
    for size in range(longest, least - 1, -1):
        places = [start for start in range(len(tokens) - size) if tokens[start : start + size] == tokens[-size:]]
        if count and len(tokens) > size and places:
            whole = [start for start in places if len(tokens[start + size :]) >= count]
            start = whole[-1] if whole else places[0]
            return tokens[start + size :][:count]
    return []


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 3), st.integers(0, 3), st.integers(0, 5))
def test_look_up(tokens: list[int], least: int, more: int, count: int) -> None:
    found = look_up(np.array(tokens, np.int32), least, least + more, count)
    assert found == brute_force(tokens, least, least + more, count)


def test_drafter_sees_tokens_that_came_while_it_was_not_asked() -> None:
    drafter = NgramDrafter(SpeculativeConfig(num_speculative_tokens=3))
    request = Request("a", [1, 2, 3, 4, 5, 1, 2], SamplingParams(), max_total_tokens=100)
    assert drafter.propose(request, 100) == [3, 4, 5]
    assert drafter.propose(request, 2) == [3, 4]
    for token_id in [9, 8, 7, 6, 9, 9, 3, 4]:
        request.append(token_id)
    assert drafter.propose(request, 100) == [5, 1, 2]
    request.append(77)
    assert drafter.propose(request, 100) == []


@pytest.mark.parametrize(("given_config", "said"), [
    ({"method": "eagle"}, "speculative_config.method='eagle'"),
    ({"num_speculative_tokens": 0}, "num_speculative_tokens=0"),
    ({"prompt_lookup_min": 5}, "prompt_lookup_min=5"),
    ({"model": "x"}, "speculative_config={'model': 'x'}"),
    (3, "speculative_config=3"),
])
def test_what_there_is_not(given_config: object, said: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        SpeculativeConfig.of(given_config)
    assert said in str(refused.value)
