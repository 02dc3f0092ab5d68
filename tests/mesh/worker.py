"""Run as a program on 8 simulated devices: generates with several meshes and models; prints one JSON object a line."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve import LLM, MeshConfig, SamplingParams
from jaxserve.errors import InvalidInputError
from jaxserve.runner.kv_cache import parts

OPTIONS: dict[str, Any] = dict(max_model_len=64, max_num_seqs=1, max_num_batched_tokens=16, block_size=4,
                               num_gpu_blocks_override=20, skip_tokenizer_init=True)
PROMPT = [5, 60, 7, 20, 11, 90, 33, 5, 5, 41, 3, 2, 1, 17, 18, 19, 20, 21, 22, 23]  # two chunks
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=20, prompt_logprobs=20)
SEEDED = SamplingParams(temperature=0.9, seed=3, max_tokens=10, ignore_eos=True, repetition_penalty=1.3, min_tokens=2,
                        top_p=0.9, top_k=30, logit_bias={7: 1.5})
COLLECTIVE = re.compile(r"= (\S+) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")


def mesh_of(name: str) -> Any:
    devices = np.asarray(jax.devices())
    match name.split("-"):
        case ["config", size]:
            return MeshConfig(tensor=int(size))
        case ["given", size]:  # not the first devices, and an axis that splits nothing
            return Mesh(devices[8 - int(size) :].reshape(1, -1), ("data", "tensor"))
    raise ValueError(name)


def entries(positions: Any) -> list[dict[int, float] | None]:
    return [position and {token_id: entry.logprob for token_id, entry in position.items()} for position in positions]


def collectives(text: str) -> Counter[str]:
    """Kind and shape of every exchange between devices in a compiled program."""
    return Counter(f"{kind} {re.sub('[{].*?[}]', '', shape)}" for shape, kind in COLLECTIVE.findall(text))


def generate(folder: str, mesh: str) -> dict[str, Any]:
    with LLM(folder, mesh=mesh_of(mesh), **OPTIONS) as llm:
        greedy, = llm.generate(PROMPT, GREEDY, use_tqdm=False)
        seeded, = llm.generate(PROMPT, SEEDED, use_tqdm=False)
        again, = llm.generate(PROMPT, GREEDY, use_tqdm=False)
        assert again.outputs[0].token_ids == greedy.outputs[0].token_ids
        runner = llm._engine.runner
        assert runner.programs.num_compiled == 2
        state_ok = all(array.sharding.is_equivalent_to(spec.sharding, array.ndim) for array, spec in zip(
            jax.tree.leaves(runner._state), jax.tree.leaves(runner.blueprint.state), strict=True))
        decode, mixed = (collectives(runner.programs.get(bucket).as_text() or "")
                         for bucket in (runner.buckets.for_decode(1), runner.buckets.for_mixed(16)))
        old = runner.params()
        llm.update_weights({path: np.asarray(array) for path, array in old.items()})
        updated, = llm.generate(PROMPT, GREEDY, use_tqdm=False)
        key_cache, _ = parts(runner._state.caches[0][0])
        return {
            "tokens": greedy.outputs[0].token_ids, "seeded": seeded.outputs[0].token_ids,
            "updated": updated.outputs[0].token_ids == greedy.outputs[0].token_ids,
            "logprobs": entries([*greedy.prompt_logprobs, *greedy.outputs[0].logprobs]),  # type: ignore[misc]
            "decode": decode, "mixed": mixed, "state_ok": state_ok,
            "cache_shard": key_cache.addressable_shards[0].data.shape, "cache": key_cache.shape,
            "devices": sorted(shard.device.id for shard in key_cache.addressable_shards),
            "qkv_shard": old["layers.0.attention.qkv.weight"].addressable_shards[0].data.shape,
            "mlp_shard": old["layers.0.mlp.down.weight"].addressable_shards[0].data.shape,
        }


def refuse(folder: str, mesh: Any) -> dict[str, Any]:
    try:
        LLM(folder, mesh=mesh, **OPTIONS)
    except InvalidInputError as error:
        return {"field": error.field, "message": str(error)}
    return {"field": None, "message": "accepted"}


def main() -> None:
    root = Path(sys.argv[1])
    for case in json.loads(sys.argv[2]):
        folder = str(root / case["model"])
        devices = np.asarray(jax.devices())
        odd = {"mesh without the axis": Mesh(devices[:2], ("x",)),
               "mesh with two axes": Mesh(devices[:4].reshape(2, 2), ("tensor", "data"))}
        if case["refuse"]:
            result = refuse(folder, odd[case["mesh"]] if case["mesh"] in odd else mesh_of(case["mesh"]))
        else:
            result = generate(folder, case["mesh"])
        print(json.dumps(case | result), flush=True)


if __name__ == "__main__":
    main()
