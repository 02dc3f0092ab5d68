"""The application: routes, and what stands before them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import FileResponse, Response

import jaxserve
from jaxserve.server import chat, completions, embeddings, tokens
from jaxserve.server.context import RequestContext
from jaxserve.server.errors import ApiError, add_error_handlers
from jaxserve.server.metrics import make_registry
from jaxserve.server.responses import ModelCard, ModelList
from jaxserve.server.security import OPEN_PATHS, ApiKeys, BodyLimit, ClientLimit
from jaxserve.server.service import Service
from jaxserve.server.settings import ServerSettings
from jaxserve.server.tracing import Tracing

if TYPE_CHECKING:
    from jaxserve.engine.async_llm import AsyncLLM

CHAT_PAGE = Path(__file__).parent / "chat_page"
_PAGE_TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8",
               ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml", ".png": "image/png"}
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
                               "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff", "referrer-policy": "no-referrer", "cache-control": "no-cache"}

router = APIRouter(tags=["server"])


def create_app(llm: AsyncLLM, settings: ServerSettings, tracing: Tracing | None = None) -> FastAPI:
    """The server of one engine, as an ASGI application.

    Args:
      llm: is not shut down when the application ends.
      tracing: default: as the settings say.

    Raises:
      InvalidInputError: traces are asked for without the packages that send them.
    """
    tracing = tracing or Tracing(settings.otlp_traces_endpoint)
    service = Service(llm, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        warm_up = asyncio.create_task(service.warm_up())
        yield
        warm_up.cancel()
        await asyncio.to_thread(tracing.shutdown)

    app = FastAPI(title="jaxserve", version=jaxserve.__version__, lifespan=lifespan, redoc_url=None)
    app.state.service = service
    app.state.registry = make_registry(llm, settings.served_model_name[0], settings.metrics_prefix)
    for each in (completions.router, chat.router, embeddings.router, tokens.router, router):
        app.include_router(each)
    if settings.enable_debug_endpoints:
        app.include_router(debug_router)
    _add_chat_page(app)
    add_error_handlers(app)
    _add_middleware(app, settings, tracing)
    return app


def _add_middleware(app: FastAPI, settings: ServerSettings, tracing: Tracing) -> None:
    """The one added last is the outermost."""
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    if settings.max_concurrent_per_client is not None:
        app.add_middleware(ClientLimit, max_concurrent=settings.max_concurrent_per_client,
                           by_key=bool(settings.api_key))
    if settings.api_key:
        app.add_middleware(ApiKeys, keys=settings.api_key,
                           open_paths=OPEN_PATHS | set(page_files().values()))
    if settings.allowed_origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(settings.allowed_origins), allow_methods=["*"],
                           allow_headers=["*"], expose_headers=["x-request-id"])
    app.add_middleware(RequestContext, tracing=tracing)


@router.head("/health", include_in_schema=False)  # of which some load balancers ask
@router.get("/health")
async def health(request: Request) -> dict[str, str]:
    """200 once everything is compiled; 503 before that, when the engine has failed, and on connections that there are
    already while the server ends."""
    why_not = Service.of(request).why_not_ready
    if why_not is not None:
        raise ApiError(503, f"not ready: {why_not}", type="server_error", code="not_ready")
    return {"status": "ready"}


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": jaxserve.__version__}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """For Prometheus."""
    return Response(generate_latest(request.app.state.registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/models")
async def list_models(request: Request) -> ModelList:
    service = Service.of(request)
    return ModelList(data=[_card(service, name) for name in service.settings.served_model_name])


@router.get("/v1/models/{name:path}")
async def get_model(name: str, request: Request) -> ModelCard:
    service = Service.of(request)
    service.model_name(name)
    return _card(service, name)


def _card(service: Service, name: str) -> ModelCard:
    return ModelCard(id=name, created=service.created, root=service.settings.served_model_name[0],
                     max_model_len=service.llm.max_model_len)


@router.post("/start_profile")
async def start_profile(request: Request) -> dict[str, str]:
    """Records what host and device do into the server's --profile-dir."""
    service = Service.of(request)
    directory = service.settings.profile_dir
    if directory is None:
        raise ApiError(400, "profiling is off on this server (--profile-dir DIR)", code="profiling_off")
    return await _profile(lambda: service.llm.start_profile(directory), "recording")


@router.post("/stop_profile")
async def stop_profile(request: Request) -> dict[str, str]:
    """Ends the recording and writes it."""
    return await _profile(Service.of(request).llm.stop_profile, "written")


async def _profile(call: Any, done: str) -> dict[str, str]:
    try:
        await asyncio.to_thread(call)
    except RuntimeError as error:  # one runs already, or none does
        raise ApiError(400, str(error), code="profiling") from error
    except OSError as error:
        raise ApiError(500, str(error), type="server_error", code="profiling") from error
    return {"status": done}


def _add_chat_page(app: FastAPI) -> None:
    """index.html at /, and the files beside it; names are not taken from requests."""
    for file, path in page_files().items():
        async def page(_: Request, file: Path = file) -> Response:
            return FileResponse(file, media_type=_PAGE_TYPES[file.suffix], headers=_PAGE_HEADERS)

        app.add_route(path, page, include_in_schema=False)


def page_files() -> dict[Path, str]:
    """File of the chat page -> path at which it is served."""
    return {file: "/" if file.name == "index.html" else f"/{file.name}"
            for file in sorted(CHAT_PAGE.glob("*")) if file.suffix in _PAGE_TYPES}


debug_router = APIRouter(tags=["debug"])


@debug_router.get("/debug/memory")
async def memory(request: Request) -> dict[str, Any]:
    """What the KV cache's blocks are used for; see `MemoryReport`."""
    report = await Service.of(request).llm.memory_report()
    return asdict(report) | {"hit_rate": report.hit_rate}
