"""Prompts computed ahead, while nobody asks for anything: the KV that a next turn will want.

One at a time, in small steps, and only while no request lives: the next one to arrive waits for at
most one such step. What comes of it is KV like any other, committed and stored; no user's request
is counted. Whatever stands in the way costs the prefill and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.core import EngineCore, LiveRequest
from engine.detokenizer import Detokenizer
from engine.outputs import RequestOutput, RequestTimes
from engine.request import Request
from engine.tokenizer import TokenStream
from offload.tier import BlockHash

logger = logging.getLogger(__name__)

MAX_QUEUED = 16  # the oldest is dropped
# Where more than this is missing, the prompt's KV went long ago and its turn is not near.
MAX_MISSING_TOKENS = 512

# Known ids, or a function that finds them out: called on a thread, when their turn comes.
TokenSource = Sequence[int] | Callable[[], Sequence[int]]


@dataclass(frozen=True, slots=True)
class _Prompt:
    source: TokenSource
    root_hash: BlockHash
    cache_key: str | None  # of the conversation that it belongs to


class IdlePrefill:
    """The queue and the one request under way; engine loop only."""

    def __init__(self, core: EngineCore, max_tokens: int, wake: Callable[[], None]) -> None:
        """`max_tokens` is the longest request that the engine takes; `wake` makes its loop look."""
        self._core = core
        self._max_tokens = max_tokens
        self._wake = wake
        self._queue: deque[_Prompt] = deque(maxlen=MAX_QUEUED)
        self._ready: _Prompt | None = None  # its ids are known
        self._reading: asyncio.Future[Sequence[int]] | None = None
        self._live: Request | None = None
        self._num_started = 0

    def put(self, source: TokenSource, root_hash: BlockHash, cache_key: str | None) -> None:
        """Queue a prompt; under load it waits, and is dropped when too many come after it."""
        self._queue.append(_Prompt(source, root_hash, cache_key))
        self._wake()

    @property
    def is_live(self) -> bool:
        """Whether a request of its own is under way; `give_way` ends it."""
        return self._live is not None

    def clear(self) -> None:
        """Forget all prompts but the one under way, which is the caller's to abort."""
        self._queue.clear()
        self._ready = None
        if self._reading is not None:
            self._reading.cancel()  # the thread ends by itself, and nobody takes its result
            self._reading = None

    def give_way(self) -> None:
        """A request has come, or nothing is wanted any more. Between two steps only."""
        if self._live is not None:
            self._core.abort(self._live.request_id)

    def start(self) -> bool:
        """The engine is idle: begin with the next prompt. False if there is no work for a step."""
        if self._live is not None or self._reading is not None:
            return False
        if self._ready is not None:
            prompt, self._ready = self._ready, None
            assert not callable(prompt.source)
            return self._submit(prompt.source, prompt.root_hash, prompt.cache_key)
        if self._queue:
            prompt = self._queue.popleft()
            if callable(prompt.source):
                self._read(prompt, prompt.source)
            else:
                self._ready = prompt
                self._wake()
        return False

    def _read(self, prompt: _Prompt, source: Callable[[], Sequence[int]]) -> None:
        def done(future: asyncio.Future[Sequence[int]]) -> None:
            if future.cancelled():
                return
            error = future.exception()
            if future is not self._reading:  # cleared meanwhile
                return
            self._reading = None
            if error is not None:
                # A template may refuse what nobody has said yet.
                logger.debug("nothing to prefill: %s", error)
            else:
                self._ready = replace(prompt, source=future.result())
            self._wake()

        self._reading = asyncio.get_running_loop().run_in_executor(None, source)
        self._reading.add_done_callback(done)

    def _submit(
        self, token_ids: Sequence[int], root_hash: BlockHash, cache_key: str | None
    ) -> bool:
        """Whole blocks alone: KV behind the last one is not kept."""
        block_size = self._core.kv.block_size
        num_tokens = len(token_ids) // block_size * block_size
        if not 0 < num_tokens < self._max_tokens:
            return self._next()
        # One token more than the blocks, so that the match may cover the last of them too.
        hit = self._core.kv.match(self._request([*token_ids[:num_tokens], 0], root_hash))
        missing = num_tokens - hit.num_held * block_size
        if not 0 < missing <= MAX_MISSING_TOKENS:
            return self._next()
        request = self._live = self._request(token_ids[:num_tokens], root_hash)

        def emit(output: RequestOutput) -> None:
            if output.finish_reason is not None:
                self._live = None
                self._wake()

        nobody_reads = Detokenizer(TokenStream(), (), 0)
        self._core.add(LiveRequest(request, nobody_reads, emit, cache_key))
        return True

    def _next(self) -> bool:
        if self._queue:
            self._wake()
        return False

    def _request(self, token_ids: Sequence[int], root_hash: BlockHash) -> Request:
        self._num_started += 1
        request = Request.of_nobody(f"idle-prefill-{self._num_started}", token_ids, root_hash)
        request.times = RequestTimes(arrival=time.monotonic())
        request.is_background = True
        return request
