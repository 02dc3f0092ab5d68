"""An engine that takes its programs from files: the same tokens, nothing compiled, and nothing wrong ever loaded."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM, SamplingParams, compat
from jaxserve.errors import ExecutablesError, InvalidInputError
from jaxserve.executables import ahead
from jaxserve.executables import load as executables_load
from jaxserve.executables.manifest import MANIFEST
from tests.executables.conftest import OPTIONS, PROGRAMS

PROMPTS = [[5, 6, 7], list(range(3, 23))]
PARAMS = [SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2),
          SamplingParams(temperature=1, seed=3, max_tokens=6, ignore_eos=True)]


def run(folder: Path, **options: Any) -> tuple[list[list[int]], LLM]:
    with LLM(str(folder), skip_tokenizer_init=True, compilation_cache_dir="", **options) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)], llm


@pytest.fixture(scope="session")
def expected(tiny_folder: Path) -> list[list[int]]:
    """As compiled in this process."""
    return run(tiny_folder, **OPTIONS)[0]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What has been given to XLA to load."""
    seen: list[bytes] = []
    load = compat.load_program

    def watched(content: bytes, devices: Any) -> compat.Loaded:
        seen.append(content)
        return load(content, devices)

    for module in (compat, executables_load):
        monkeypatch.setattr(module, "load_program", watched)
    return seen


def test_tokens_are_the_same_and_nothing_is_compiled(tiny_folder, compiled, expected, loaded, caplog) -> None:
    with caplog.at_level(logging.INFO, "jaxserve"):
        tokens, llm = run(tiny_folder, **OPTIONS, executables=str(compiled))
    assert tokens == expected
    assert len(loaded) == llm._engine.runner.programs.num_compiled == 4
    assert not [record for record in caplog.messages if record.startswith("compiled") or "not used" in record]


def test_nothing_is_imported_that_only_tracing_needs(tiny_folder: Path, compiled: Path) -> None:
    """flax alone takes a third of a second."""
    code = (f"import sys; from jaxserve import LLM; llm = LLM({str(tiny_folder)!r}, executables={str(compiled)!r}, "
            f"skip_tokenizer_init=True, **{OPTIONS}); llm.generate([[5, 6, 7]], use_tqdm=False); "
            "print({'flax', 'jaxserve.layers.attention'} & sys.modules.keys())")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "set()"


def test_program_for_a_first_prompt_is_begun_before_the_engine(tiny_folder, compiled, expected, loaded) -> None:
    ahead.start(compiled)
    tokens, llm = run(tiny_folder, **OPTIONS, executables=str(compiled))
    assert tokens == expected
    assert len(loaded) == llm._engine.runner.programs.num_compiled == 4  # none of them twice


def test_a_lone_prompt_does_not_wait_for_the_program_that_takes_several(tiny_folder, compiled, loaded) -> None:
    """Nor does it later, while that is loaded beside it."""
    prompts = [[5, 6, 7], list(range(3, 23)), [8, 9]]  # the second in two chunks, so that one sees the cache

    def one_by_one(llm: LLM) -> list[Any]:
        return [llm.generate([prompt], PARAMS[0], use_tqdm=False)[0].outputs[0] for prompt in prompts]

    with LLM(str(tiny_folder), skip_tokenizer_init=True, compilation_cache_dir="", **OPTIONS) as llm:
        expected = one_by_one(llm)
    with LLM(str(tiny_folder), skip_tokenizer_init=True, executables=str(compiled), **OPTIONS) as llm:
        programs = llm._engine.runner.programs
        first = llm.generate([prompts[0]], PARAMS[0], use_tqdm=False)[0].outputs[0]
        assert {bucket.name for bucket in programs.texts()} == {"lone-16", "decode-1"}
        got = one_by_one(llm)
        programs.wait()
        assert {bucket.name for bucket in programs.texts()} == {"lone-16", "decode-1", "mixed-16"}
    assert len(loaded) == 3
    for right, found in zip([expected[0], *expected], [first, *got], strict=True):
        assert found.token_ids == right.token_ids
        assert found.cumulative_logprob == pytest.approx(right.cumulative_logprob, abs=1e-4)


@pytest.mark.parametrize(("num_tokens", "sizes", "found"), [
    (1, "lone-64 lone-128 mixed-16 mixed-64 decode-1", "lone-64"), (65, "lone-128 lone-64 mixed-128", "lone-128"),
    (900, "lone-64 lone-128 mixed-16", "lone-128"), (60, "mixed-512 mixed-64 mixed-16 decode-64", "mixed-64"),
    (900, "mixed-64 mixed-256 odd lone-x", "mixed-256"), (5, "decode-8", None)])
def test_program_for_a_first_prompt(num_tokens: int, sizes: str, found: str | None) -> None:
    assert ahead.program_for_first_prompt(sizes.split(), num_tokens) == found


def test_options_that_nobody_gave_are_as_they_were(tiny_folder, compiled, expected, loaded) -> None:
    tokens, llm = run(tiny_folder, block_size=4, executables=str(compiled))
    assert tokens == expected and loaded
    config = llm._serving.config
    assert (config.max_model_len, config.max_num_seqs, config.max_num_batched_tokens) == (64, 2, 16)
    assert llm._engine.scheduler.pool.num_blocks == 33




def truncate(folder: Path, name: str = "mixed-16") -> None:
    file = folder / f"{name}.executable"
    file.write_bytes(file.read_bytes()[:-1])


def truncate_the_first(folder: Path) -> None:
    truncate(folder, "lone-16")


def flip_a_bit(folder: Path) -> None:
    file = folder / "mixed-16.executable"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


def swap(folder: Path) -> None:
    (folder / "decode-1.executable").rename(folder / "spare")
    (folder / "decode-2.executable").rename(folder / "decode-1.executable")
    (folder / "spare").rename(folder / "decode-2.executable")


def another_program(folder: Path) -> None:
    """Of the same length, which would run anything."""
    file = folder / "mixed-16.executable"
    file.write_bytes(b"\x80\x04cos\nsystem\n(S'false'\ntR.".ljust(file.stat().st_size))


def remove(folder: Path) -> None:
    (folder / "mixed-16.executable").unlink()


@pytest.mark.parametrize("damage", [truncate, truncate_the_first, flip_a_bit, swap, another_program, remove])
def test_a_file_that_was_not_compiled_never_loads(damage, tiny_folder, compiled, copied, expected, loaded,
                                                  caplog) -> None:
    damage(copied)
    good = {(compiled / f"{name}.executable").read_bytes() for name in PROGRAMS}
    tokens, _ = run(tiny_folder, **OPTIONS, executables=str(copied))
    assert tokens == expected  # compiled as usual
    assert len(loaded) == (2 if damage is swap else 3) and set(loaded) <= good
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 4 - len(loaded)
    assert all(".executable: " in line and "compiling" in line and "\n" not in line for line in warnings)


def edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edited(folder: Path) -> None:
        manifest = json.loads((folder / MANIFEST).read_text())
        change(manifest)
        (folder / MANIFEST).write_text(json.dumps(manifest))
    return edited


def in_fingerprint(part: str, **values: Any) -> Callable[[Path], None]:
    return edit(lambda manifest: manifest["fingerprint"][part].update(values))


@pytest.mark.parametrize(("change", "options", "said"), [
    (None, {"max_num_seqs": 4}, "max_num_seqs is 2 there, 4 here"),
    (None, {"max_num_batched_tokens": 32}, "max_num_batched_tokens is 16 there, 32 here"),
    (None, {"block_size": 8}, "block_size is 4 there, 8 here"),
    (None, {"num_gpu_blocks_override": 34}, "num_blocks is 33 there, 34 here"),
    (None, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype is 'auto' there, 'fp8' here"),
    (in_fingerprint("versions", jax="0.4.1"), {}, "jax is '0.4.1' there, "),
    (in_fingerprint("target", platform="gpu"), {}, "they are for the platform 'gpu', this is 'cpu'"),
    (in_fingerprint("target", processor="x"), {}, "processor is 'x' there, "),
    (None, {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 10_000}, "num_blocks is 33 there, "),
    (None, {"max_num_seqs": 64, "max_num_batched_tokens": None}, "with its options max_num_batched_tokens=16 is not"),
    (in_fingerprint("options", dtype="nope"), {"dtype": "auto"}, "with its options dtype='nope' is not allowed"),
    (in_fingerprint("mesh", tensor=2), {}, "tensor is 2 there, 1 here"),
    (in_fingerprint("model", num_layers=7), {}, "num_layers is 7 there, 2 here"),
    (in_fingerprint("sources", **{"jaxserve/runner/step.py": "0"}), {}, "changed since: jaxserve/runner/step.py"),
    (in_fingerprint("sources", gone="0"), {}, "changed since: gone"),
    (edit(lambda manifest: manifest["fingerprint"]["buckets"].remove("mixed-16")), {}, "no program for mixed-16"),
    (edit(lambda manifest: manifest["programs"].pop("decode-2")), {}, "not compiled yet: decode-2"),
    (edit(lambda manifest: manifest["fingerprint"].pop("sources")), {}, "the manifest has no sources"),
])
def test_what_differs_is_said_in_one_line(change, options, said, tiny_folder, copied, loaded, caplog) -> None:
    if change is not None:
        change(copied)
    tokens, _ = run(tiny_folder, **(OPTIONS | options), executables=str(copied))
    assert [len(token_ids) for token_ids in tokens] == [6, 6] and not loaded
    line, = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said in line and str(copied) in line and "\n" not in line


def test_the_same_memory_is_the_same_number_of_blocks(tiny_folder: Path, compiled: Path, loaded) -> None:
    """33 blocks, asked for in bytes."""
    with LLM(str(tiny_folder), skip_tokenizer_init=True, **OPTIONS) as llm:
        spec = llm._engine.runner.blueprint.cache
    memory = OPTIONS | dict(num_gpu_blocks_override=None, kv_cache_memory_bytes=spec.num_bytes)
    run(tiny_folder, **memory, executables=str(compiled))
    assert len(loaded) == 4


def test_a_compile_that_was_stopped_before_the_first_prompts_program(tiny_folder, copied, expected, loaded) -> None:
    edit(lambda manifest: manifest["programs"].pop("lone-16"))(copied)
    tokens, _ = run(tiny_folder, **OPTIONS, executables=str(copied))
    assert tokens == expected and len(loaded) == 3


def test_a_program_that_no_engine_asks_for(tiny_folder, copied, expected) -> None:
    shutil.copy(copied / "lone-16.executable", copied / "lone-8.executable")
    edit(lambda manifest: manifest["programs"].update({"lone-8": manifest["programs"]["lone-16"]}))(copied)
    ahead.start(copied, num_tokens=8)
    assert ahead.begun(copied) == "lone-8"
    tokens, _ = run(tiny_folder, **OPTIONS, executables=str(copied))
    assert tokens == expected


def test_no_folder_is_not_the_current_one(tiny_folder, copied, loaded, monkeypatch) -> None:
    monkeypatch.chdir(copied)
    with pytest.raises(InvalidInputError, match="executables=''"):
        run(tiny_folder, **OPTIONS, executables="")
    assert not loaded


def test_a_program_under_another_name_is_not_run(tiny_folder: Path, copied: Path, expected, caplog) -> None:
    """Files and entries swapped: digests agree, shapes do not."""
    swap(copied)
    manifest = json.loads((copied / MANIFEST).read_text())
    entries = manifest["programs"]
    entries["decode-1"], entries["decode-2"] = entries["decode-2"], entries["decode-1"]
    (copied / MANIFEST).write_text(json.dumps(manifest))
    tokens, _ = run(tiny_folder, **OPTIONS, executables=str(copied))
    assert tokens == expected and "is not the program decode-" in caplog.text


def test_a_folder_without_a_manifest_is_an_error(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ExecutablesError, match="no manifest"):
        run(tiny_folder, executables=str(tmp_path))
    with pytest.raises(ExecutablesError, match="no manifest"):
        run(tiny_folder, executables=str(tmp_path / "absent"))


@pytest.mark.parametrize("content", ["{ torn", pytest.param("[" * 100_000, id="deep"),
                                     "[]", "{}", '{"format": 99, "programs": {}, "fingerprint": {}}',
                                     '{"format": 1, "programs": {"a": {}}, "fingerprint": {"options": {}}}',
                                     '{"format": 1, "programs": {}, "fingerprint": {"options": 3}}',
                                     '{"format": 1, "programs": {}, "fingerprint": {"options": {"num_blocks": null}}}',
                                     '{"format": 1, "programs": {}, "fingerprint": {"buckets": 5, "options": '
                                     '{"num_blocks": 9}}}',
                                     '{"format": 1, "programs": {}, "params": {"a": [[1], "int5", [null]]}, '
                                     '"fingerprint": {"options": {"num_blocks": 9}}}'])
def test_a_broken_manifest_is_an_error(content: str, tiny_folder: Path, copied: Path) -> None:
    (copied / MANIFEST).write_text(content)
    with pytest.raises(ExecutablesError, match="cannot be read"):
        run(tiny_folder, executables=str(copied))


def test_programs_wait_for_another_model_in_vain(tiny_folder: Path, copied: Path, loaded, caplog, tmp_path) -> None:
    """Same options, another width."""
    other = Path(shutil.copytree(tiny_folder, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    assert config["rms_norm_eps"] != 1e-3
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    run(other, **OPTIONS, executables=str(copied))
    assert not loaded and "rms_norm_eps is" in caplog.text
