"""The work that engines are compared on: English prompts of exact lengths, made the same way every time."""

from __future__ import annotations

import random
from dataclasses import dataclass

from jaxserve.text import Tokenizer

_SENTENCES = """
The river was low that summer, and the old bridge stood on legs of bare stone.
Anna counted the boats in the harbour twice, because the first time she had been laughing.
A good recipe for bread needs flour, water, salt, and more patience than most people bring to it.
When the train finally left the station, nobody on the platform waved.
The committee agreed that the report should be shorter and that its figures should be checked again.
Rain fell on the tin roof all night, and by morning the garden was a small lake.
Most of what we know about the deep sea was learned during the last fifty years.
He kept every letter in a wooden box under the stairs and never answered one of them.
To repair a clock you must first be willing to take it apart completely.
The price of copper rose by four percent in March and fell by six percent in April.
Our teacher used to say that a question is only stupid if you already know the answer.
Behind the market there is a narrow street where three brothers sell lamps.
The experiment was repeated with cold water, with warm water, and with no water at all.
She wrote the program in an afternoon and spent the next two weeks explaining it.
Some birds cross an ocean without landing, and they do it by night.
If you walk along the wall towards the north, you will see the tower after ten minutes.
The doctor listened for a long time before she said that nothing was broken.
In the mountains the shops close early, so buy your bread before noon.
Every village in the valley has its own way of making cheese, and its own opinion about the others.
The engine started at the third attempt and filled the yard with blue smoke.
It is easy to build a tall house and difficult to build a quiet one.
They painted the door green because green was the only paint that was left.
Two of the seven bridges were closed for repairs between May and October.
A child asked why the moon follows the car, and her father could not say.
""".strip().splitlines()


@dataclass(frozen=True)
class Workload:
    """Prompts as token ids; each is to be continued by exactly `num_new_tokens` tokens, greedily."""

    prompts: list[list[int]]
    num_new_tokens: int

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return len(self.prompts) * self.num_new_tokens


def batch(tokenizer: Tokenizer, *, num_requests: int = 32, shortest: int = 8, longest: int = 512,
          num_new_tokens: int = 64) -> Workload:
    """Many requests; prompt lengths grow geometrically and come in a mixed order. The defaults are 4,022 tokens."""
    lengths = [round(shortest * (longest / shortest) ** (i / max(num_requests - 1, 1))) for i in range(num_requests)]
    random.Random(0).shuffle(lengths)
    return Workload([prompt(tokenizer, length, seed) for seed, length in enumerate(lengths)], num_new_tokens)


def single(tokenizer: Tokenizer, *, length: int = 128, num_new_tokens: int = 64) -> Workload:
    """One request."""
    return Workload([prompt(tokenizer, length, seed=1000)], num_new_tokens)


def prompt(tokenizer: Tokenizer, length: int, seed: int) -> list[int]:
    """English text cut to exactly `length` tokens; another seed, another text."""
    order = random.Random(seed)
    token_ids: list[int] = []
    while len(token_ids) < length:
        text = " ".join(order.sample(_SENTENCES, len(_SENTENCES)))
        token_ids += tokenizer.encode(text if not token_ids else f"\n\n{text}", add_special_tokens=not token_ids)
    return token_ids[:length]
