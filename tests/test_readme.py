"""The README's Python runs as it stands, one block after the other, on a tiny model in the packaged one's place."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")

PRELUDE = """\
import sys
from pathlib import Path
import convert.packaged
convert.packaged.packaged_smollm2 = lambda: Path(sys.argv[1])
"""


def test_python_blocks(tiny_folder: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    script = "\n".join([PRELUDE, *blocks])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
                                "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script, str(tiny_folder)], env=environment, cwd=tmp_path,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "loss " in done.stdout


def test_options_are_all_there() -> None:
    from dataclasses import fields

    from jaxserve import EngineConfig, SamplingParams

    table = README[README.index("## Engine options") : README.index("**KV memory.**")]
    assert {field.name for field in fields(EngineConfig)} <= set(re.findall(r"`(\w+)`", table))
    sampling = README[README.index("## Sampling") : README.index("## Several devices")]
    assert {field.name for field in fields(SamplingParams)} <= set(re.findall(r"`(\w+)`", sampling))


def test_files_of_the_reading_order_exist() -> None:
    order = README[README.index("## Reading the code") : README.index("`convert/` reads")]
    folder = Path()
    for name in re.findall(r"`([\w/.]+)`", order):
        path = Path(name) if "/" in name else folder / name
        assert (ROOT / path).exists(), path
        folder = path.parent


def test_commands_exist() -> None:
    from typer.testing import CliRunner

    from jaxserve.cli import app

    for command in set(re.findall(r"^    jaxserve (\w+)", README, re.MULTILINE)):
        assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0, command
