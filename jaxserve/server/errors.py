"""Errors as OpenAI's API words them: {"error": {"message", "type", "param", "code"}} with a fitting status."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from jaxserve.errors import (
    EngineDeadError,
    InvalidInputError,
    JaxserveError,
    PromptTooLongError,
    QueueFullError,
    RequestTimeoutError,
)

logger = logging.getLogger(__name__)

CLIENT_GONE = 499
"""nginx's status of a request whose client did not wait; seen in logs only."""


class ErrorDetail(BaseModel):
    """Attributes:
    param: the parameter that is to blame, if one is.
    """

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    error: ErrorDetail


class ApiError(HTTPException):
    """An answer that is an error."""

    def __init__(self, status: int, message: str, *, type: str = "invalid_request_error", param: str | None = None,
                 code: str | None = None, headers: Mapping[str, str] | None = None):
        super().__init__(status, message, dict(headers or {}))
        self.body = ErrorResponse(error=ErrorDetail(message=message, type=type, param=param, code=code))

    def response(self) -> Response:
        return Response(self.body.model_dump_json(), self.status_code, self.headers, "application/json")


class ClientGoneError(Exception):
    """The client has closed its connection; nobody reads the answer."""


def as_api_error(error: BaseException) -> ApiError:
    """What to tell the caller. Errors that are not the caller's business are logged here, and only here."""
    match error:
        case ApiError():
            return error
        case PromptTooLongError():
            return ApiError(400, str(error), param=error.field, code="context_length_exceeded")
        case InvalidInputError():
            return ApiError(400, str(error), param=error.field)
        case QueueFullError():
            return ApiError(429, str(error), type="rate_limit_error", code="queue_full", headers={"retry-after": "1"})
        case RequestTimeoutError():
            return ApiError(504, str(error), type="timeout_error", code="timeout")
        case EngineDeadError():
            return ApiError(503, str(error), type="server_error", code="engine_dead")
        case RequestValidationError():
            return _of_validation(error.errors())
        case RecursionError():
            return ApiError(400, "the request is nested too deeply")
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
    logger.error("unexpected error", exc_info=error)
    return ApiError(500, "internal error; the server's log has the details", type="server_error")


def add_error_handlers(app: FastAPI) -> None:
    """For what routes raise; `RequestContext` sees to everything else."""
    async def answer(_: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    async def nobody(_: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    for kind in (JaxserveError, RequestValidationError, RecursionError, HTTPException):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(ClientGoneError, nobody)


def _of_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first few of pydantic's complaints; values are not repeated, they may be long or private."""
    told = dict.fromkeys(map(_complaint, errors))
    param = next((part for part in _place(errors[0]) if not part.isdecimal()), None)
    return ApiError(400, "; ".join([*told][:4]), param=param)


def _complaint(error: Mapping[str, Any]) -> str:
    match error["type"]:
        case "json_invalid":
            return f"the body is no JSON: {error['ctx']['error']} at character {error['loc'][1]}"
        case "model_attributes_type" if not _place(error):
            return "the body must be a JSON object, sent with content-type: application/json"
    return f"{'.'.join(_place(error)) or 'body'}: {error['msg']}"


def _place(error: Mapping[str, Any]) -> list[str]:
    """Parameters and indices. pydantic's location may also have names of types: which of several were tried."""
    return [str(part) for part in error["loc"][1:] if isinstance(part, int)
            or (part.isidentifier() and part.islower() and part not in ("str", "int", "float", "bool"))]
