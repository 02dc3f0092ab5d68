"""A tiny random Llama with a byte-level tokenizer and a chat template, as a Hugging Face folder made on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = ["The quick brown fox jumps over the lazy dog. Numbers 0 1 2 3 4 5 6 7 8 9.\n",
          "def f(x):\n    return x + 1\n", "Ünïcödé, 日本語, 😀 emoji and (punctuation)!\n"] * 4
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
                 "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE with about 350 tokens; ids 0, 1, 2 are the special ones."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=350, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def make_tiny_model(folder: Path, *, spread: float = 0.3, **options: Any) -> Path:
    """Writes config, float32 safetensors and tokenizer.

    Args:
      spread: of the random weights; large enough that likeliest tokens stand out.
      options: of `transformers.LlamaConfig`.
    """
    backend = tiny_tokenizer()
    torch.manual_seed(0)
    sizes = {"vocab_size": backend.get_vocab_size(), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 0,
             "eos_token_id": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(sizes | options))).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, spread)
    model.save_pretrained(folder)
    save_tokenizer(folder, backend)
    return folder


def save_tokenizer(folder: Path, backend: Tokenizer, **config: Any) -> None:
    backend.save(str(folder / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<|endoftext|>",
               "chat_template": CHAT_TEMPLATE} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(content))


def reference_model(folder: Path) -> Any:
    """The same model in transformers."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def reference_greedy(model: Any, prompt_ids: list[int], num_new: int) -> list[int]:
    """transformers' greedy continuation, end tokens ignored."""
    with torch.no_grad():
        out = model.generate(torch.tensor([prompt_ids]), max_new_tokens=num_new, min_new_tokens=num_new,
                             do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[0, len(prompt_ids):].tolist()


def reference_logprobs(model: Any, token_ids: list[int]) -> torch.Tensor:
    """[T, V] log-probabilities after each token."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([token_ids])).logits[0].float(), dim=-1)
