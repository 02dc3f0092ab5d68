"""Fills a step's packed buffers from its plan. Host only: numpy, no jax."""

from __future__ import annotations

import numpy as np

from jaxserve.request import Request
from jaxserve.runner.batch import SLOT_FLOATS, SLOT_INTS, BatchLayout
from jaxserve.runner.buckets import Bucket
from jaxserve.scheduling.plan import StepPlan

Views = dict[str, np.ndarray]

MAX_INT32 = int(np.iinfo(np.int32).max)


class BatchAssembler:
    """Keeps what does not change while a request runs in arrays with a column per slot, so that a decode step is
    assembled by a few gathers, however many requests it has.

    Args:
      block_tables: the scheduler's, [num_slots, M]; read at every step.
      query_tile: rows of a query tile.
    """

    def __init__(self, block_tables: np.ndarray, *, query_tile: int):
        self._block_tables = block_tables
        self._query_tile = query_tile
        num_slots = len(block_tables)
        self._trash_slot = num_slots
        self._slot_ints = np.zeros((len(SLOT_INTS), num_slots), np.int32)
        self._slot_floats = np.zeros((len(SLOT_FLOATS), num_slots), np.float32)
        self._layouts: dict[Bucket, BatchLayout] = {}

    def layout(self, bucket: Bucket) -> BatchLayout:
        if bucket not in self._layouts:
            self._layouts[bucket] = BatchLayout(bucket, self._block_tables.shape[1])
        return self._layouts[bucket]

    def set_slot(self, request: Request, *, uses_row: bool) -> None:
        """Records how a request that has just got its slot is to be sampled."""
        params = request.params
        seed_low, seed_high = np.array([request.seed], np.uint64).view(np.int32)
        ints = dict(top_k=min(params.top_k, MAX_INT32), seed_low=seed_low, seed_high=seed_high, uses_row=uses_row,
                    guided=request.guide is not None, wants_logprobs=params.logprobs is not None)
        floats = dict(temperature=0.0 if params.is_greedy else params.temperature, top_p=params.top_p,
                      min_p=params.min_p, presence=params.presence_penalty, frequency=params.frequency_penalty,
                      repetition=params.repetition_penalty)
        self._slot_ints[:, request.slot] = [ints[name] for name in SLOT_INTS]
        self._slot_floats[:, request.slot] = [floats[name] for name in SLOT_FLOATS]

    def assemble(self, plan: StepPlan, bucket: Bucket) -> tuple[np.ndarray, np.ndarray]:
        """The packed int32 and float32 buffers. Fresh ones each time: the last step may still be reading its own."""
        ints, floats, views = self.layout(bucket).host_buffers()
        if not bucket.is_decode:
            views["row_seq"][:] = bucket.num_seqs  # until a sequence claims the row
        self._fill_sequences(plan, views)
        self._fill_decodes(plan, views)
        if not bucket.is_decode:
            self._fill_chunks(plan, views)
        return ints, floats

    def _fill_sequences(self, plan: StepPlan, views: Views) -> None:
        slots = np.array([request.slot for request in plan.rows()], np.int32)
        num_seqs = len(slots)
        views["slots"][:num_seqs] = slots
        views["slots"][num_seqs:] = self._trash_slot
        np.take(self._block_tables, slots, axis=0, out=views["block_tables"][:num_seqs], mode="clip")
        views["sampling_ints"][:, :num_seqs] = self._slot_ints[:, slots]
        views["sampling_floats"][:, :num_seqs] = self._slot_floats[:, slots]

    def _fill_decodes(self, plan: StepPlan, views: Views) -> None:
        count = len(plan.decodes)
        views["num_decodes"][...] = count
        if not count:
            return
        views["context_lens"][:count] = plan.positions
        views["context_lens"][:count] += 1
        views["samples"][:count] = 1
        views["from_device"][:count] = plan.from_device
        if not all(plan.from_device):
            for row, (request, position, from_device) in enumerate(
                    zip(plan.decodes, plan.positions, plan.from_device, strict=True)):
                if not from_device:
                    views["token_ids"][row] = request.input_token(position)
        if "row_seq" in views:
            rows = np.arange(count, dtype=np.int32)
            views["row_seq"][:count] = rows
            views["query_starts"][:count] = rows
            views["query_lens"][:count] = 1

    def _fill_chunks(self, plan: StepPlan, views: Views) -> None:
        row = len(plan.decodes)
        num_tiles = 0
        wants_prompt_logprobs = False
        for seq, chunk in enumerate(plan.chunks, start=len(plan.decodes)):
            stop = row + chunk.num_tokens
            # One token more than the chunk: the last row's target.
            tokens = chunk.request.known_tokens(chunk.start, chunk.start + chunk.num_tokens + 1)
            views["token_ids"][row:stop] = tokens[: chunk.num_tokens]
            views["target_ids"][row : row + len(tokens) - 1] = tokens[1:]
            views["row_seq"][row:stop] = seq
            views["context_lens"][seq] = chunk.start + chunk.num_tokens
            views["samples"][seq] = chunk.samples
            views["query_starts"][seq] = row
            views["query_lens"][seq] = chunk.num_tokens
            tiles = np.arange(row, stop, self._query_tile, dtype=np.int32)
            views["tile_seq"][num_tiles : num_tiles + len(tiles)] = seq
            views["tile_row"][num_tiles : num_tiles + len(tiles)] = tiles
            num_tiles += len(tiles)
            wants_prompt_logprobs |= chunk.request.params.prompt_logprobs is not None
            row = stop
        views["num_tiles"][...] = num_tiles
        views["num_logprob_rows"][...] = row if wants_prompt_logprobs else 0
