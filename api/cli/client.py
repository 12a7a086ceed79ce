"""Reading a server's answers: event streams, and errors in OpenAI's shape."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx

DONE = "[DONE]"


def event_data(line: str) -> str | None:
    """The payload of one line of an event stream; None for blank lines, comments, other fields."""
    if not line.startswith("data:"):
        return None
    return line[len("data:") :].strip()


def iter_events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON events of a stream up to `[DONE]`.

    Raises `ConnectionError` if the stream ends without it: an answer cut short must not pass for
    a whole one.
    """
    for line in response.iter_lines():
        data = event_data(line)
        if data == DONE:
            return
        if data is not None:
            yield json.loads(data)
    raise ConnectionError("the server closed the stream before its end")


async def aiter_events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """`iter_events` for an asynchronous response."""
    async for line in response.aiter_lines():
        data = event_data(line)
        if data == DONE:
            return
        if data is not None:
            yield json.loads(data)
    raise ConnectionError("the server closed the stream before its end")


def error_message(status: int, body: bytes) -> str:
    """What an unsuccessful answer says, in one line."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body.decode("utf-8", "replace").strip()[:200] or "no explanation"
    return f"HTTP {status}: {message}"


def describe(error: Exception, url: str) -> str:
    """A network error in words that say what to do."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return f"cannot reach {url}: start a server with `overwinter serve`, or give --url"
    if isinstance(error, httpx.UnsupportedProtocol | httpx.InvalidURL):
        return f"--url {url} is not an http:// or https:// address"
    return f"{url}: {str(error) or type(error).__name__}"


def headers(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def base_url(url: str) -> str:
    """`url` without a trailing slash or `/v1`, as people paste it from other clients."""
    return url.rstrip("/").removesuffix("/v1")
