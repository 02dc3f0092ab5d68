"""What all commands share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from jaxserve.cli import interrupt_again
from jaxserve.cli.options import ModelOptions, SamplingOptions, command
from jaxserve.errors import CheckpointError
from jaxserve.request import SamplingParams
from tests.cli.conftest import Run
from tests.tiny import make_tiny_model


def show(name: str, *, sampling: SamplingOptions, model: ModelOptions) -> None:
    """Shows
    itself."""
    print(name, model.arguments(), sampling.params(SamplingParams(top_k=7), packaged_model=model.model is None))


def call(*arguments: str):
    app = typer.Typer()
    app.command()(command(show))
    return CliRunner().invoke(app, arguments)


def test_a_mesh_is_a_tensor_parallel_size() -> None:
    for arguments in (["--mesh", "tensor=2"], ["--mesh", "tensor=2", "--tensor-parallel-size", "2"]):
        assert ModelOptions(mesh="tensor=2").arguments() == {"tensor_parallel_size": 2}
        assert "{'tensor_parallel_size': 2}" in call("x", *arguments).output
    for mesh in ("2", "tensor", "tensor=", "tensor=-1", "data=2", "tensor=3"):
        refused = call("x", "--mesh", mesh, "--tensor-parallel-size", "2")
        assert refused.exit_code == 2 and f"mesh={mesh!r}" in refused.output


def test_groups_become_options() -> None:
    result = call("x", "--model", "m", "--max-num-seqs", "3", "--temperature", "0", "--stop", "a", "--stop", "b")
    assert result.exit_code == 0, result.output
    params = SamplingParams(temperature=0.0, max_tokens=512, stop=["a", "b"], top_k=7)
    assert result.stdout.strip() == f"x {({'max_num_seqs': 3, 'model': 'm'})} {params}"


def test_packaged_model_is_sampled_as_its_card_says() -> None:
    for arguments, temperature in (([], 0.2), (["--temperature", "1.5"], 1.5)):
        params = SamplingParams(temperature=temperature, top_p=0.9, max_tokens=512, top_k=7)
        assert str(params) in call("x", *arguments).stdout


def test_wrong_value_is_one_line() -> None:
    result = call("x", "--top-p", "2")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "jaxserve: top_p=2.0 is not allowed: a number in (0, 1]\n"


def test_debug_adds_the_traceback() -> None:
    result = call("x", "--top-p", "2", "--debug")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr and "InvalidInputError" in result.stderr


@pytest.mark.parametrize(("error", "code"), [
    (CheckpointError("broken"), 2), (KeyboardInterrupt(), 130), (OSError(), 1)], ids=repr)
def test_exit_codes(error: BaseException, code: int) -> None:
    def fail() -> None:
        raise error

    app = typer.Typer()
    app.command()(command(fail))
    assert CliRunner().invoke(app, []).exit_code == code


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("say", ["print('x')", "from rich.console import Console; Console().print('x')"])
def test_stdout_that_nobody_reads(say: str) -> None:
    """As in `jaxserve plan ... | head -1`; 1 would say that the model does not fit."""
    code = (f"import typer\nfrom jaxserve.cli.options import command\ndef say() -> None:\n    {say}\n"
            "app = typer.Typer()\napp.command()(command(say))\napp([])")
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("arguments", [
    ["generate", "hi"], ["chat"], ["profile"], ["convert", "SRC", "DST"]], ids=lambda arguments: arguments[0])
def test_unknown_model(run: Run, tmp_path: Path, arguments: list[str]) -> None:
    missing = str(tmp_path / "missing")
    if arguments[0] == "convert":
        arguments = ["convert", missing, str(tmp_path / "new")]
    else:
        arguments = [*arguments, "--model", missing]
    result = run(*arguments)
    assert result.exit_code == 2
    assert missing in result.stderr and len(result.stderr.splitlines()) == 1


def test_lost_ctrl_c_comes_again() -> None:
    """As where JAX's callback of the garbage collector meets it."""
    lost: Any = SimpleNamespace(exc_type=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        interrupt_again(lost)
        time.sleep(10)


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_leaves_at_once(tmp_path: Path) -> None:
    """In the middle of a compilation or of an answer of 8,000 tokens."""
    folder = make_tiny_model(tmp_path, max_position_embeddings=8192)
    command = [sys.executable, "-m", "jaxserve", "generate", "hi", "-v", "--model", str(folder), "--ignore-eos",
               "--max-tokens", "8000"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("loaded"):
                break
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "interrupted" in stderr and "Traceback" not in stderr
