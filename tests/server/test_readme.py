"""The README's curl examples run as they stand, but for the address."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from tests.server.conftest import ROOT, Running

README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_curl_examples(tiny: Running) -> None:
    found = re.findall(r"^    (curl (?:.*\\\n)*.*)", README, re.MULTILINE)
    assert len(found) >= 4
    answers = []
    for command in found:
        assert "http://127.0.0.1:8000/" in command
        command = command.replace("http://127.0.0.1:8000", tiny.url)
        done = subprocess.run(["bash", "-c", f"{command} --silent --show-error --fail"], capture_output=True, text=True,
                              check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        answers.append(done.stdout)
    chat, stream, tokens, metrics = answers[:4]
    assert json.loads(chat)["choices"][0]["message"]["content"] is not None
    assert stream.endswith("data: [DONE]\n\n") and '"usage"' in stream
    assert json.loads(tokens)["count"] > 1 and "jaxserve:num_requests_running" in metrics


def test_flags_are_there() -> None:
    from typer.testing import CliRunner

    from jaxserve.cli import app

    section = README[README.index("## Server") : README.index("## Models")]
    shown = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["serve", "--help"]).stdout
    for flag in set(re.findall(r"`(--[a-z-]+)|^    jaxserve serve.* (--[a-z-]+)", section, re.MULTILINE)):
        name = flag[0] or flag[1]
        assert name in shown, name
