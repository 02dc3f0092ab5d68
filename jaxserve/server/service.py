"""What all routes share: the engine, its names, and whether it is well."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.requests import Request

import jaxserve
from jaxserve.errors import EngineDeadError
from jaxserve.server.errors import ApiError
from jaxserve.server.settings import ServerSettings

if TYPE_CHECKING:
    from jaxserve.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

_WARMING_UP = "warming up"


class Service:
    """One model that is served.

    Attributes:
      created: when the server started, in seconds since 1970.
      fingerprint: of version, model name and options: the same seed gives the same answer while it stays the same.
      on_ready: called after the warm-up, or at the start if there is none.
    """

    def __init__(self, llm: AsyncLLM, settings: ServerSettings):
        self.llm, self.settings = llm, settings
        self.created = int(time.time())
        facts = f"{jaxserve.__version__} {settings.served_model_name[0]} {llm.config!r}"
        self.fingerprint = f"fp_{hashlib.sha256(facts.encode()).hexdigest()[:10]}"
        self.on_ready: Callable[[], None] = lambda: None
        self._not_ready: str | None = _WARMING_UP if settings.warmup else None

    @classmethod
    def of(cls, request: Request) -> Service:
        service = request.app.state.service
        assert isinstance(service, cls)
        return service

    async def warm_up(self) -> None:
        """Until it has ended `why_not_ready` says so."""
        if self.settings.warmup and not await self._warms_up():
            return
        self.on_ready()
        if self._not_ready == _WARMING_UP:
            self._not_ready = None

    async def _warms_up(self) -> bool:
        try:
            seconds = await self.llm.warmup()
        except EngineDeadError:
            return False  # which `why_not_ready` tells anyhow
        except Exception as error:
            logger.exception("warm-up has failed")
            self._not_ready = f"warm-up has failed: {error}"
            return False
        logger.info("ready: warmed up in %.1f s", seconds)
        return True

    def stop_accepting(self) -> None:
        """From now on it is not ready; what runs goes on."""
        self._not_ready = "shutting down"

    @property
    def why_not_ready(self) -> str | None:
        """None: it is ready."""
        return self._not_ready if self.llm.is_running else "the engine has stopped"

    def model_name(self, asked: str | None) -> str:
        """What answers call the model.

        Raises:
          ApiError: 404, another one was asked for.
        """
        names = self.settings.served_model_name
        if asked and asked not in names:
            raise ApiError(404, f"the model {asked[:200]!r} does not exist; this server has {', '.join(names)}",
                           param="model", code="model_not_found")
        return names[0]
