"""The packed batch says row by row what the plan says, and the device derives positions and slots from it."""

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.request import Request, SamplingParams
from jaxserve.runner.assembler import BatchAssembler
from jaxserve.runner.batch import cut
from jaxserve.runner.buckets import Buckets
from jaxserve.runner.paged_batch import row_positions
from jaxserve.scheduling.plan import Chunk, StepPlan

locate = jax.jit(row_positions, static_argnums=1)  # one program a bucket; op by op there would be hundreds
BLOCK, NUM_SLOTS, COLUMNS, TILE = 4, 5, 8, 16


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rows_are_those_of_the_plan(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    tables = rng.permutation(np.arange(1, NUM_SLOTS * COLUMNS + 1)).reshape(NUM_SLOTS, COLUMNS).astype(np.int32)
    slots = rng.permutation(NUM_SLOTS)[: data.draw(st.integers(1, NUM_SLOTS))]
    assembler = BatchAssembler(tables, query_tile=TILE)
    plan, expected = StepPlan(), []
    num_decodes = data.draw(st.integers(0, len(slots)))
    for index, slot in enumerate(slots):
        total = int(rng.integers(2, COLUMNS * BLOCK - 1))
        request = Request(str(slot), rng.integers(0, 99, total).tolist(), SamplingParams(temperature=slot), 99, seed=7)
        request.slot = int(slot)
        assembler.set_slot(request, uses_row=bool(slot % 2))
        if index < num_decodes:
            on_device = bool(rng.integers(2))
            start, count = total - 1 + on_device, 1
            plan.decodes.append(request)
            plan.positions.append(start)
            plan.from_device.append(on_device)
        else:
            start = int(rng.integers(0, total))
            count, on_device = int(rng.integers(1, total - start + 1)), False
            plan.chunks.append(Chunk(request, start, count, start + count == total))
        for position in range(start, start + count):
            expected.append((request, position, on_device))
    buckets = Buckets(max_num_seqs=NUM_SLOTS, max_num_batched_tokens=160, query_tile=TILE)
    bucket = buckets.pick(plan)
    ints, floats = assembler.assemble(plan, bucket)
    layout = assembler.layout(bucket)
    fields = cut(ints, layout.int_fields) | cut(floats, layout.float_fields)
    positions, targets = locate(fields, BLOCK)
    positions, targets = np.asarray(positions), np.asarray(targets)
    for row, (request, position, on_device) in enumerate(expected):
        assert positions[row] == position
        assert targets[row] == tables[request.slot, position // BLOCK] * BLOCK + position % BLOCK
        assert fields["from_device"][row] == on_device
        if not on_device:
            assert fields["token_ids"][row] == request.prompt_token_ids[position]
    assert not np.asarray(targets[len(expected):]).any(), "padding writes outside the null block's first slot"
    for seq, request in enumerate(plan.rows()):
        assert fields["slots"][seq] == request.slot
        assert fields["sampling_floats"][0, seq] == request.params.temperature
        assert fields["samples"][seq] == (seq < num_decodes or plan.chunks[seq - num_decodes].samples)
    assert (fields["slots"][len(slots):] == NUM_SLOTS).all() and not fields["context_lens"][len(slots):].any()
    if plan.chunks:
        covered: list[int] = []
        for tile in range(fields["num_tiles"]):
            seq, first = fields["tile_seq"][tile], fields["tile_row"][tile]
            end = fields["query_starts"][seq] + fields["query_lens"][seq]
            covered += range(first, min(first + TILE, end))
        assert covered == list(range(num_decodes, len(expected)))


def test_a_seed_keeps_all_its_bits():
    assembler = BatchAssembler(np.zeros((1, 2), np.int32), query_tile=TILE)
    request = Request("r", [1], SamplingParams(), 9, seed=0xFEDCBA9876543210)
    request.slot = 0
    assembler.set_slot(request, uses_row=False)
    low, high = assembler._slot_ints[1:3, 0].view(np.uint32)
    assert (int(high) << 32) | int(low) == request.seed
