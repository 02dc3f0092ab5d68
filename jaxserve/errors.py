"""Every exception that a user of jaxserve can meet.

All derive from `JaxserveError`. Those that blame the caller's input are also `ValueError`s and say which field is
wrong, what it was and what is allowed.
"""

from __future__ import annotations

from typing import Any


class JaxserveError(Exception):
    """Base of all jaxserve exceptions."""


class InvalidInputError(JaxserveError, ValueError):
    """A value given by the caller is not acceptable.

    Attributes:
      field: the parameter's name, as the caller wrote it.
      value: what was given.
      allowed: what would be accepted, in words.
    """

    def __init__(self, field: str, value: Any, allowed: str):
        self.field, self.value, self.allowed = field, value, allowed
        super().__init__(f"{field}={_short(value)} is not allowed: {allowed}")


class PromptTooLongError(InvalidInputError):
    """The prompt does not fit into the model's context or into the KV cache."""


class ModelNotFoundError(InvalidInputError):
    """The model path does not exist or holds no checkpoint."""


class UnsupportedModelError(InvalidInputError):
    """The checkpoint's architecture, or an option in its config, is not implemented."""


class CheckpointError(JaxserveError):
    """A checkpoint file is corrupt, incomplete or does not match its config; the message names file and tensor."""


class OutOfMemoryError(JaxserveError):
    """The memory asked for holds not even one KV block, or the weights do not fit."""


class QueueFullError(JaxserveError):
    """As many requests wait as may; try again later."""


class RequestTimeoutError(JaxserveError):
    """The request's deadline passed before it was answered."""


class CompilerError(JaxserveError):
    """XLA's compiler for the target is not installed, or cannot make the program."""


class ExecutablesError(JaxserveError):
    """A folder of compiled programs cannot be used as one; the message says why."""


class EngineDeadError(JaxserveError):
    """The engine stopped after an internal error; the cause is chained."""


class RequestAbortedError(JaxserveError):
    """The request was aborted before it finished."""


def _short(value: Any, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
