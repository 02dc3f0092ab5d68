"""What the operator of a server decides, apart from the engine's options."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from jaxserve.config import check_positive
from jaxserve.errors import InvalidInputError
from jaxserve.server.parsers import reasoning_parser, tool_parser
from jaxserve.text.chat import ChatTemplate

MAX_CHOICES = 2048
"""Most completions that one request may ask for, over all of its prompts."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Names as the flags of `jaxserve serve`.

    Attributes:
      served_model_name: names by which requests may call the model; answers carry the first.
      api_key: keys of which a request must bring one; none: everybody may.
      max_body_bytes: larger requests are refused with 413.
      max_concurrent_per_client: requests of one client (API key, else address) at a time; more get 429.
      request_timeout: seconds after which a request ends with 504, finished or not.
      allowed_origins: for browsers' pages from elsewhere (CORS); none unless asked.
      metrics_prefix: of the metrics' names; "vllm" suits dashboards made for vLLM.
      otlp_traces_endpoint: where spans go (OTLP over HTTP), such as http://localhost:4318/v1/traces.
      profile_dir: where /start_profile records to; None: profiling is refused.
      enable_debug_endpoints: serve /debug/memory.
      trust_request_chat_template: let requests bring a chat template of their own. Such a template is code that runs
        in a sandbox, but for as long as it likes.
      chat_template: Jinja text, instead of the tokenizer's.
      enable_auto_tool_choice, tool_call_parser, reasoning_parser: how tool calls and reasoning are read from text.
      warmup: compile everything before /health says ready.
      shutdown_timeout: seconds that running requests get after SIGTERM.
    """

    served_model_name: tuple[str, ...]
    api_key: tuple[str, ...] = ()
    max_body_bytes: int = 16 << 20
    max_concurrent_per_client: int | None = None
    request_timeout: float | None = None
    allowed_origins: tuple[str, ...] = ()
    metrics_prefix: str = "jaxserve"
    otlp_traces_endpoint: str | None = None
    profile_dir: str | None = None
    enable_debug_endpoints: bool = False
    trust_request_chat_template: bool = False
    chat_template: str | None = None
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    warmup: bool = True
    shutdown_timeout: float = 30.0

    def __post_init__(self) -> None:
        if not self.served_model_name or not all(self.served_model_name):
            raise InvalidInputError("served_model_name", self.served_model_name, "at least one name, none empty")
        if not all(key.isascii() and key.isprintable() and key.split() == [key] for key in self.api_key):
            raise InvalidInputError("api_key", "(hidden)", "letters, digits and signs of ASCII, at least one, no blank")
        if not self.metrics_prefix.isidentifier():
            raise InvalidInputError("metrics_prefix", self.metrics_prefix, "letters, digits and underscores")
        for name in ("max_body_bytes", "max_concurrent_per_client", "request_timeout", "shutdown_timeout"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        if self.otlp_traces_endpoint is not None:
            _check_url("otlp_traces_endpoint", self.otlp_traces_endpoint)
        if self.profile_dir is not None:
            _make_folder("profile_dir", self.profile_dir)
        if self.chat_template is not None:
            ChatTemplate(self.chat_template).check()
        if self.tool_call_parser is not None:
            tool_parser(self.tool_call_parser)
        if self.reasoning_parser is not None:
            reasoning_parser(self.reasoning_parser)
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise InvalidInputError("enable_auto_tool_choice", True, "only with --tool-call-parser")


def _check_url(field: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise InvalidInputError(field, url, "a URL such as http://localhost:4318/v1/traces")


def _make_folder(field: str, folder: str) -> None:
    """What is written there is written much later, where nobody looks for an error."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        good = os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        good = False
    if not good:
        raise InvalidInputError(field, folder, "a folder that can be written to")
