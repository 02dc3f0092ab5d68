"""LLM.update_weights: every form a trainer may hold weights in, no compilation, no copy, no half-done swap."""

import asyncio
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from convert.load import aligned_empty
from jaxserve import LLM, AsyncLLM, SamplingParams
from jaxserve.errors import CheckpointError
from jaxserve.models.params import flatten, model_from_params
from tests.conftest import TINY_OPTIONS
from tests.engine.compilations import count_compilations
from tests.tiny import reference_greedy, reference_model

PROMPTS = [[5, 60, 7], list(range(20, 60)), [100]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def tokens(llm: LLM, prompts=PROMPTS, params=GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def other_folder(tiny_folder, tmp_path_factory) -> Path:
    """The tiny model with other weights."""
    folder = tmp_path_factory.mktemp("other")
    for file in tiny_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    model = reference_model(tiny_folder)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def hf_weights(other_folder) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in reference_model(other_folder).state_dict().items()}


@pytest.fixture(scope="module")
def llm(tiny_folder):
    with LLM(str(tiny_folder), **TINY_OPTIONS) as llm:
        llm.warmup()
        yield llm


@pytest.fixture(scope="module")
def other(other_folder) -> dict[str, jax.Array]:
    """Weights by dotted path, as a fresh engine loads them."""
    with LLM(str(other_folder), **TINY_OPTIONS) as fresh:
        return fresh._engine.runner.params()


@pytest.fixture(scope="module")
def expected(other_folder, tiny_folder) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens with the old and with the other weights, by transformers."""
    old, new = ([reference_greedy(reference_model(folder), prompt, 12) for prompt in PROMPTS]
                for folder in (tiny_folder, other_folder))
    assert all(a != b for a, b in zip(old, new, strict=True))
    return old, new


def forms(llm: LLM, params: dict[str, jax.Array]) -> dict:
    module = model_from_params(llm._serving.model, params)
    nested: dict = {}
    for path, array in params.items():
        *inner, leaf = path.split(".")
        node = nested
        for key in inner:
            node = node.setdefault(key, {})
        node[leaf] = array
    return {"module": module, "state": nnx.state(module), "params state": nnx.state(module, nnx.Param),
            "dotted": dict(params), "nested": nested, "pure dict": nnx.to_pure_dict(nnx.state(module))}


@pytest.mark.parametrize("form", ["module", "state", "params state", "dotted", "nested", "pure dict"])
def test_forms_of_the_flax_tree(llm, other, expected, form):
    old = llm._engine.runner.params()
    given = forms(llm, other)[form]
    num_compiled = llm._engine.runner.programs.num_compiled
    tokens(llm)
    with count_compilations() as counts:
        llm.update_weights(given)
        used = llm._engine.runner.params()
        assert tokens(llm) == expected[1]
        llm.update_weights(forms(llm, old)["dotted"])
        assert tokens(llm) == expected[0]
    assert not counts["compiled"] and llm._engine.runner.programs.num_compiled == num_compiled
    for path, array in used.items():
        assert array.unsafe_buffer_pointer() == other[path].unsafe_buffer_pointer(), f"{path} was copied"


@pytest.mark.parametrize("kind", ["numpy", "jax", "bfloat16"])
def test_hugging_face_names(llm, hf_weights, expected, kind):
    old = llm._engine.runner.params()
    given = {name: jnp.asarray(array) if kind == "jax" else array for name, array in hf_weights.items()}
    if kind == "bfloat16":
        given = {name: jnp.asarray(array, jnp.bfloat16) for name, array in hf_weights.items()}
    with count_compilations() as counts:
        llm.update_weights(given)
        found = tokens(llm)
        llm.update_weights(old)
        assert tokens(llm) == expected[0]
    assert not counts["compiled"]
    assert kind == "bfloat16" or found == expected[1]


def test_a_tied_head_may_be_given_or_not(tmp_path):
    from tests.tiny import make_tiny_model

    folder = make_tiny_model(tmp_path, tie_word_embeddings=True)
    weights = {name: tensor.numpy() for name, tensor in reference_model(folder).state_dict().items()}
    with LLM(str(folder), **TINY_OPTIONS) as llm:
        for given in (weights, {name: array for name, array in weights.items() if name != "lm_head.weight"}):
            llm.update_weights(given)
            for path, array in llm._engine.runner.params().items():
                if path == "embed.weight":
                    np.testing.assert_array_equal(array, weights["model.embed_tokens.weight"])


def test_other_dtypes_are_converted(llm, other):
    old = llm._engine.runner.params()
    llm.update_weights({path: array.astype(jnp.bfloat16) for path, array in other.items()})
    assert all(array.dtype == jnp.float32 for array in llm._engine.runner.params().values())
    tokens(llm)
    llm.update_weights(old)


def test_numpy_arrays_stay_the_callers(llm, other, expected):
    """On a CPU JAX may share the memory of an aligned numpy array."""
    old = llm._engine.runner.params()
    given = {path: aligned_empty(array.shape, np.float32) for path, array in other.items()}
    for path, array in given.items():
        array[...] = other[path]
    with count_compilations() as counts:
        llm.update_weights(given)
    assert not counts["compiled"]
    for array in given.values():
        array[...] = 7
    assert tokens(llm) == expected[1]
    llm.update_weights(old)


def test_a_trained_step_is_used(llm, expected):
    """What RL trainers do: a gradient step on the very module, then generate."""
    old = llm._engine.runner.params()
    module = model_from_params(llm._serving.model, old)

    @jax.jit
    def step(leaves):
        return jax.tree.map(lambda array: array * 1.1, leaves)

    trained = jax.tree.map(lambda array: array, step(module))
    llm.update_weights(trained)
    used = llm._engine.runner.params()
    for path, array in flatten(trained).items():
        assert array.unsafe_buffer_pointer() == used[path].unsafe_buffer_pointer()
    assert tokens(llm) != expected[0]
    llm.update_weights(old)
    assert tokens(llm) == expected[0]


def bad_weights(other, hf_weights) -> dict:
    without = dict(other)
    del without["norm.weight"], without["layers.1.mlp.down.weight"]
    hf_without = dict(hf_weights)
    del hf_without["model.norm.weight"]
    transposed = other | {"embed.weight": other["embed.weight"].T}
    return {
        "missing": (without, ["norm.weight", "layers.1.mlp.down.weight"]),
        "unexpected": (other | {"extra.weight": other["norm.weight"]}, ["extra.weight"]),
        "misshapen": (transposed, ["embed.weight", "[32, 350]", "[350, 32]"]),
        "all at once": (without | {"x": other["norm.weight"], "embed.weight": transposed["embed.weight"]},
                        ["norm.weight", "layers.1.mlp.down.weight", "x is unexpected", "embed.weight is [32, 350]"]),
        "hf missing": (hf_without, ["model.norm.weight"]),
        "hf unexpected": (hf_weights | {"model.extra.weight": hf_weights["model.norm.weight"]}, ["model.extra.weight"]),
        "hf misshapen": (hf_weights | {"model.norm.weight": np.ones(5, np.float32)}, ["model.norm.weight", "[5]"]),
        "nothing": ({}, ["embed.weight"]),
        "foreign": ({"a": np.ones(3), "b": np.ones(3)}, ["a", "b"]),
        "no arrays": (dict.fromkeys(other, "x"), ["embed.weight"]),
        "no mapping": ([1, 2, 3], ["params is a list"]),
    }


_ANY = {"norm.weight": 0, "layers.1.mlp.down.weight": 0, "embed.weight": np.ones((1, 1))}


@pytest.mark.parametrize("kind", bad_weights(_ANY, {"model.norm.weight": 0}))
def test_wrong_weights_are_one_error_and_the_old_ones_stay(llm, other, hf_weights, expected, kind):
    given, named = bad_weights(other, hf_weights)[kind]
    with pytest.raises(CheckpointError) as caught:
        llm.update_weights(given)
    for part in named:
        assert part in str(caught.value)
    assert tokens(llm) == expected[0]


def test_running_requests_go_on_with_the_new_weights(tiny_folder, other, other_folder):
    """Their tokens so far stay; the next ones are what the new weights make of prompt and tokens together."""
    async def main():
        llm = AsyncLLM(str(tiny_folder), **TINY_OPTIONS)
        try:
            await llm.warmup()
            params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
            seen: dict[int, list[int]] = {}

            async def one(i: int) -> list[int]:
                async for output in llm.generate(PROMPTS[i], params):
                    seen[i] = output.outputs[0].token_ids
                return seen[i]

            tasks = [asyncio.create_task(one(i)) for i in range(len(PROMPTS))]
            while min(len(seen.get(i, ())) for i in range(len(PROMPTS))) < 5:
                await asyncio.sleep(0.001)
            with count_compilations() as counts:
                await llm.update_weights(other)
                # Between the swap and this line the loop may only have seen more tokens, never fewer.
                found = await asyncio.gather(*tasks)
            assert not counts["compiled"]
            with pytest.raises(CheckpointError):
                await llm.update_weights({"x": jnp.ones(3)})
            return found
        finally:
            llm.shutdown()

    found = asyncio.run(main())
    old, new = reference_model(tiny_folder), reference_model(other_folder)
    for prompt, ids in zip(PROMPTS, found, strict=True):
        assert len(ids) == 80, "nothing lost or doubled"
        with torch.no_grad():
            before, after = (model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
                             for model in (old, new))
        swap = next(i for i in range(81) if ids[i:] == after[i:])
        assert ids[:swap] == before[:swap] and 5 <= swap < 80, "the swap is one clean cut"
