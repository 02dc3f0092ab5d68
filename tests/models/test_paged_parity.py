"""Whole-model parity with transformers through the paged path: whole prompts, chunks of prompts, and decodes.

The cases are those of `test_parity`. Plans, blocks, buckets and packed batches come from the engine's own scheduler and
assembler; in place of the sampler, every row's logits are compared.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxserve.config import MeshConfig
from jaxserve.models.decoder import Decoder
from jaxserve.models.params import merge, split
from jaxserve.request import Request, SamplingParams
from jaxserve.runner.assembler import BatchAssembler
from jaxserve.runner.batch import BatchLayout, cut
from jaxserve.runner.buckets import Bucket, Buckets
from jaxserve.runner.kv_cache import Caches, cache_spec
from jaxserve.runner.paged_batch import PagedBatch, row_positions
from jaxserve.runner.sharding import make_mesh
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.scheduler import Scheduler
from pallas_kernels.paged_attention.api import QUERY_TILE
from tests.models.helpers import load, tiny_checkpoint
from tests.models.test_parity import CASES

BLOCK_SIZE, NUM_BLOCKS, MAX_POSITION, MAX_SEQS, BUDGET = 4, 64, 128, 4, 96
MESH = make_mesh(MeshConfig())
CHUNKS = (7, 1, 13, 2, 14)
NUM_STEPS = 8  # in which all sequences decode, but for one that ends two steps earlier
ALONE = ["llama attention_bias", "mistral window", "qwen2 tied", "qwen3 tied bias"]
"""Cases that always decode a single sequence too, a third program; the others do so in the slow tests."""

Span = tuple[str, int, int]
"""Request id, first position, number of tokens: consecutive rows of a step."""


# LLVM's optimiser is not under test here, and takes a quarter of the compile time.
@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3, compiler_options={"xla_backend_optimization_level": 0})
def step_logits(graphdef: Any, layout: BatchLayout, leaves: tuple[jax.Array, ...], caches: Caches,
                ints: jax.Array) -> tuple[jax.Array, Caches]:
    """`runner.step.run_step` up to the logits, which are those of all rows: [T, V] and the caches after the step."""
    fields = cut(ints, layout.int_fields)
    model = merge(graphdef, leaves)
    positions, slot_mapping = row_positions(fields, BLOCK_SIZE)
    hidden, caches = model(fields["token_ids"], positions, caches, PagedBatch(fields, slot_mapping, MESH))
    return model.logits(hidden), caches


class Serving:
    """Sequences whose tokens are known beforehand, run through the paged path next to each other.

    What no step has written is NaN in the cache: whoever reads it is found out.
    """

    def __init__(self, case: str):
        family, options = CASES[case]
        if case.startswith("gqa"):
            options = {**options, "hidden_size": 8 * options["num_attention_heads"]}
        self.reference, hf = tiny_checkpoint(family, **{"max_position_embeddings": MAX_POSITION, **options})
        model: Decoder = load(self.reference, hf)
        self.graphdef, self.leaves, _ = split(model)
        spec = cache_spec(model.config, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, tensor_parallel_size=1,
                          dtype="float32")
        self.caches: Caches = tuple((jnp.full(spec.shape, jnp.nan), jnp.full(spec.shape, jnp.nan))
                                    for _ in range(spec.num_layers))
        self.scheduler = Scheduler(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_num_seqs=MAX_SEQS,
                                   max_num_batched_tokens=BUDGET, max_blocks_per_seq=MAX_POSITION // BLOCK_SIZE)
        self.assembler = BatchAssembler(self.scheduler.block_tables, query_tile=QUERY_TILE)
        self.buckets = Buckets(max_num_seqs=MAX_SEQS, max_num_batched_tokens=BUDGET, query_tile=QUERY_TILE,
                               smallest_mixed=BUDGET)
        self.used_buckets: list[Bucket] = []
        self.rng = np.random.default_rng(1)
        self.token_ids: dict[str, list[int]] = {}
        self.expected: dict[str, np.ndarray] = {}

    def add(self, name: str, *, prompt: int, decodes: int) -> None:
        """Queues a random sequence: its first `prompt` tokens come as a prompt, the others one by one."""
        token_ids = self.rng.integers(0, 97, prompt + decodes)
        with torch.no_grad():
            self.expected[name] = self.reference(torch.from_numpy(token_ids[None])).logits[0].numpy()
        assert np.abs(self.expected[name]).max() > 1  # large enough for the comparison to mean something
        self.token_ids[name] = token_ids.tolist()
        self.scheduler.add(Request(name, self.token_ids[name][:prompt], SamplingParams(), MAX_POSITION))

    def step(self, *, budget: int = BUDGET) -> list[Span]:
        """Plans a step of at most `budget` tokens, runs it, compares all its logits; returns what its rows were."""
        self.scheduler.max_num_batched_tokens = budget
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        self.check(plan, self.run(plan))
        for request, samples in [(r, True) for r in plan.decodes] + [(c.request, c.samples) for c in plan.chunks]:
            if samples:
                self._take_token(request)
        return spans(plan)

    def run(self, plan: StepPlan) -> np.ndarray:
        """[T, V] logits of a plan's rows; the caches advance."""
        for chunk in plan.chunks:
            self.assembler.set_slot(chunk.request, uses_row=False)
        bucket = self.buckets.pick(plan)
        self.used_buckets.append(bucket)
        ints, _ = self.assembler.assemble(plan, bucket)
        logits, self.caches = step_logits(self.graphdef, self.assembler.layout(bucket), self.leaves, self.caches, ints)
        return np.asarray(logits)

    def check(self, plan: StepPlan, logits: np.ndarray) -> None:
        """Compares a step's rows with transformers' logits at the plan's own positions."""
        row = 0
        for name, start, num_tokens in spans(plan):
            np.testing.assert_allclose(logits[row : row + num_tokens], self.expected[name][start : start + num_tokens],
                                       atol=1e-4, rtol=0, err_msg=f"{name} from position {start}")
            row += num_tokens

    def _take_token(self, request: Request) -> None:
        request.num_inflight -= 1
        token_ids = self.token_ids[request.request_id]
        if request.num_tokens == len(token_ids):
            self.scheduler.finish(request)
        else:
            request.append(token_ids[request.num_tokens])


def spans(plan: StepPlan) -> list[Span]:
    decodes = [(request.request_id, position, 1)
               for request, position in zip(plan.decodes, plan.positions, strict=True)]
    return decodes + [(chunk.request.request_id, chunk.start, chunk.num_tokens) for chunk in plan.chunks]


def run_prompts(case: str, *, num_alone: int = 0) -> Serving:
    """Prefill in all its forms, compared as it goes; four sequences are left that decode, one longer than the rest."""
    serving = Serving(case)
    serving.add("stale", prompt=71, decodes=0)  # two query tiles; others get its blocks, last first, as it leaves them
    assert serving.step() == [("stale", 0, 71)]
    serving.add("long", prompt=62, decodes=len(CHUNKS) + NUM_STEPS)  # decodes over the step of the attention's loop, 64
    serving.add("short", prompt=3, decodes=len(CHUNKS) + NUM_STEPS - 2)  # shorter than a window and a block
    assert serving.step() == [("long", 0, 62), ("short", 0, 3)]
    serving.add("chunked", prompt=sum(CHUNKS), decodes=NUM_STEPS + num_alone)
    for index, size in enumerate(CHUNKS):
        expected = [("long", 62 + index, 1), ("short", 3 + index, 1), ("chunked", sum(CHUNKS[:index]), size)]
        if index + 1 == len(CHUNKS):
            serving.add("late", prompt=6, decodes=NUM_STEPS)
            expected.append(("late", 0, 6))
        assert serving.step(budget=sum(count for _, _, count in expected)) == expected
    assert not any(bucket.is_decode for bucket in serving.used_buckets)
    return serving


@pytest.mark.parametrize(("case", "num_alone"), [
    *((case, 3 if case in ALONE else 0) for case in CASES),
    *(pytest.param(case, 3, marks=pytest.mark.slow) for case in CASES if case not in ALONE),
])
def test_paged_logits_equal_transformers(case: str, num_alone: int) -> None:
    serving = run_prompts(case, num_alone=num_alone)
    seen = [serving.step() for _ in range(NUM_STEPS + num_alone)]
    assert [len(step) for step in seen] == [4] * (NUM_STEPS - 2) + [3] * 2 + [1] * num_alone
    assert serving.used_buckets[-len(seen):] == [Bucket(4, 4, 0)] * NUM_STEPS + [Bucket(1, 1, 0)] * num_alone
    assert not serving.scheduler.has_requests and serving.scheduler.pool.num_used == 0


@pytest.mark.parametrize(("case", "window"), [("llama", None), ("mistral window", 5)])
def test_one_wrong_block_id_is_noticed(case: str, window: int | None) -> None:
    """The comparison above fails for every block id that a decode reads, and for no other."""
    serving = run_prompts(case)
    plan = serving.scheduler.schedule()
    request, position = plan.decodes[0], plan.positions[0]
    assert request.request_id == "long"
    table = serving.scheduler.block_tables[request.slot]
    others = [block_id for other in plan.decodes[1:] for block_id in other.block_ids]
    first = 0 if window is None else position - window + 1
    columns = range(position // BLOCK_SIZE)  # but the last, where this step writes
    noticed, caches = [], serving.caches
    for column in columns:
        right, table[column] = table[column], serving.rng.choice(others)
        serving.caches = jax.tree.map(jnp.copy, caches)
        try:
            serving.check(plan, serving.run(plan))
        except AssertionError:
            noticed.append(column)
        table[column] = right
    assert noticed == [column for column in columns if (column + 1) * BLOCK_SIZE > first] and noticed
    serving.caches = caches
    serving.check(plan, serving.run(plan))
