"""The stream of one request's events, from the engine loop to whoever asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from engine.outputs import RequestOutput
from engine.request import Request


class RequestStream:
    """Async iterator over one request's outputs; ends after the one with a finish reason.

    Cancelling an iteration loses nothing: the next one continues. `aclose` aborts the request if
    it has not finished.
    """

    def __init__(self, request: Request, abort: Callable[[str], Awaitable[None]]) -> None:
        self._request = request
        self._abort = abort
        self._outputs: asyncio.Queue[RequestOutput] = asyncio.Queue()
        self._ended = False

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        return list(self._request.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return self._request.num_prompt_tokens

    def put(self, output: RequestOutput) -> None:
        """For the engine: the next event."""
        self._outputs.put_nowait(output)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._ended:
            raise StopAsyncIteration
        output = await self._outputs.get()
        self._ended = output.finish_reason is not None
        return output

    async def aclose(self) -> None:
        """Abort unless finished; no event follows. Safe to call twice."""
        if not self._ended:
            self._ended = True
            await self._abort(self.request_id)
