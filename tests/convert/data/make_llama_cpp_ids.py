"""Writes llama_cpp_ids.json: what llama.cpp's tokenizer makes of our texts. Run by hand, where llama-cpp-python is.

    python make_llama_cpp_ids.py SmolLM2.gguf

The byte-level vocabulary is SmolLM2's throughout; for pre-tokenizers other than its own, llama.cpp is told another
name. The SentencePiece vocabulary is a small one made here, which the output carries along. The table in the repository
comes from llama-cpp-python 0.3.36.
"""

import itertools
import json
import sys
from pathlib import Path

from llama_cpp import Llama

HERE = Path(__file__).parent
PRES = ("smollm", "gpt-2", "llama-bpe", "qwen2", "default")
PIECES = [
    "▁t", "he", "▁the", "in", "▁in", "an", "▁an", "▁and", "er", "▁a", "▁b", "on", "re", "▁w", "or", "▁wor", "ld",
    "▁world", "ll", "▁h", "▁he", "▁hello", "lo", "▁H", "ello", "▁Hello", "▁▁", "▁▁▁▁", "20", "24", "▁2", "aa", "aaa",
    "aab", "éa", "日本", "ing", "▁thing", "th", "▁th", "er▁", "::", "==", "▁=", "();", "st", "▁st", "ri", "▁stri",
    "ng", "▁string",
]


def texts() -> list[str]:
    return json.loads((HERE / "texts.json").read_text(encoding="utf-8"))


def sentencepiece_vocab() -> dict:
    """Specials, bytes, pieces from best to worst score, single characters last: like a Llama 2 file."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3] + [6] * 256
    scores = [0.0] * len(tokens)
    letters = set("abcdefghijklmnopqrstuvwxyz.,!0123456789")
    characters = sorted({character for piece in PIECES for character in piece} | letters)
    for rank, piece in enumerate(itertools.chain(PIECES, characters)):
        if piece not in tokens:
            tokens.append(piece)
            types.append(1)
            scores.append(-float(rank))
    return {"tokens": [*tokens, "<|user|>", "<|end|>"], "token_type": [*types, 4, 3], "scores": [*scores, -1e3, -1e3]}


def write_gguf(path: str, vocab: dict, add_space_prefix: bool) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(vocab["tokens"]), writer.add_token_scores(vocab["scores"])
    writer.add_token_types(vocab["token_type"])
    writer.add_bos_token_id(1), writer.add_eos_token_id(2), writer.add_unk_token_id(0)
    writer.add_add_bos_token(True), writer.add_add_space_prefix(add_space_prefix)
    sizes = {"context_length": 64, "embedding_length": 8, "block_count": 1, "feed_forward_length": 8}
    for name, value in sizes.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_head_count(1), writer.add_layer_norm_rms_eps(1e-5), writer.add_rope_dimension_count(8)
    writer.add_vocab_size(len(vocab["tokens"]))
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()


def ids(model: Llama, *, add_bos: bool) -> list[list[int]]:
    return [model.tokenize(text.encode(), add_bos=add_bos, special=True) for text in texts()]


def main() -> None:
    found: dict = {"byte_level": {}, "sentencepiece": {"vocab": sentencepiece_vocab()}}
    for pre in PRES:
        model = Llama(sys.argv[1], vocab_only=True, verbose=False, kv_overrides={"tokenizer.ggml.pre": pre})
        found["byte_level"][pre] = ids(model, add_bos=False)
    for prefix in (True, False):
        write_gguf("/tmp/spm.gguf", found["sentencepiece"]["vocab"], prefix)
        model = Llama("/tmp/spm.gguf", vocab_only=True, verbose=False)
        found["sentencepiece"]["prefix" if prefix else "no_prefix"] = ids(model, add_bos=True)
    text = json.dumps(found, ensure_ascii=False, separators=(",", ":"))
    (HERE / "llama_cpp_ids.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
