"""Which package may import which. What breaks a rule here would make one part impossible to read or use alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

FORBIDDEN = {
    "jaxserve/text": ("jax", "jaxlib", "flax"),
    "jaxserve/scheduling": ("jax", "jaxlib", "flax"),
    "jaxserve/models": ("jaxserve.engine", "jaxserve.runner"),
    "jaxserve/layers": ("jaxserve.engine", "jaxserve.runner"),
    "pallas_kernels": ("jaxserve", "convert"),
    "jaxserve/server": (  # reaches the engine only through AsyncLLM; `inputs` and `metrics` are types of its interface
        "jax", "jaxlib", "flax", "convert", "jaxserve.runner", "jaxserve.models", "jaxserve.layers",
        "jaxserve.scheduling", "jaxserve.sampling", "jaxserve.llm", "jaxserve.engine.engine", "jaxserve.engine.build",
        "jaxserve.engine.outputs"),
}
WEB = ("fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client", "opentelemetry", "ray")
"""Only the server knows these."""


def imports(source: str, package: str) -> Iterator[str]:
    """Everything that a module imports, inside functions too: modules, and names taken from them.

    Args:
      package: dotted name of the module's package, where relative imports start.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_no_forbidden_import(folder: str) -> None:
    files = list((ROOT / folder).rglob("*.py"))
    assert files, folder
    for file in files:
        package = ".".join(file.relative_to(ROOT).parent.parts)
        for name in imports(file.read_text(encoding="utf-8"), package):
            broken = [rule for rule in FORBIDDEN[folder] if name == rule or name.startswith(f"{rule}.")]
            assert not broken, f"{file.relative_to(ROOT)} imports {name}"


def test_only_the_server_knows_the_web() -> None:
    files = [file for file in (ROOT / "jaxserve").rglob("*.py") if ROOT / "jaxserve" / "server" not in file.parents]
    assert files
    for file in files:
        found = {name.split(".")[0] for name in imports(file.read_text(encoding="utf-8"), "jaxserve")}
        assert not found & set(WEB), file


def test_relative_imports_are_resolved() -> None:
    source = "from ..runner import step\nfrom . import cache\nfrom .norm import RMSNorm\nimport jax.numpy as jnp"
    assert set(imports(source, "jaxserve.layers")) == {
        "jaxserve.runner", "jaxserve.runner.step", "jaxserve.layers", "jaxserve.layers.cache", "jaxserve.layers.norm",
        "jaxserve.layers.norm.RMSNorm", "jax.numpy"}


@pytest.mark.parametrize("modules", ["jaxserve.scheduling.scheduler, jaxserve.text", "jaxserve.cli"])
def test_loads_without_jax(modules: str) -> None:
    """Not by way of another module of ours either."""
    heavy = {"jax", "jaxlib", "flax", "torch", "transformers", "orbax"}
    code = f"import sys, {modules}; print(*({heavy} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.split() == []


def test_kernels_load_alone() -> None:
    code = "import sys, pallas_kernels.paged_attention, pallas_kernels.kv_write; print('jaxserve' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "False"
