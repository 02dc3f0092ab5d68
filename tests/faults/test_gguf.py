"""H20: rows of query and key weights in GGUF files, through the engine."""

import json
from typing import Any

import pytest
import transformers

from jaxserve import LLM, SamplingParams
from tests.convert.ggufs import write_gguf
from tests.tiny import make_tiny_model, reference_greedy, reference_logprobs, reference_model

OPTIONS: dict[str, Any] = dict(max_model_len=64, max_num_seqs=1, max_num_batched_tokens=16, block_size=4,
                               num_gpu_blocks_override=20, skip_tokenizer_init=True)
PROMPT = [5, 60, 7, 200, 11, 90, 33]


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (8, 2)])
def test_h20_a_gguf_answers_as_the_checkpoint_it_was_made_from(tmp_path, num_heads, num_kv_heads):
    folder = make_tiny_model(tmp_path, hidden_size=8 * num_heads, num_attention_heads=num_heads,
                             num_key_value_heads=num_kv_heads)
    model = reference_model(folder)
    weights = {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}
    config = transformers.AutoConfig.from_pretrained(folder)
    tokenizer = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [f"t{i}" for i in range(config.vocab_size)]}
    hf = json.loads((folder / "config.json").read_text())
    path = write_gguf(tmp_path / "model.gguf", weights, hf, extra=tokenizer)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3, prompt_logprobs=3)
    with LLM(str(path), **OPTIONS) as llm:
        output, = llm.generate(PROMPT, params, use_tqdm=False)
    completion = output.outputs[0]
    assert completion.token_ids == reference_greedy(model, PROMPT, 8)
    reference = reference_logprobs(model, PROMPT + completion.token_ids)
    assert output.prompt_logprobs is not None and completion.logprobs is not None
    for row, entry in zip(reference, [*output.prompt_logprobs[1:], *completion.logprobs], strict=False):
        assert entry is not None
        for token_id, found in entry.items():
            assert found.logprob == pytest.approx(row[token_id].item(), abs=1e-5)
