"""OpenAI's client for JavaScript gets what the one for Python gets."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Running

SCRIPT = Path(__file__).parent / "openai_client.mjs"


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script beside an installed client."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("needs node and npm")
    folder = tmp_path_factory.mktemp("javascript")
    done = subprocess.run(["npm", "install", "openai@>=5", "--no-audit", "--no-fund", "--silent"], cwd=folder,
                          capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.skip(f"npm cannot install the client: {done.stderr[-200:]}")
    return Path(shutil.copy(SCRIPT, folder))


def test_every_endpoint(tiny: Running, script: Path) -> None:
    done = subprocess.run(["node", str(script), tiny.url], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    messages: Any = [{"role": "user", "content": "The quick"}]
    common: dict[str, Any] = dict(model="tiny", temperature=0, max_tokens=12)
    chat = tiny.ai.chat.completions.create(messages=messages, **common)
    text = tiny.ai.completions.create(prompt="The quick", **common).choices[0].text
    several = tiny.ai.chat.completions.create(messages=messages, **(common | dict(temperature=1, seed=3, n=3)))
    assert found["models"] == ["tiny"]
    assert found["chat"] == found["chatStream"] == chat.choices[0].message.content
    assert found["chatUsage"]["completion_tokens"] == found["chatStreamUsage"]["completion_tokens"] == 12
    assert found["chatLogprobs"] == 12
    assert found["text"] == found["textStream"] == text
    assert found["several"] == [choice.message.content for choice in several.choices]
    assert found["call"][0]["name"] == "pick" and json.loads(found["call"][0]["arguments"]) == {"x": 1}
    assert found["error"] == {"name": "BadRequestError", "status": 400, "param": "temperature"}
    tiny.settle()
