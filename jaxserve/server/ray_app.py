"""Many replicas of the server on one or more machines, through Ray Serve.

A replica is an engine with the same application as `jaxserve serve` has, in a process of its own. Ray's proxy takes the
connections, and its router gives each request to the less busy of two replicas (power of two choices, Mitzenmacher
2001). What replicas die of, and that there are new ones, is Ray's business; the requests that one had die with it.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_type_hints

import ray
from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, Metric, generate_latest
from prometheus_client.registry import Collector
from pydantic import TypeAdapter, ValidationError
from ray import serve
from ray.serve.schema import LoggingConfig
from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.config import EngineConfig, check_positive
from jaxserve.errors import EngineDeadError, InvalidInputError, JaxserveError
from jaxserve.server.app import create_app
from jaxserve.server.logs import set_up
from jaxserve.server.main import bind, keep_what_there_is
from jaxserve.server.settings import ServerSettings

logger = logging.getLogger(__name__)

NAME = "jaxserve"
"""Of the application, and of its only deployment."""

_ANY_NUMBER = 1_000_000
"""Of requests that a replica may have: the engine makes them wait, refuses them and counts them as it does without
Ray. In Ray's own queue /health and /metrics would wait behind them."""


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """What there is to decide besides `EngineConfig` and `ServerSettings`.

    Attributes:
      model, tokenizer, tensor_parallel_size: as for `LLM`.
      num_replicas: how many.
      num_gpus: of a replica, which sees no others; 0: it runs on the CPU. Default: tensor_parallel_size if Ray has
        GPUs, else 0.
      num_cpus: processor cores that Ray reserves for a replica.
      log_level, log_json: of its log, which Ray keeps.
    """

    model: str | None = None
    tokenizer: str | None = None
    tensor_parallel_size: int | None = None
    num_replicas: int = 1
    num_gpus: int | None = None
    num_cpus: float = 1
    log_level: str = "info"
    log_json: bool = False

    def __post_init__(self) -> None:
        for name in ("num_replicas", "num_cpus"):
            check_positive(name, getattr(self, name))


def build_app(args: Mapping[str, Any]) -> serve.Application:
    """For `serve run jaxserve.server.ray_app:build_app model=llama num_replicas=2 num_gpus=1` and Ray's config files.

    Args:
      args: fields of `ReplicaOptions`, `EngineConfig` and `ServerSettings` by their names, as values or as text.
        `api_key` is better left to JAXSERVE_API_KEY, which no dashboard shows.

    Raises:
      InvalidInputError: names the argument.
    """
    given = dict(args)
    for name in ("served_model_name", "api_key", "allowed_origins"):
        if isinstance(given.get(name), str):
            given[name] = (given[name],)
    options = ReplicaOptions(**_taken(ReplicaOptions, given))
    engine = _taken(EngineConfig, given)
    settings = _taken(ServerSettings, given)
    if given:
        raise InvalidInputError(next(iter(given)), next(iter(given.values())), "no argument of jaxserve")
    EngineConfig(**engine)
    if options.model is None:
        raise InvalidInputError("model", None, "a folder or GGUF file that all machines have")
    settings.setdefault("served_model_name", (options.model,))
    if key := os.environ.get("JAXSERVE_API_KEY"):
        settings.setdefault("api_key", (key,))
    return application(options, engine, ServerSettings(**settings))


def _taken(kind: type[Any], given: dict[str, Any]) -> dict[str, Any]:
    """Takes what are fields of a dataclass out of `given`, in their types: `serve run` has text only."""
    hints, found = get_type_hints(kind), {}
    for name in hints.keys() & given.keys():
        value = given.pop(name)
        try:
            found[name] = TypeAdapter(hints[name]).validate_python(value)
        except ValidationError as error:
            shown = "(hidden)" if name == "api_key" else value
            raise InvalidInputError(name, shown, error.errors()[0]["msg"]) from None
    return found


def application(options: ReplicaOptions, engine: Mapping[str, Any], settings: ServerSettings) -> serve.Application:
    """For `serve.run`.

    Args:
      engine: keyword arguments of `AsyncLLM`, apart from those in `options`.
    """
    num_gpus = _gpus_of_a_replica(options) if options.num_gpus is None else options.num_gpus
    environment = {} if num_gpus else {"JAX_PLATFORMS": "cpu"}
    deployment = serve.deployment(
        Replica, name=NAME, num_replicas=options.num_replicas, max_ongoing_requests=_ANY_NUMBER,
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": num_gpus,
                           "runtime_env": {"env_vars": environment}},
        graceful_shutdown_timeout_s=settings.shutdown_timeout, graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=1.0, health_check_timeout_s=30.0,  # three that fail, and there is a new one
        max_constructor_retry_count=2, logging_config=LoggingConfig(enable_access_log=False))
    arguments = {"model": options.model, "tokenizer": options.tokenizer,
                 "tensor_parallel_size": options.tensor_parallel_size}
    return deployment.bind(arguments | dict(engine), settings, log_level=options.log_level, log_json=options.log_json)


def _gpus_of_a_replica(options: ReplicaOptions) -> int:
    if not ray.is_initialized():
        raise InvalidInputError("num_gpus", None, "GPUs of a replica, 0 for none: Ray isn't there yet to be asked")
    return (options.tensor_parallel_size or 1) if ray.cluster_resources().get("GPU") else 0


@serve.ingress()
class Replica:
    """One engine and its application. It is there for requests once everything is compiled."""

    async def __init__(self, arguments: Mapping[str, Any], settings: ServerSettings, *,  # type: ignore[misc]
                       log_level: str, log_json: bool):  # Ray awaits it
        set_up(log_level, as_json=log_json)
        from jaxserve import AsyncLLM

        self._llm = AsyncLLM(**arguments)
        if settings.warmup:
            logger.info("ready: warmed up in %.1f s", await self._llm.warmup())
        self._settings = replace(settings, warmup=False)
        here = serve.get_replica_context()
        self._id = here.replica_tag
        self._all = serve.get_deployment_handle(here.deployment, here.app_name)
        keep_what_there_is()

    def __serve_build_asgi_app__(self) -> FastAPI:
        app = create_app(self._llm, self._settings)
        self._registry = app.state.registry
        app.add_middleware(BehindRay, metrics=self._metrics_of_all)
        return app

    def check_health(self) -> None:
        """Ray replaces a replica of which it raises several times in a row."""
        if not self._llm.is_running:
            raise EngineDeadError("the engine has stopped")

    def collect(self) -> tuple[str, list[Metric]]:
        """This replica's name and metrics."""
        return self._id, list(self._registry.collect())

    async def _metrics_of_all(self) -> bytes:
        answers = await self._all.broadcast("collect").results_async(timeout_s=5, return_exceptions=True)
        return generate_latest(_Together(dict(each for each in answers if isinstance(each, tuple))))

    def __del__(self) -> None:
        if llm := getattr(self, "_llm", None):
            llm.shutdown()


class BehindRay:
    """Outermost middleware: Ray's proxy adds the request's id to the answer by itself, and passes a question for
    metrics to one replica only, which has to ask the others."""

    def __init__(self, app: ASGIApp, metrics: Callable[[], Awaitable[bytes]]):
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                del MutableHeaders(scope=message)["x-request-id"]
            await send(message)

        if scope["type"] == "http" and scope["path"] == "/metrics":
            await Response(await self._metrics(), media_type=CONTENT_TYPE_LATEST)(scope, receive, send)
        else:
            await self._app(scope, receive, send_without_id)


class _Together(Collector):
    """Metrics of several replicas; the label "replica" says whose."""

    def __init__(self, replicas: Mapping[str, list[Metric]]):
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for replica, metrics in self._replicas.items():
            for metric in metrics:
                family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                family.samples += [sample._replace(labels=sample.labels | {"replica": replica})
                                   for sample in metric.samples]
        yield from families.values()


def run(options: ReplicaOptions, engine: Mapping[str, Any], settings: ServerSettings, host: str, port: int) -> None:
    """Serves until SIGTERM or Ctrl-C, then lets running requests finish.

    With RAY_ADDRESS it is on that cluster, whose proxies listen where they do if there are any; else Ray is started
    here and ended again.

    Raises:
      JaxserveError: the address is taken, there are not enough GPUs, or the replicas do not start.
    """
    EngineConfig(**engine)  # what is wrong is told here rather than by every replica
    local = not os.environ.get("RAY_ADDRESS")
    if local:
        listener = bind(host, port)
        port = listener.getsockname()[1]
        listener.close()
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        cores = max(os.cpu_count() or 1, math.ceil(options.num_cpus * options.num_replicas))
        ray.init("local", num_cpus=cores, include_dashboard=False)
    else:
        _connect()
    for number in (signal.SIGINT, signal.SIGTERM):  # for this Ray has a handler that would not wait
        signal.signal(number, signal.default_int_handler)
    try:
        app = application(options, engine, settings)
        if local:
            _check_gpus(options)
        serve.start(http_options={"host": host, "port": port})
        _serve(app, f"[{host}]:{port}" if ":" in host else f"{host}:{port}", settings)
    except KeyboardInterrupt:
        logger.info("ended")
    finally:
        ray.shutdown()


def _connect() -> None:
    try:
        ray.init()
    except ConnectionError as error:
        raise InvalidInputError("RAY_ADDRESS", os.environ["RAY_ADDRESS"], f"a cluster's address ({error})") from error


def _check_gpus(options: ReplicaOptions) -> None:
    """On one machine no more will come, and Ray would wait for them."""
    there, each = int(ray.cluster_resources().get("GPU", 0)), _gpus_of_a_replica(options)
    if each * options.num_replicas > there:
        raise InvalidInputError("replicas", options.num_replicas,
                                f"at most {there // each} with {each} of the {there} GPUs each")


def _serve(app: serve.Application, address: str, settings: ServerSettings) -> None:
    """Until Ctrl-C. Taking the application away waits for its requests."""
    try:
        _deploy(app)
    except BaseException:
        serve.delete(NAME, _blocking=False)
        raise
    logger.info("serving %s at http://%s", settings.served_model_name[0], address)
    try:
        threading.Event().wait()
    finally:
        logger.info("ending: running requests have %g s to finish", settings.shutdown_timeout)
        serve.delete(NAME, _blocking=False)
        deadline = time.monotonic() + settings.shutdown_timeout
        while NAME in serve.status().applications and time.monotonic() < deadline:
            time.sleep(0.1)


def _deploy(app: serve.Application) -> None:
    try:
        serve.run(app, name=NAME)
    except RuntimeError as error:
        found = serve.status().applications[NAME].deployments
        told = found[NAME].message if NAME in found else str(error)
        *_, why = told.strip().splitlines()  # the end of a traceback, which Ray has logged
        raise JaxserveError(f"the replicas do not start: {why}") from error
