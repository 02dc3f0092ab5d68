"""A server that answers the chat API from a script, without an engine: for the page and the benchmark."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "jaxserve" / "server" / "chat_page"
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:"
TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css", ".js": "text/javascript"}

METRICS = """\
# HELP jaxserve:num_requests_running Sequences in the running batch.
# TYPE jaxserve:num_requests_running gauge
jaxserve:num_requests_running{engine="0",model_name="tiny"} 3.0
jaxserve:num_requests_waiting{engine="0",model_name="tiny"} 12.0
jaxserve:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
"""

Body = dict[str, Any]
Script = Sequence[str | float | Body]


@dataclass
class StandIn:
    """
    Attributes:
      answer: from a request's body to pieces of text; an exception's text is sent as the API's error with status 400, a
        float waits so many seconds, an object is sent as it is.
      bodies: requests so far.
      disconnected: set when a client went away from a stream.
    """

    answer: Callable[[Body], Script]
    key: str | None = None
    bodies: list[Body] = field(default_factory=list)
    disconnected: threading.Event = field(default_factory=threading.Event)
    url: str = ""
    server: ThreadingHTTPServer | None = None

    def close(self) -> None:
        """Nobody listens from now on."""
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()
            self.server = None


def chunk(delta: Body, finish_reason: str | None = None) -> Body:
    return {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta,
                                                            "finish_reason": finish_reason}]}


@contextmanager
def serve(state: StandIn) -> Iterator[StandIn]:
    """Serves on a free port of this machine until left."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def reply(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Security-Policy", POLICY)
            self.end_headers()
            self.wfile.write(body)

        def fail(self, status: int, message: str) -> None:
            self.reply(status, "application/json", json.dumps({"error": {"message": message}}).encode())

        def refused(self) -> bool:
            if state.key is None or self.headers["Authorization"] == f"Bearer {state.key}":
                return False
            self.fail(401, "the API key is missing or wrong")
            return True

        def do_GET(self) -> None:
            name = "index.html" if self.path == "/" else self.path[1:]
            files = {file.name: file for file in PAGE.iterdir()}
            if name in files:
                self.reply(200, TYPES[files[name].suffix], files[name].read_bytes())
            elif name == "metrics":
                self.reply(200, "text/plain", METRICS.encode())
            elif name == "v1/models":
                if not self.refused():
                    with suppress(OSError):  # a page that was closed
                        self.reply(200, "application/json", json.dumps({"data": [{"id": "tiny"}]}).encode())
            else:
                self.fail(404, f"no {self.path}")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.refused():
                return
            state.bodies.append(body)
            try:
                pieces = state.answer(body)
            except ValueError as error:
                self.fail(400, str(error))
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            try:
                self.stream(pieces, chat="messages" in body)
            except OSError:
                state.disconnected.set()

        def stream(self, pieces: Script, chat: bool) -> None:
            texts = 0
            for piece in pieces:
                if isinstance(piece, float):
                    time.sleep(piece)
                    continue
                if isinstance(piece, str):
                    texts += 1
                    piece = chunk({"content": piece}) if chat else {"choices": [{"index": 0, "text": piece}]}
                self.send(json.dumps(piece))
            self.send(json.dumps(chunk({}, "stop")))
            self.send(json.dumps({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": texts}}))
            self.send("[DONE]")

        def send(self, data: str) -> None:
            self.wfile.write(f"data: {data}\n\n".encode())
            self.wfile.flush()

    state.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.server.daemon_threads = True
    state.url = f"http://127.0.0.1:{state.server.server_address[1]}"
    threading.Thread(target=state.server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield state
    finally:
        state.close()
