"""The compiled report on a tiny model: what it says against hand arithmetic."""

import json

import pytest

from bench import compiled_report

LAYERS, HIDDEN, MLP, HEADS, KV_HEADS, WIDTH, VOCAB = 3, 256, 512, 8, 2, 32, 512
HF = dict(architectures=["LlamaForCausalLM"], vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=MLP,
          num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=WIDTH,
          max_position_embeddings=1024)
BATCH, TOKENS, CONTEXT = 8, 64, 100

MATRICES = LAYERS * HIDDEN * (2 * HEADS * WIDTH + 2 * KV_HEADS * WIDTH + 3 * MLP) + VOCAB * HIDDEN
NORMS = (2 * LAYERS + 1) * HIDDEN
KV_ROW_BYTES = 2 * LAYERS * KV_HEADS * WIDTH * 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(HF))
    return folder


def report(folder, *options):
    return compiled_report.main([str(folder), "--batch", str(BATCH), "--tokens", str(TOKENS), "--context", str(CONTEXT),
                                 "--max-model-len", "256", *options])


def test_decode_and_mixed_step(folder, capsys):
    file = folder / "report.json"
    found = report(folder, "--outside", "--json", str(file))
    for kind, num_live_tokens in (("decode", BATCH * CONTEXT), ("mixed", (BATCH - 1) * CONTEXT + TOKENS - BATCH + 1)):
        step = found[kind]
        assert step["cache_copies"] == step["weight_copies"] == step["collectives"] == []
        assert len(step["kernels_per_layer"]) == LAYERS
        used = {path for launch in step["layer"] for path in launch["weights"]}
        assert used == {f"layers.1.{name}.weight" for name in (
            "input_norm", "attention.qkv", "attention.out", "post_attention_norm", "mlp.gate_up", "mlp.down")}
        assert step["weight_bytes"] == 2 * (MATRICES + NORMS)
        assert step["live_kv_bytes"] == num_live_tokens * KV_ROW_BYTES
        assert step["moved_bytes"] > step["weight_bytes"]
        assert step["argument_bytes"] == pytest.approx(step["argument_bytes_by_hand"], rel=0.02)
        products = [launch for launch in step["layer"] if launch["kind"] == "gemm" and launch["weights"]]
        rows = BATCH if kind == "decode" else TOKENS
        # qkv, out, gate_up, down: what they write
        assert [launch["written_bytes"] for launch in products] == [
            2 * rows * size for size in ((HEADS + 2 * KV_HEADS) * WIDTH, HIDDEN, 2 * MLP, HIDDEN)]
    printed = capsys.readouterr().out
    assert "copies of the cache: 0; of weights: 0" in printed
    assert f"decode step of {folder} on 1 x h200" in printed
    assert json.loads(file.read_text())["decode"] == json.loads(json.dumps(found["decode"]))


def test_two_devices(folder):
    step = report(folder, "--tensor-parallel-size", "2", "--steps", "decode")["decode"]
    in_layers = [collective for collective in step["collectives"] if collective["layer"] is not None]
    assert [(collective["name"], collective["layer"]) for collective in in_layers] == [
        ("kAllReduce", layer) for layer in range(LAYERS) for _ in range(2)]
    assert all(collective["bytes"] == BATCH * HIDDEN * 2 for collective in in_layers)
    assert step["weight_copies"] == step["cache_copies"] == []
    assert step["weight_bytes"] == MATRICES + 2 * NORMS  # matrices halved, norms whole
    assert step["argument_bytes"] == pytest.approx(step["argument_bytes_by_hand"], rel=0.02)


def test_copies_of_the_cache_are_found(folder, monkeypatch):
    """A step that may not have its state's memory."""
    from bench.compiled import lowering

    jit = lowering.jax.jit
    monkeypatch.setattr(lowering.jax, "jit", lambda function, *, donate_argnums, **options: jit(function, **options))
    step = report(folder, "--steps", "decode")["decode"]
    assert sorted(copy.split(": ")[1] for copy in step["cache_copies"]) == sorted(
        f"cache of layer {layer}, {array}" for layer in range(LAYERS) for array in ("keys", "values"))
    assert step["alias_bytes"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["no-such-model"], "model='no-such-model'.*Llama-3.1-8B"),
        (["qwen3-8b", "--target", "h300"], "target='h300'.*rtx4090"),
        (["qwen3-8b", "--batch", "64", "--tokens", "63"], "tokens=63.*batch=64"),
        (["qwen3-8b", "--context", "9000"], "context=9000.*max_model_len=8192"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(SystemExit, match=message):
        compiled_report.main(options)
