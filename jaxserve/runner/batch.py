"""A step's inputs: written on the host into one int32 and one float32 buffer, cut apart again inside the jitted step.

Two transfers a step, however many fields. Host and device read the same table of fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from jaxserve.runner.buckets import Bucket

Fields = dict[str, tuple[int, ...]]

SLOT_INTS = ("top_k", "seed_low", "seed_high", "uses_row", "guided", "wants_logprobs")
SLOT_FLOATS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")


@dataclass(frozen=True)
class BatchLayout:
    """Where each field of a bucket's step lies in the two packed buffers.

    Integer fields (S sequences in the order decodes, chunks, padding; T rows; M block-table columns):
      slots [S]: row of each sequence in the per-request device arrays; padding: the trash row num_slots.
      block_tables [S, M], context_lens [S]: blocks, and tokens including this step's (0: padding).
      samples [S]: whether the sequence's newest logits are sampled in this step.
      num_decodes: sequences 0 ... num_decodes - 1 have one row each, row i is sequence i's.
      sampling_ints [6, S]: SLOT_INTS, the order of the rows.
      token_ids [T], from_device [T]: a row's input token, or 1: take it from the device's last_tokens.
    Only in mixed steps:
      query_starts, query_lens [S]: first row and number of rows of each sequence.
      row_seq [T]: each row's sequence (padding rows: S, which is none).
      tile_seq, tile_row [Q], num_tiles: each query tile's sequence and first row.
      target_ids [T], num_logprob_rows: the token that follows each row's, for prompt logprobs of the first rows.
    Float field: sampling_floats [6, S]: SLOT_FLOATS.
    """

    bucket: Bucket
    num_blocks_per_seq: int

    @property
    def int_fields(self) -> Fields:
        num_tokens, num_seqs = self.bucket.num_tokens, self.bucket.num_seqs
        fields: Fields = {
            "num_decodes": (), "slots": (num_seqs,), "context_lens": (num_seqs,), "samples": (num_seqs,),
            "sampling_ints": (len(SLOT_INTS), num_seqs), "token_ids": (num_tokens,), "from_device": (num_tokens,),
            "block_tables": (num_seqs, self.num_blocks_per_seq),
        }
        if not self.bucket.is_decode:
            fields |= {
                "query_starts": (num_seqs,), "query_lens": (num_seqs,), "row_seq": (num_tokens,),
                "tile_seq": (self.bucket.num_tiles,), "tile_row": (self.bucket.num_tiles,), "num_tiles": (),
                "target_ids": (num_tokens,), "num_logprob_rows": (),
            }
        return fields

    @property
    def float_fields(self) -> Fields:
        return {"sampling_floats": (len(SLOT_FLOATS), self.bucket.num_seqs)}

    def sizes(self) -> tuple[int, int]:
        """Lengths of the integer and the float buffer."""
        return _size(self.int_fields), _size(self.float_fields)

    def host_buffers(self) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """Zeroed buffers and named views into them, to be filled."""
        num_ints, num_floats = self.sizes()
        ints, floats = np.zeros(num_ints, np.int32), np.zeros(num_floats, np.float32)
        return ints, floats, cut(ints, self.int_fields) | cut(floats, self.float_fields)


def cut(buffer: Any, fields: Fields) -> dict[str, Any]:
    """Named, shaped pieces of a flat numpy or jax array, in the order of `fields`."""
    pieces, offset = {}, 0
    for name, shape in fields.items():
        size = prod(shape)
        pieces[name] = buffer[offset : offset + size].reshape(shape)
        offset += size
    return pieces


def _size(fields: Fields) -> int:
    return sum(prod(shape) for shape in fields.values())
