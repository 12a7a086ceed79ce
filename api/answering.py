"""From a started generation to an HTTP answer, plain or streamed: the same for both endpoints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import orjson
from starlette.requests import Request
from starlette.responses import Response

from api import errors
from api.generation import Choice, Generation
from api.protocol import GenerationBody, StreamOptions
from api.sse import DONE, ClientDisconnectedError, EventStreamResponse, event, while_connected
from engine.outputs import RequestOutput


class Writer(Protocol):
    """What an endpoint adds to the frame below: its objects' names and its choices."""

    id_prefix: str
    plain_object: str
    chunk_object: str

    def plain(self, outputs: Sequence[Sequence[RequestOutput]]) -> dict[str, Any]:
        """`choices` and what stands beside them, from all outputs of each choice by index."""

    def chunks(self, choice: Choice, output: RequestOutput) -> list[dict[str, Any]]:
        """The same for the chunks that `output` makes: none where it has nothing to show."""


async def answer(
    request: Request,
    body: GenerationBody,
    generation: Generation,
    writer: Writer,
    *,
    model_name: str,
    fingerprint: str,
    time_limit: float,
) -> Response:
    """Takes over `generation` and closes it on every way out, the client's leaving included.

    `time_limit` is in seconds, 0 for no limit. Raises `ApiError`.
    """
    head = {
        "id": f"{writer.id_prefix}-{generation.id}",
        "object": writer.chunk_object if body.stream else writer.plain_object,
        "created": int(time.time()),
        "model": model_name,
        "system_fingerprint": fingerprint[:16],
    }
    if body.stream:
        events = _events(generation, writer, head, body.stream_options or StreamOptions())
        return EventStreamResponse(events, generation.aclose, time_limit)
    try:
        outputs = await while_connected(request.receive, _collect(generation, time_limit))
    except ClientDisconnectedError:
        return Response(status_code=errors.CLIENT_CLOSED_REQUEST)
    finally:
        await generation.aclose()
    whole = {**head, **writer.plain(outputs), "usage": generation.usage.body()}
    return Response(orjson.dumps(whole), media_type="application/json")


async def _collect(generation: Generation, time_limit: float) -> list[list[RequestOutput]]:
    outputs: list[list[RequestOutput]] = [[] for _ in generation.choices]
    try:
        async with asyncio.timeout(time_limit or None), aclosing(generation.batches()) as batches:
            async for batch in batches:
                for choice, output in batch:
                    outputs[choice.index].append(output)
    except TimeoutError:
        raise errors.timed_out(time_limit) from None
    return outputs


async def _events(
    generation: Generation, writer: Writer, head: dict[str, Any], options: StreamOptions
) -> AsyncGenerator[bytes, None]:
    """One item per write: what is ready together is written together."""
    with_usage = options.include_usage
    continuous = with_usage and options.continuous_usage_stats
    async with aclosing(generation.batches()) as batches:
        async for batch in batches:
            written = []
            for choice, output in batch:
                for chunk in writer.chunks(choice, output):
                    if with_usage:
                        chunk["usage"] = generation.usage.body() if continuous else None
                    written.append(event({**head, **chunk}))
            if written:
                yield b"".join(written)
    if with_usage:
        yield event({**head, "choices": [], "usage": generation.usage.body()}) + DONE
    else:
        yield DONE
