"""Runs a server until it is told to end."""

from __future__ import annotations

import gc
import logging
import os
import socket
import sys
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from jaxserve.errors import InvalidInputError
from jaxserve.server.app import create_app
from jaxserve.server.connection import Connection
from jaxserve.server.service import Service
from jaxserve.server.settings import ServerSettings

if TYPE_CHECKING:
    from jaxserve.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 5.0
"""What answers get to say that they were cut off, after the grace period."""


def bind(host: str, port: int) -> socket.socket:
    """Takes the address before a model is loaded for it in vain.

    Raises:
      InvalidInputError: somebody has it, or there is no such address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except OSError as error:
        found.close()
        raise InvalidInputError("port", f"{host}:{port}", f"an address that is free here ({error.strerror})") from error
    return found


def run(llm: AsyncLLM, settings: ServerSettings, listener: socket.socket) -> None:
    """Serves until SIGTERM or Ctrl-C, then lets running requests finish, and shuts the engine down.

    From the signal on no connection is accepted. After `shutdown_timeout` what still runs is ended, and its callers
    are told. A second Ctrl-C ends everything at once.
    """
    app = create_app(llm, settings)
    app.state.service.on_ready = keep_what_there_is
    config = uvicorn.Config(app, http=Connection, log_config=None, access_log=False, timeout_keep_alive=75,
                            timeout_graceful_shutdown=int(settings.shutdown_timeout + _LAST_WORDS_S))
    Server(config, app.state.service, settings.shutdown_timeout).run(sockets=[listener])
    _shut_down(llm)


class Server(uvicorn.Server):
    """uvicorn's, which ends with exit code 0 after a signal and waits for running requests only so long."""

    def __init__(self, config: uvicorn.Config, service: Service, grace_s: float):
        super().__init__(config)
        self._service, self._grace_s = service, grace_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens, and says where."""
        await super().startup(sockets)
        for listener in sockets or ():
            host, port = listener.getsockname()[:2]
            logger.info("serving %s at http://%s:%d", self._service.settings.served_model_name[0],
                        f"[{host}]" if ":" in host else host, port)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """uvicorn's own would raise the signal again in the end."""
        if self.should_exit:
            self.force_exit = True
            return
        self.should_exit = True
        logger.info("ending: running requests have %g s to finish", self._grace_s)
        self._service.stop_accepting()
        # Ending the engine tells everybody who still waits; that they know is sent before uvicorn's limit.
        timer = threading.Timer(self._grace_s, self._service.llm.shutdown)
        timer.daemon = True
        timer.start()


def keep_what_there_is() -> None:
    """What is loaded and compiled stays: to look for garbage in it takes 0.1 s, in which nothing is answered."""
    gc.collect()
    gc.freeze()


def _shut_down(llm: AsyncLLM, most_s: float = 10.0) -> None:
    """A compilation can't be interrupted, and Python would wait for its thread: then the process ends without it."""
    thread = threading.Thread(target=llm.shutdown, daemon=True)
    thread.start()
    thread.join(most_s)
    if thread.is_alive():
        logger.warning("the engine is still compiling; ending without it")
        time.sleep(0.1)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
