"""Ctrl-C: the process ends soon, in whatever phase it was, and no thread keeps it alive."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from jaxserve import SamplingParams
from tests.conftest import TINY_OPTIONS

PROGRAM = """
import sys, threading
from jaxserve import LLM, SamplingParams
folder, phase = sys.argv[1:]
options = {options!r}
llm = LLM(folder, **options)
if phase == "compiling":
    programs = llm._engine.runner.programs
    make = programs._make
    def compile(bucket):
        print("ready", flush=True)
        return make(bucket)
    programs._make = compile
else:
    llm.generate([5], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False)
    print("ready", flush=True)
endless = SamplingParams(temperature=1.0, max_tokens=100, ignore_eos=True)
try:
    while True:
        llm.generate([[5, 6, 7]] * 4, endless, use_tqdm=phase == "bar")
except KeyboardInterrupt:
    scheduler = llm._engine.scheduler
    scheduler.check_integrity()
    assert not scheduler.has_requests and not llm._engine.has_unfinished
    output, = llm.generate([5], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("phase", ["generating", "compiling"])
def test_ctrl_c_ends_generate(tiny_folder, phase):
    program = PROGRAM.format(options=TINY_OPTIONS)
    process = subprocess.Popen([sys.executable, "-c", program, str(tiny_folder), phase], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(0.3)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    seconds = time.monotonic() - start
    print(f"{phase}: ended after {seconds:.1f} s")
    assert process.returncode == 0 and out.endswith("interrupted\n"), err[-2000:]
    assert seconds < 30


def test_ctrl_c_at_any_moment_leaves_a_working_engine(tiny_llm):
    """A step that is left half way would lose the donated caches, or blocks."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompts = [[5, 6, 7], [9, 8]] * 3
    expected = [output.outputs[0].token_ids for output in tiny_llm.generate(prompts, params, use_tqdm=False)]
    rng, num_interrupts = random.Random(0), 0
    previous = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        for _ in range(30):
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.001, 0.04))
            try:
                tiny_llm.generate(prompts, params, use_tqdm=False)
            except KeyboardInterrupt:
                num_interrupts += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            scheduler = tiny_llm._engine.scheduler
            scheduler.check_integrity()
            assert not scheduler.has_requests and scheduler.pool.num_used == 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert num_interrupts > 10
    assert [output.outputs[0].token_ids for output in tiny_llm.generate(prompts, params, use_tqdm=False)] == expected
