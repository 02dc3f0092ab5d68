"""SmolLM2 in float32 against transformers with the same weights: greedy tokens and prompt log-probabilities.

`python -m tests.real.parity [--num-prompts N] [--max-tokens M] [--generate]` prints the counts and
fails where they differ.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers

from convert.packaged import packaged_smollm2
from convert.source import TensorSource, open_source
from jaxserve import LLM, SamplingParams
from jaxserve.request import RequestOutput
from tests.tiny import reference_greedy

NEAR_TIE = 1e-3
"""Where transformers' own two largest logits are closer than this, either token is right."""
MAX_LOGPROB_DIFFERENCE = 2e-3

TEXTS = {
    "English": "The history of the bicycle begins with a two-wheeled, steerable, human-propelled machine of 1817. "
               "Riders pushed themselves along with their feet; pedals came later, and with them brakes, gears and "
               "tyres filled with air. Was it safe? Hardly: roads were rough, wheels were high, and a fall was a long "
               "way down. ",
    "Chinese": "自行车的历史可以追溯到十九世纪初。德国人德莱斯发明了一种两轮的木制车,骑车人用脚蹬地前进。"
               "后来有了踏板、链条和充气轮胎,自行车成为人们日常生活中重要的交通工具。"
               "今天,许多城市鼓励市民骑车出行,以减少污染。",
    "code": "def fibonacci(n: int) -> list[int]:\n    \"\"\"The first n numbers.\"\"\"\n    a, b = 0, 1\n"
            "    result = []\n"
            "    for _ in range(n):\n        result.append(a)\n        a, b = b, a + b\n    return result\n\n\n"
            "for (int i = 0; i < 10; ++i) { printf(\"%d\\n\", i * 1024); }\n",
    "emoji": "Party tonight 🎉🎊! Bring 🍕, 🍺 and your 👩‍💻 friends. We start at 8️⃣ sharp ⏰, no 🐕 please… "
             "¿qué tal? 😀😃😄 👍🏽 🇫🇷 ♥️ ",
}


@dataclass
class Parity:
    """What was found.

    Attributes:
      num_tied: prompts whose tokens differ first where transformers' two largest logits are nearly the same.
      wrong: the other differences, in words.
      worst_logprob: largest difference of a prompt token's log-probability.
    """

    num_prompts: int = 0
    num_prompt_tokens: int = 0
    num_equal: int = 0
    num_tied: int = 0
    num_logprobs: int = 0
    worst_logprob: float = 0.0
    wrong: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.wrong and self.worst_logprob < MAX_LOGPROB_DIFFERENCE


def make_prompts(encode: Any, count: int, longest: int = 700) -> list[list[int]]:
    """Token ids of all four kinds; lengths from 1 to `longest`, both among them."""
    rng = random.Random(0)
    lengths = [1, longest]
    lengths += [round(longest ** rng.random()) if i % 2 else rng.randint(1, longest) for i in range(count - 2)]
    prompts = []
    for i, length in enumerate(lengths[:count]):
        text = list(TEXTS.values())[i % len(TEXTS)]
        start = rng.randrange(len(text))
        ids = encode(text[start:] + text * (1 + 4 * length // len(text)))
        prompts.append(ids[:length])
        assert len(prompts[-1]) == length
    return prompts


def reference_model() -> Any:
    """LlamaForCausalLM with the weights that our own reader finds in the packaged file."""
    source = open_source(packaged_smollm2())
    assert isinstance(source, TensorSource)
    known = {key: value for key, value in source.hf_config.items() if key != "architectures"}
    config = transformers.LlamaConfig(**known)
    model = transformers.LlamaForCausalLM(config).eval()
    weights = {}
    for name, shape in source.names_and_shapes().items():
        array = np.empty(shape, np.float32)
        source.read(name, array)
        weights[name] = torch.from_numpy(array)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model


def our_outputs(prompts: Sequence[list[int]], max_tokens: int, **options: Any) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=0)
    with LLM(dtype="float32", **({"max_num_seqs": 16} | options)) as llm:
        return llm.generate(list(prompts), params, use_tqdm=sys.stderr.isatty())


def compare(model: Any, outputs: Sequence[RequestOutput], *, generates: bool = False) -> Parity:
    """Each output with one forward pass of transformers over prompt and output.

    The likeliest token at each position, given ours before it, is what greedy generation would have chosen: as long as
    all agree, the two texts are the same. `generates` lets transformers generate all the same, with its cache; slow.
    """
    parity = Parity()
    for output in outputs:
        prompt, ours = output.prompt_token_ids, output.outputs[0].token_ids
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ours])).logits[0]
        theirs = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        if generates:
            theirs = reference_greedy(model, prompt, len(ours))
        parity.num_prompts += 1
        parity.num_prompt_tokens += len(prompt)
        _compare_tokens(parity, ours, theirs, logits[len(prompt) - 1 :])
        _compare_logprobs(parity, output, logits[: len(prompt) - 1])
        if sys.stderr.isatty():
            print(f"\r{parity.num_prompts} of {len(outputs)} compared", end="", file=sys.stderr)
    return parity


def _compare_tokens(parity: Parity, ours: list[int], theirs: list[int], logits: torch.Tensor) -> None:
    first = next((i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
    if first is None:
        parity.num_equal += 1
        return
    best, second = torch.topk(logits[first], 2).values.tolist()
    if best - second < NEAR_TIE:
        parity.num_tied += 1
    else:
        parity.wrong.append(f"prompt {parity.num_prompts - 1}, token {first}: {ours[first]} instead of "
                            f"{theirs[first]}, whose logit is {best - second:.4f} above the next")


def _compare_logprobs(parity: Parity, output: RequestOutput, logits: torch.Tensor) -> None:
    prompt, entries = output.prompt_token_ids, output.prompt_logprobs
    assert entries is not None and len(entries) == len(prompt) and entries[0] is None
    if len(prompt) == 1:
        return
    expected = torch.log_softmax(logits, -1)[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
    pairs = zip(prompt[1:], entries[1:], strict=True)
    found = torch.tensor([entry[token_id].logprob for token_id, entry in pairs if entry])
    parity.num_logprobs += len(found)
    parity.worst_logprob = max(parity.worst_logprob, (found - expected).abs().max().item())


def run(num_prompts: int, max_tokens: int, longest: int = 700, *, generates: bool = False, **options: Any) -> Parity:
    from jaxserve.text import Tokenizer

    data = open_source(packaged_smollm2()).tokenizer()
    tokenizer = Tokenizer(data.backend, data.config)
    prompts = make_prompts(lambda text: tokenizer.encode(text, add_special_tokens=False), num_prompts, longest)
    start = time.monotonic()
    outputs = our_outputs(prompts, max_tokens, **options)
    ours_s = time.monotonic() - start
    assert all(len(output.outputs[0].token_ids) == max_tokens for output in outputs)
    parity = compare(reference_model(), outputs, generates=generates)
    print(f"{parity.num_prompts} prompts of {parity.num_prompt_tokens} tokens together, {max_tokens} greedy tokens "
          f"each: {parity.num_equal} equal, {parity.num_tied} differ at a near tie (under {NEAR_TIE}), "
          f"{len(parity.wrong)} wrong; "
          f"{parity.num_logprobs} prompt log-probabilities differ by at most {parity.worst_logprob:.1e} "
          f"(ours {ours_s:.0f} s, all {time.monotonic() - start:.0f} s)")
    for line in parity.wrong:
        print(line)
    return parity


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--generate", action="store_true", help="let transformers generate token by token; slow")
    arguments = parser.parse_args()
    return 0 if run(arguments.num_prompts, arguments.max_tokens, generates=arguments.generate).ok else 1


if __name__ == "__main__":
    sys.exit(main())
