"""Work that ends with its client, and streams that always end what they began."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from api.sse import ClientDisconnectedError, EventStreamResponse, event, while_connected
from engine.errors import QueueFullError


class Client:
    """The ASGI side of a client that disconnects when told."""

    def __init__(self) -> None:
        self.leave = asyncio.Event()
        self.sent: list[dict[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


def test_an_event_is_one_line_of_json() -> None:
    assert event({"text": "a\nb"}) == b'data: {"text":"a\\nb"}\n\n'


async def test_work_gives_its_result_while_the_client_stays() -> None:
    async def work() -> int:
        return 7

    assert await while_connected(Client().receive, work()) == 7


async def test_what_work_raises_comes_through() -> None:
    async def work() -> None:
        raise QueueFullError("full")

    with pytest.raises(QueueFullError):
        await while_connected(Client().receive, work())


async def test_work_is_cancelled_and_awaited_when_the_client_leaves() -> None:
    client = Client()
    cleaned = False

    async def work() -> None:
        nonlocal cleaned
        client.leave.set()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            cleaned = True

    with pytest.raises(ClientDisconnectedError):
        await while_connected(client.receive, work())
    assert cleaned


async def stream(client: Client, chunks: AsyncGenerator[bytes, None], time_limit: float) -> int:
    """Serves `chunks` to `client`; how often they were closed."""
    closed = 0

    async def close() -> None:
        nonlocal closed
        closed += 1

    response = EventStreamResponse(chunks, close, time_limit)
    await response({"type": "http"}, client.receive, client.send)
    return closed


async def test_every_chunk_is_one_write() -> None:
    async def chunks() -> AsyncGenerator[bytes, None]:
        yield b"one"
        yield b"two"

    client = Client()
    assert await stream(client, chunks(), 0.0) == 1
    assert [message.get("body") for message in client.sent] == [None, b"one", b"two", b""]
    assert [message.get("more_body") for message in client.sent] == [None, True, True, False]


async def test_an_error_in_mid_stream_is_an_event_and_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def chunks() -> AsyncGenerator[bytes, None]:
        yield b"one"
        raise RuntimeError("secret")

    client = Client()
    with caplog.at_level(logging.ERROR):
        assert await stream(client, chunks(), 0.0) == 1
    assert client.body.startswith(b'onedata: {"error":{"message":"The server failed')
    assert b"secret" not in client.body
    assert "secret" in caplog.text  # the operator gets to see it


async def test_the_time_limit_ends_a_stream() -> None:
    async def chunks() -> AsyncGenerator[bytes, None]:
        yield b"one"
        await asyncio.sleep(60)

    client = Client()
    assert await stream(client, chunks(), 0.01) == 1
    assert b"request_timeout" in client.body


async def test_a_client_gone_before_the_first_chunk_still_closes_the_stream() -> None:
    """A generator that was never begun runs no `finally`: the close must not depend on it."""

    async def chunks() -> AsyncGenerator[bytes, None]:
        yield b"never"

    class Stuck(Client):
        async def send(self, message: Any) -> None:
            self.leave.set()
            await asyncio.sleep(60)

    assert await stream(Stuck(), chunks(), 0.0) == 1
