"""Loading streams: the host holds the model and one tensor more, never two models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.convert.checkpoints import save_hf

MEASURE = """
import re, sys, threading, time
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
import psutil
from convert.load import load_params
from convert.source import open_source
from jaxserve.models.params import abstract_params
from jaxserve.models.registry import model_config_from_hf

source = open_source(Path(sys.argv[1]))
config = model_config_from_hf(source.hf_config)
expected = abstract_params(config)
jnp.zeros(()).block_until_ready()
keep = sys.argv[2] == "keep"
put = None if keep else lambda path, host: jnp.zeros(())
process = psutil.Process()
before = process.memory_info().rss
peak, done = before, threading.Event()

def watch():
    global peak
    while not done.wait(0.001):
        peak = max(peak, process.memory_info().rss)

watcher = threading.Thread(target=watch)
watcher.start()
params = load_params(source, config, expected, put=put)
done.set()
watcher.join()
sizes = [int(np.prod(spec.shape)) * 4 for spec in expected.values()]
print(peak - before, sum(sizes), max(sizes))
"""
SLACK = 24e6  # bytes: threads' stacks, the allocator's rounding


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_peak_memory(tmp_path: Path, stored: str) -> None:
    save_hf(tmp_path, dtype=getattr(torch, stored), hidden_size=512, intermediate_size=4096, vocab_size=16384,
            num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4)
    for kind in ("keep", "drop"):
        result = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path), kind], capture_output=True, text=True,
                                check=True, cwd=Path(__file__).parents[2])
        peak, model, largest = map(int, result.stdout.split())
        assert model > 200e6 and largest < 40e6
        # "drop" stands for a device with memory of its own; each of the loader's threads has one parameter in work.
        assert peak < (model + largest if kind == "keep" else 4 * largest) + SLACK, (kind, peak, model, largest)
