"""An HTTP server that answers with what a test has scripted, byte for byte.

For what a real server cannot be made to do: cut a stream short, miscount, refuse.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# (status, body). The connection is closed after it, whatever the body says.
Answer = tuple[int, bytes]
Handler = Callable[[dict[str, Any]], Answer]


def events(*items: dict[str, Any], done: bool = True) -> bytes:
    """`items` as an event stream, with its end mark unless `done` is false."""
    stream = b"".join(b"data: " + json.dumps(item).encode() + b"\n\n" for item in items)
    return stream + (b"data: [DONE]\n\n" if done else b"")


def error(message: str) -> bytes:
    return json.dumps({"error": {"message": message}}).encode()


@dataclass
class ScriptedServer:
    url: str
    routes: dict[str, Handler]
    requests: list[tuple[str, dict[str, Any], str | None]] = field(default_factory=list)

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for asked, body, _ in self.requests if asked == path]


@contextlib.contextmanager
def scripted(routes: dict[str, Handler]) -> Iterator[ScriptedServer]:
    """A server that answers `routes` (path to handler of the JSON body) on a free port."""

    class Request(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            length = int(self.headers["content-length"])
            self._answer(json.loads(self.rfile.read(length)))

        def _answer(self, body: dict[str, Any]) -> None:
            server.requests.append((self.path, body, self.headers["authorization"]))
            status, answer = routes[self.path](body)
            self.send_response(status)
            self.send_header("connection", "close")
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Request)
    server = ScriptedServer(f"http://127.0.0.1:{listener.server_address[1]}", routes)
    thread = threading.Thread(target=listener.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()
