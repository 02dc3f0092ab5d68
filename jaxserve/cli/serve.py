"""`jaxserve serve`: the OpenAI-compatible server."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxserve.cli.options import ENGINE_PANEL, ModelOptions, option
from jaxserve.errors import InvalidInputError

if TYPE_CHECKING:
    from jaxserve.server.settings import ServerSettings

PACKAGED_NAME = "SmolLM2-135M-Instruct"


_engine = partial(option, ENGINE_PANEL)
_server = partial(option, "Server")


@dataclass(frozen=True, kw_only=True)
class ServingOptions(ModelOptions):
    """What matters where many are served; see `EngineConfig`."""

    enable_prefix_caching: Annotated[bool | None, _engine(
        "--enable-prefix-caching/--no-enable-prefix-caching", help="Share the KV blocks of equal beginnings.")] = None
    scheduling_policy: Annotated[str | None, _engine(help="fcfs or priority.")] = None
    max_waiting_requests: Annotated[int | None, _engine(
        help="Most that may wait; more get 429. Default: any number.")] = None
    queue_timeout_s: Annotated[float | None, _engine(
        "--queue-timeout", help="Seconds after which a request that waits ends with 504.")] = None
    num_gpu_blocks_override: Annotated[int | None, _engine(help="Exactly this many KV blocks.")] = None
    seed: Annotated[int | None, _engine(help="Of requests that bring none.")] = None
    async_scheduling: Annotated[bool | None, _engine(
        "--async-scheduling/--no-async-scheduling", help="Plan a step while the one before runs.")] = None
    swap_space: Annotated[float | None, _engine(help="GiB of host memory for KV blocks.")] = None
    preemption_mode: Annotated[str | None, _engine(help="auto, swap or recompute.")] = None
    swap_compression: Annotated[bool | None, _engine(
        "--swap-compression", help="Keep blocks on the host as LZ4 frames.")] = None
    speculative_config: Annotated[str | None, _engine(
        help='JSON, such as {"method": "ngram", "num_speculative_tokens": 4}.')] = None
    long_prefill_token_threshold: Annotated[int | None, _engine(help="Prompts above it are long.")] = None
    max_num_partial_prefills: Annotated[int | None, _engine(help="Prompts that are taken in at a time.")] = None
    max_long_partial_prefills: Annotated[int | None, _engine(help="Of these, long ones.")] = None
    max_queue_delay_ms: Annotated[float | None, _engine(help="Hold the first batch back so long, to fill it.")] = None
    preferred_batch_size: Annotated[int | None, _engine(help="Requests that fill it.")] = None
    enable_memory_profiler: Annotated[bool | None, _engine(
        "--enable-memory-profiler", help="Keep the last steps' use of blocks for /debug/memory.")] = None

    def arguments(self) -> dict[str, Any]:
        given = super().arguments()
        if self.speculative_config is not None:
            try:
                given["speculative_config"] = json.loads(self.speculative_config)
            except json.JSONDecodeError as error:
                raise InvalidInputError("speculative_config", self.speculative_config, f"JSON ({error})") from error
        return given


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """See `ServerSettings`."""

    host: Annotated[str, _server(help="Address to listen at; 0.0.0.0: all.")] = "127.0.0.1"
    port: Annotated[int, _server(help="0: a free one.", min=0, max=65535)] = 8000
    served_model_name: Annotated[list[str] | None, _server(
        help="Name of the model in the API; may be given several times. Default: MODEL as it was given.")] = None
    api_key: Annotated[list[str] | None, _server(
        help="Key that requests must bring; may be given several times. The environment does not show in `ps`.",
        envvar="JAXSERVE_API_KEY")] = None
    request_timeout: Annotated[float | None, _server(help="Seconds after which a request ends with 504.")] = None
    max_concurrent_per_client: Annotated[int | None, _server(
        help="Requests of one client (API key, else address) at a time; more get 429.")] = None
    max_body_bytes: Annotated[int, _server(help="Larger requests get 413.")] = 16 << 20
    allowed_origins: Annotated[list[str] | None, _server(
        help="Origin whose pages may call the API from a browser (CORS); may be given several times.")] = None
    chat_template: Annotated[str | None, _server(help="File with a Jinja template, or its text.")] = None
    trust_request_chat_template: Annotated[bool, _server(
        "--trust-request-chat-template", help="Let requests bring chat templates, which are code.")] = False
    enable_auto_tool_choice: Annotated[bool, _server(
        "--enable-auto-tool-choice", help="Look for tool calls in answers.")] = False
    tool_call_parser: Annotated[str | None, _server(help="hermes, llama3_json or mistral.")] = None
    reasoning_parser: Annotated[str | None, _server(help="qwen3 or deepseek_r1.")] = None
    warmup: Annotated[bool, _server(
        "--warmup/--no-warmup", help="Compile everything before /health says ready.")] = True
    shutdown_timeout: Annotated[float, _server(help="Seconds that running requests get after SIGTERM.")] = 30.0
    metrics_prefix: Annotated[str, _server(help="vllm makes dashboards work that were made for vLLM.")] = "jaxserve"
    otlp_traces_endpoint: Annotated[str | None, _server(
        help="Where spans go, such as http://localhost:4318/v1/traces.")] = None
    profile_dir: Annotated[Path | None, _server(help="Let /start_profile record to this folder.")] = None
    enable_debug_endpoints: Annotated[bool, _server("--enable-debug-endpoints", help="Serve /debug/memory.")] = False
    log_level: Annotated[str, _server(help="debug, info, warning or error.")] = "info"
    log_json: Annotated[bool, _server("--log-json", help="Logs as JSON objects, one a line.")] = False
    ray: Annotated[bool, _server(
        "--ray", help="Serve through Ray Serve: on the cluster that RAY_ADDRESS names, else on this machine.")] = False
    replicas: Annotated[int, _server(
        help="Engines, each with a copy of the model and GPUs of its own; with --ray.", min=1)] = 1


def serve(
    model_path: Annotated[str | None, typer.Argument(metavar="MODEL", help="As --model.")] = None,
    *,
    server: ServerOptions,
    model: ServingOptions,
) -> None:
    """Serve a model over HTTP, as OpenAI's API does.

    The model is loaded first, then the port answers: /health with 503 until everything is compiled, while requests that
    come before that wait for it. SIGTERM: no more connections, running requests finish, exit code 0.
    """
    if model_path is not None and model.model is not None:
        raise InvalidInputError("model", model.model, "MODEL or --model, not both")
    name = model_path or model.model
    if server.log_level not in ("debug", "info", "warning", "error"):
        raise InvalidInputError("log_level", server.log_level, "debug, info, warning or error")
    if server.replicas > 1 and not server.ray:
        raise InvalidInputError("replicas", server.replicas, "1 without --ray")
    try:
        from jaxserve.server.logs import set_up
        from jaxserve.server.main import bind, run
        from jaxserve.server.settings import ServerSettings
    except ModuleNotFoundError as error:
        raise InvalidInputError("serve", error.name, "only with `pip install 'jaxserve[server]'`") from error

    set_up(server.log_level, as_json=server.log_json)
    settings = ServerSettings(
        served_model_name=tuple(server.served_model_name or [name or PACKAGED_NAME]),
        api_key=tuple(server.api_key or ()), allowed_origins=tuple(server.allowed_origins or ()),
        chat_template=_template(server.chat_template),
        profile_dir=None if server.profile_dir is None else str(server.profile_dir),
        **{field: getattr(server, field) for field in (
            "max_body_bytes", "max_concurrent_per_client", "request_timeout", "metrics_prefix",
            "otlp_traces_endpoint", "enable_debug_endpoints", "trust_request_chat_template",
            "enable_auto_tool_choice", "tool_call_parser", "reasoning_parser", "warmup", "shutdown_timeout")})
    if server.ray:
        _serve_with_ray(name, server, model, settings)
        return
    listener = bind(server.host, server.port)
    from jaxserve import AsyncLLM

    llm = AsyncLLM(**(model.arguments() | {"model": name}))
    run(llm, settings, listener)


def _serve_with_ray(name: str | None, server: ServerOptions, model: ServingOptions, settings: ServerSettings) -> None:
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # else lines that differ in numbers only would be shown once
    try:
        from jaxserve.server import ray_app
    except ModuleNotFoundError as error:
        raise InvalidInputError("ray", error.name, "only with `pip install 'jaxserve[ray]'`") from error

    arguments = model.arguments()
    arguments.pop("model", None)
    options = ray_app.ReplicaOptions(
        model=name, tokenizer=arguments.pop("tokenizer", None), num_replicas=server.replicas,
        tensor_parallel_size=arguments.pop("tensor_parallel_size", None), log_level=server.log_level,
        log_json=server.log_json)
    ray_app.run(options, arguments, settings, server.host, server.port)


def _template(given: str | None) -> str | None:
    """A file's text, or the text itself, which has Jinja's braces."""
    if given is None or "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError("chat_template", given, f"a readable file, or a Jinja text ({error})") from error
