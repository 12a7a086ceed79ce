"""Work that ends when its client goes away, and server-sent events on top of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api import errors

logger = logging.getLogger(__name__)

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class ClientDisconnectedError(Exception):
    """The client closed its connection before it had its answer."""


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled as soon as the client disconnects.

    The request's body must have been read. Raises `ClientDisconnectedError`, and what `work`
    raises. Cancellation cancels `work` and waits until it has cleaned up.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnectedError
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStreamResponse(Response):
    """Sends each item of `chunks` (whole events, bytes) as one write.

    An error in mid-stream becomes an event `{"error": ...}` and ends the stream. `close` is awaited
    on every way out: at the end, on errors, over `time_limit` seconds (0: no limit), and when the
    client disconnects. It cannot be left to a `finally` in `chunks`: a generator that was never
    begun, because the client left first, never gets there.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        close: Callable[[], Awaitable[None]],
        time_limit: float = 0.0,
    ) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._chunks = chunks
        self._close = close
        self._time_limit = time_limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_all(send))
        except ClientDisconnectedError:
            logger.debug("The client left in mid-stream")
        finally:
            await self._chunks.aclose()
            await self._close()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        last = b""
        try:
            async with asyncio.timeout(self._time_limit or None):
                await send(start)
                async for chunk in self._chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except TimeoutError:
            last = event(errors.timed_out(self._time_limit).body())
        except Exception as error:
            told = errors.from_engine(error)
            if told.status == 500:
                logger.error("A stream failed", exc_info=error)
            last = event(told.body())
        await send({"type": "http.response.body", "body": last, "more_body": False})
