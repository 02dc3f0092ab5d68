"""An engine whose device is not there: every step returns made-up tokens at once. All the rest is real."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import cycle
from typing import Any

import numpy as np

from bench.adapters import open_model
from jaxserve.config import MeshConfig, ModelConfig, RopeConfig
from jaxserve.engine.build import engine_config, make_engine
from jaxserve.engine.engine import Engine
from jaxserve.engine.inputs import InputProcessor
from jaxserve.models.params import abstract_params
from jaxserve.request import MAX_LOGPROBS, RequestOutput, SamplingParams
from jaxserve.runner.blueprint import blueprint
from jaxserve.runner.buckets import Bucket
from jaxserve.runner.sharding import make_mesh
from jaxserve.runner.state import DeviceState, StepOutputs
from jaxserve.text import Tokenizer


class StubServing:
    """A real engine around stubbed steps, and a real tokenizer.

    Args:
      model: where the tokenizer comes from; the model itself is one layer of width 8.
      uniform: tokens are drawn uniformly; else ids have Zipf's distribution, which is about right for text, because
        byte-pair encoders number frequent tokens first.
      options: of the engine.
    """

    def __init__(self, model: str | None, *, uniform: bool = False, **options: Any):
        import jax.numpy as jnp

        data = open_model(model).tokenizer()
        self.tokenizer = Tokenizer(data.backend, data.config)
        tiny = ModelConfig(
            architecture="LlamaForCausalLM", vocab_size=self.tokenizer.vocab_size, hidden_size=8, intermediate_size=8,
            num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, max_position=4096, rms_norm_eps=1e-5,
            rope=RopeConfig(), tie_word_embeddings=True, dtype="float32")
        config = engine_config(**options).resolve(tiny, "cpu")
        mesh = make_mesh(MeshConfig())
        params = {path: jnp.zeros(spec.shape, spec.dtype) for path, spec in abstract_params(tiny).items()}
        self.engine: Engine = make_engine(blueprint(tiny, config, mesh), params, self.tokenizer)
        self.engine.runner.programs.close()
        self.engine.runner.programs = _Programs(self.tokenizer, uniform)  # type: ignore[assignment]
        assert config.max_model_len is not None
        self._inputs = InputProcessor(
            self.tokenizer, vocab_size=tiny.vocab_size, max_model_len=config.max_model_len, seed=0,
            capacity_tokens=self.engine.scheduler.capacity_tokens, eos_token_ids=[self.tokenizer.eos_token_id or 0])
        self._num_requests = 0

    def add(self, prompt: list[int], params: SamplingParams) -> str:
        """Queues a request; returns its id."""
        self._num_requests += 1
        request_id = str(self._num_requests)
        self.engine.add(*self._inputs.make(request_id, prompt, params))
        return request_id

    def finish(self) -> list[RequestOutput]:
        """Steps until nothing is left."""
        outputs: list[RequestOutput] = []
        while self.engine.has_unfinished:
            outputs += self.engine.step()
        return outputs


class _HostArray(np.ndarray):
    """Looks enough like a jax array that is there already."""

    def copy_to_host_async(self) -> None: ...


class _Programs:
    """In place of the compiled steps. Made-up results are made once and used in turn, so that they cost nothing."""

    NUM_RESULTS = 61

    def __init__(self, tokenizer: Tokenizer, uniform: bool):
        self._random = np.random.default_rng(0)
        self._ordinary = np.array([i for i in range(tokenizer.vocab_size) if i not in tokenizer.added_ids], np.int32)
        weights = np.ones(len(self._ordinary)) if uniform else 1 / (20.0 + np.arange(len(self._ordinary)))
        self._weights = weights / weights.sum()
        self._results: dict[Bucket, Iterator[StepOutputs]] = {}

    def get(self, bucket: Bucket) -> Any:
        if bucket not in self._results:
            self._results[bucket] = cycle([self._make(bucket) for _ in range(self.NUM_RESULTS)])
        results = self._results[bucket]

        def step(leaves: Any, state: DeviceState, ints: np.ndarray, floats: np.ndarray) -> Any:
            return state, next(results)

        return step

    def is_ready(self, bucket: Bucket) -> bool:
        return True

    def prefetch(self, buckets: Iterable[Bucket]) -> None: ...

    def close(self) -> None: ...

    def _make(self, bucket: Bucket) -> StepOutputs:
        token_ids = self._tokens(bucket.num_seqs).view(_HostArray)
        prompt = None if bucket.is_decode else self._logprobs(bucket.num_tokens)
        return StepOutputs(token_ids, self._logprobs(bucket.num_seqs), prompt)  # type: ignore[arg-type]

    def _logprobs(self, num_rows: int) -> Any:
        values = -np.sort(self._random.exponential(size=(num_rows, MAX_LOGPROBS)).astype(np.float32))[:, ::-1]
        ranks = np.ones(num_rows, np.int32)
        return values[:, 0], ranks, self._tokens((num_rows, MAX_LOGPROBS)), np.ascontiguousarray(values)

    def _tokens(self, shape: int | tuple[int, int]) -> np.ndarray:
        return self._random.choice(self._ordinary, shape, p=self._weights)
