"""The engine's public face: submit, stream, abort, close.

    engine = await AsyncEngine.from_config(EngineConfig(model=..., cache_dir=...))
    async for output in engine.generate("Once", SamplingParams(max_tokens=8), request_id="1"):
        print(output.text, end="")
    await engine.close()

One task, started here and ended by `close`, owns all engine state. Other tasks of the same event
loop only put requests into its inbox and read streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from engine.assembly import EngineParts, assemble
from engine.block_hash import root_hash
from engine.cache_control import CacheControl, CacheSelector
from engine.config import EngineConfig
from engine.core import LiveRequest
from engine.detokenizer import Detokenizer
from engine.errors import (
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
)
from engine.explanation import Explainer, SaltsSeen
from engine.idle_prefill import IdlePrefill, TokenSource
from engine.outputs import FinishReason, RequestOutput, RequestTimes
from engine.prefetch import Prefetcher
from engine.request import Request
from engine.request_stream import RequestStream
from engine.sampling_params import SamplingParams
from engine.stats import EngineStats
from offload.tier import BlockHash

logger = logging.getLogger(__name__)

ProgressFn = Callable[[str, float], None]
# How often an idle engine checks its conservation laws: the check walks every block.
IDLE_CHECK_SECONDS = 60.0
# A hung disk wakes nobody: while saves are under way their deadlines are looked at this often.
OFFLOAD_POLL_SECONDS = 1.0
# A flush at shutdown waits this long for a slow disk, then gives up what is not yet stored.
CLOSE_FLUSH_SECONDS = 30.0


class AsyncEngine:
    """Continuous batching over one model. Use `from_config`; every method belongs to its loop."""

    def __init__(self, config: EngineConfig, parts: EngineParts) -> None:
        self.config = config
        self.model = parts.info
        self.tokenizer = parts.tokenizer
        self.transcripts = parts.transcripts
        self.fingerprint = parts.fingerprint.hex()
        self.dead_reason: str | None = None
        self.max_request_tokens = parts.kv.capacity_tokens(parts.info.max_model_len)
        self._parts = parts
        self._core = parts.core
        self._arrivals: deque[LiveRequest] = deque()
        self._aborts: deque[str] = deque()
        self._known_ids: set[str] = set()
        self._num_arrivals = 0
        self._random = random.Random(config.seed)
        self._accepting = True
        self._stopping = False
        self._ends_idle_prefill = False  # with the next round
        self._next_check = 0.0
        self._wake = asyncio.Event()
        self._idle_prefill = IdlePrefill(
            parts.core, self.max_request_tokens, wake=lambda: self._wake.set()
        )
        self._round_waiters: list[asyncio.Future[None]] = []
        self._drained = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._salts = SaltsSeen()
        self._explainer = Explainer(self._core.scheduler, parts.fingerprint, self._salts)
        self._cache = CacheControl(
            parts.core,
            fingerprint=parts.fingerprint,
            block_bytes=parts.block_bytes,
            sessions=parts.sessions,
            side=parts.side,
            transcripts=parts.transcripts,
            prefetcher=Prefetcher(
                parts.core.scheduler,
                stall_seconds=config.load_deadline,
                is_alive=lambda: not self._task.done(),
            ),
            pump=self._round,
        )
        parts.wake.bind(self._wake_from_thread)
        parts.offload.probe()
        self._closing: asyncio.Task[None] | None = None
        self._task = asyncio.create_task(self._run(), name="engine-loop")

    @classmethod
    async def from_config(
        cls, config: EngineConfig, progress: ProgressFn | None = None
    ) -> AsyncEngine:
        """Load the model off the event loop. Raises `StartupError` with one clear line."""
        report = progress or (lambda phase, percent: None)
        parts = await assemble(config, report)
        return cls(config, parts)

    # --- requests ---------------------------------------------------------------------------

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
        prompt_cache_key: str | None = None,
        add_special_tokens: bool = True,
    ) -> AsyncIterator[RequestOutput]:
        """Submit and iterate; leaving the iteration early aborts the request.

        Raises as `submit` does, at the first iteration.
        """
        stream = self.submit(
            prompt,
            params,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            prompt_cache_key=prompt_cache_key,
            add_special_tokens=add_special_tokens,
        )
        try:
            async for output in stream:
                yield output
        finally:
            await stream.aclose()

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
        prompt_cache_key: str | None = None,
        add_special_tokens: bool = True,
    ) -> RequestStream:
        """Validate and enqueue. `prompt_cache_key` names a conversation; it never enters the hash.

        Raises InvalidRequestError, QueueFullError, EngineClosedError or EngineDeadError at once;
        after that the stream ends in exactly one output with a finish reason.
        """
        self._check_alive()
        self.check_capacity(1)
        token_ids = self._token_ids(prompt, add_special_tokens)
        max_tokens = self._resolve_max_tokens(len(token_ids), params)
        if request_id in self._known_ids:
            raise InvalidRequestError(
                f"request_id {request_id!r} is in use by a live request", "request_id"
            )
        if any(token >= self.model.vocab_size for token in params.logit_bias):
            raise InvalidRequestError(
                f"logit_bias names a token outside the vocabulary of {self.model.vocab_size}",
                "logit_bias",
            )
        eos = () if params.ignore_eos else self.model.eos_token_ids
        self._num_arrivals += 1
        request = Request(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=params,
            max_tokens=max_tokens,
            stop_ids=frozenset((*eos, *params.stop_token_ids)),
            seed=self._seed(params),
            root_hash=self.space(cache_salt),
            arrival_order=self._num_arrivals,
            salt=cache_salt,
            priority=priority,
            times=RequestTimes(arrival=time.monotonic()),
        )
        stream = RequestStream(request, self.abort)
        self._salts.note(cache_salt)
        self._enqueue(request, stream, prompt_cache_key)
        return stream

    def space(self, cache_salt: str | None) -> BlockHash:
        """What separates tenants: the root of every chain of blocks under this salt."""
        return root_hash(self._parts.fingerprint, cache_salt)

    def prefill_when_idle(
        self, source: TokenSource, cache_salt: str | None, prompt_cache_key: str | None = None
    ) -> None:
        """Compute the KV of a prompt ahead, should the engine come to have nothing else to do. With
        a key it belongs to that conversation.

        `source` is its ids, or a function that finds them out and is called on a thread then. Under
        load it is dropped sooner or later, and so is whatever waits when the caches are reset or
        the engine closes; nothing is reported but counters.
        """
        # The answer is a part of that prompt, and would be stored as one.
        if self._accepting and self.healthy and not self.config.offload_prompt_only:
            self._idle_prefill.put(source, self.space(cache_salt), prompt_cache_key)

    def _enqueue(self, request: Request, stream: RequestStream, cache_key: str | None) -> None:
        self._known_ids.add(request.request_id)

        def emit(output: RequestOutput) -> None:
            if output.finish_reason is not None:
                self._known_ids.discard(output.request_id)
            stream.put(output)

        detokenizer = Detokenizer(
            self.tokenizer.stream_decoder(request.prompt_token_ids),
            request.params.stop,
            request.params.min_tokens,
        )
        self._arrivals.append(LiveRequest(request, detokenizer, emit, cache_key))
        self._wake.set()

    def _token_ids(self, prompt: str | Sequence[int], add_special_tokens: bool) -> list[int]:
        if isinstance(prompt, str):
            token_ids = self.tokenizer.encode(prompt, add_special_tokens)
        else:
            token_ids = list(prompt)
        if not token_ids:
            raise InvalidRequestError("prompt is empty: give at least one token", "prompt")
        vocab_size = self.model.vocab_size
        bad = next((token for token in token_ids if not 0 <= token < vocab_size), None)
        if bad is not None:
            raise InvalidRequestError(
                f"prompt holds token id {bad}, outside the vocabulary of {vocab_size}", "prompt"
            )
        return token_ids

    def _resolve_max_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """What the request may generate; refuses what could never fit."""
        limit = self.max_request_tokens
        wanted = params.max_tokens
        needed = num_prompt_tokens + (1 if wanted is None else wanted)
        if needed > limit:
            what = (
                "the model's maximum context length"
                if limit == self.model.max_model_len
                else "what the KV pool holds (--kv-memory)"
            )
            asked = "at least 1" if wanted is None else str(wanted)
            raise InvalidRequestError(
                f"the request needs {needed} tokens ({num_prompt_tokens} in the prompt, {asked} to"
                f" generate), but {what} is {limit} tokens; shorten the prompt or lower max_tokens",
                "prompt" if num_prompt_tokens >= limit else "max_tokens",
                "context_length_exceeded",
            )
        return limit - num_prompt_tokens if wanted is None else wanted

    def _seed(self, params: SamplingParams) -> int:
        seed = self._random.getrandbits(64) if params.seed is None else params.seed
        return seed & (2**64 - 1)

    def check_capacity(self, num_sequences: int) -> None:
        """Raises QueueFullError if that many more sequences cannot be queued."""
        scheduler = self._core.scheduler
        # What runs in idle time gives its seat up.
        num_active = scheduler.num_active - self._idle_prefill.is_live
        free_seats = max(0, self.config.max_num_seqs - num_active)
        waiting = len(scheduler.waiting) + len(self._arrivals)
        if waiting + num_sequences > self.config.max_queue + free_seats:
            raise QueueFullError(
                f"the queue is full: {waiting} sequences wait already, {num_sequences} more would"
                f" exceed --max-queue {self.config.max_queue}; try again later"
            )

    def _check_alive(self) -> None:
        if self.dead_reason is not None:
            raise EngineDeadError(f"the engine has failed: {self.dead_reason}")
        if not self._accepting:
            raise EngineClosedError("the server is shutting down and takes no new requests")

    async def abort(self, request_id: str) -> None:
        """Ask for `request_id` to end; takes effect between two steps. Unknown ids are ignored."""
        if request_id in self._known_ids:
            self._aborts.append(request_id)
            self._wake.set()

    # --- life -------------------------------------------------------------------------------

    @property
    def healthy(self) -> bool:
        """False once the engine loop has failed; it does not recover."""
        return self.dead_reason is None

    def stop_intake(self) -> None:
        """Refuse new requests from now on; what was accepted goes on."""
        self._accepting = False

    async def close(self, drain_timeout: float = 0.0) -> None:
        """Drain for up to `drain_timeout` seconds, abort the rest, flush the tiers, stop.

        Every live request gets its terminal event before this returns. Safe to call again: later
        calls wait for the first. Cancelling a caller does not stop the closing.
        """
        self.stop_intake()
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(drain_timeout), name="engine-close")
        await asyncio.shield(self._closing)

    async def _close(self, drain_timeout: float) -> None:
        if not self._task.done():
            self._stop_idle_prefill()
            await self._drain(drain_timeout)
            await self._flush_for_close()
            self._stopping = True
            self._wake.set()
            await self._task
        await self._parts.close()

    async def _drain(self, drain_timeout: float) -> None:
        deadline = self._loop.time() + drain_timeout
        while (self._known_ids or self._idle_prefill.is_live) and not self._task.done():
            left = deadline - self._loop.time()
            if left <= 0.0:
                for request_id in list(self._known_ids):
                    await self.abort(request_id)
            self._drained.clear()
            await _wait(self._drained, max(left, 1.0))

    async def _flush_for_close(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_FLUSH_SECONDS):
                await self.cache_flush()
        except TimeoutError:
            logger.warning("gave up flushing the KV tiers after %.0f s", CLOSE_FLUSH_SECONDS)
        except EngineDeadError:
            pass  # said when it died

    async def _run(self) -> None:
        """The engine loop. A failure here is the engine's end: everyone is told, now and later."""
        try:
            while not self._stopping:
                self._take_inbox()
                did_something = await self._core.step()
                self._finish_round()
                if did_something or self._arrivals or self._aborts:
                    continue
                if self._core.num_live or not (self._idle_prefill.start() or await self._audit()):
                    await self._sleep()
        except Exception as error:
            logger.exception("the engine loop failed")
            self.dead_reason = f"{type(error).__name__}: {error}"
            while self._arrivals:
                self._core.add(self._arrivals.popleft())
            self._core.fail_all(f"the engine has failed: {self.dead_reason}")
        finally:
            self._finish_round()

    def _take_inbox(self) -> None:
        self._wake.clear()
        if not self._accepting:
            self._core.stop_audit()
        if self._arrivals or self._ends_idle_prefill:
            self._idle_prefill.give_way()
        self._ends_idle_prefill = False
        while self._arrivals:
            self._core.add(self._arrivals.popleft())
        while self._aborts:
            self._core.abort(self._aborts.popleft())

    def _finish_round(self) -> None:
        waiters, self._round_waiters = self._round_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        if not self._known_ids:
            self._drained.set()

    async def _audit(self) -> bool:
        """With nothing else to do, a pass of checking loads; False if there is none to do."""
        return self._accepting and await self._core.audit()

    def _stop_idle_prefill(self) -> None:
        """Drop what waits, end what runs: between two steps, like every abort."""
        self._idle_prefill.clear()
        self._ends_idle_prefill = True
        self._wake.set()

    async def _sleep(self) -> None:
        """Until somebody calls, a transfer ends or a deadline passes; idle, there is none."""
        if not self._core.num_live:
            self._check_when_idle()
        timeouts = [] if self._core.offload.idle() else [OFFLOAD_POLL_SECONDS]
        next_look = self._core.offload.next_look()
        if next_look is not None:
            timeouts.append(next_look)
        deadline = self._core.next_deadline()
        if deadline is not None:
            timeouts.append(max(0.0, deadline - time.monotonic()))
        await _wait(self._wake, min(timeouts, default=None))

    def _check_when_idle(self) -> None:
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + IDLE_CHECK_SECONDS
        try:
            self._core.check()
        except AssertionError:
            # Serving goes on: a leak costs capacity, while correctness rests on verified loads.
            logger.exception("the KV accounting does not add up; please report this")
            self._core.counters.failed_checks += 1

    def _wake_from_thread(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: a hung call came back late
            self._loop.call_soon_threadsafe(self._wake.set)

    async def _round(self) -> None:
        """Let the loop run one round of transfers. Cancelling it leaves nothing behind."""
        if self._task.done():
            raise EngineDeadError(f"the engine has stopped: {self.dead_reason or 'closed'}")
        waiter = self._loop.create_future()
        self._round_waiters.append(waiter)
        self._wake.set()
        await waiter

    # --- cache and sight --------------------------------------------------------------------

    async def cache_flush(self) -> dict[str, Any]:
        """Bring every committed block into every tier, synced: `{saved: {...}, failed: {...}}`."""
        return await self._cache.flush()

    async def cache_reset(
        self,
        tiers: Sequence[str] | None = None,
        *,
        cache_salt: str | None = None,
        prompt_cache_key: str | None = None,
    ) -> dict[str, int]:
        """Forget stored blocks in `tiers` (None: all), durably; blocks dropped per tier. With all
        tiers go the records beside them.

        With a salt, those of that salt alone, earlier runs' included; with a key, those known of
        that conversation (of that salt), blocks that it shares with others included.
        InvalidRequestError for an unknown tier, before anything is dropped; OffloadError where a
        restart may find old blocks, though none is served until then.
        """
        self._stop_idle_prefill()
        dropped = await self._cache.reset(tiers, cache_salt, prompt_cache_key)
        self._wake.set()
        return dropped

    def cache_pin(
        self, selector: CacheSelector, ttl_seconds: float | None = None
    ) -> dict[str, int]:
        """Keep what tiers below the device hold of it now from eviction, for an hour unless said
        otherwise: `{blocks, bytes}`. Pinning again replaces the pin.

        At most half of each tier can be pinned. InvalidRequestError where there is no such tier.
        """
        return self._cache.pin(selector, ttl_seconds)

    def cache_unpin(self, selector: CacheSelector) -> dict[str, int]:
        """End a pin, named as it was made: `{blocks, bytes}` that it held."""
        return self._cache.unpin(selector)

    async def cache_prefetch(
        self, selector: CacheSelector, ttl_seconds: float | None = None
    ) -> dict[str, int]:
        """Bring its blocks to the device or the CPU tier as far as there is room that nobody
        needs: `{blocks, bytes}` that are nearer now. With a TTL they are pinned, too.

        Returns when they have come. Cancelled, it gives up what has not. Raises as `cache_pin`.
        """
        self._check_alive()
        return await self._cache.prefetch(selector, ttl_seconds)

    async def cache_explain(
        self,
        token_ids: Sequence[int],
        cache_salt: str | None = None,
        *,
        is_admin: bool = False,
        wants_prompt_logprobs: bool = False,
    ) -> dict[str, Any]:
        """The body of POST /cache/explain: what a request for these tokens would hit, and why no
        more. Runs nothing. Only an administrator is told of other salts."""
        request = Request(
            request_id="explain",
            prompt_token_ids=token_ids,
            params=SamplingParams(prompt_logprobs=0 if wants_prompt_logprobs else None),
            max_tokens=1,
            stop_ids=frozenset(),
            seed=0,
            root_hash=self.space(cache_salt),
            arrival_order=0,
        )
        return await self._explainer.explain(request, cache_salt, is_admin=is_admin)

    def cache_stats(self) -> dict[str, Any]:
        """The body of GET /cache/stats."""
        return self._cache.stats()

    def stats(self) -> EngineStats:
        """A snapshot of all counters and gauges; what it holds are copies."""
        stats = self._core.stats()
        stats.num_waiting += len(self._arrivals)
        transcripts = self.transcripts.stats()
        stats.transcript_hits = transcripts.hits
        stats.transcript_misses = transcripts.misses
        stats.transcript_tokens = transcripts.reused_tokens
        stats.transcript_dropped = transcripts.dropped
        stats.transcript_entries = transcripts.entries
        stats.transcript_bytes = transcripts.bytes
        stats.transcript_pending = transcripts.pending
        return stats


async def _wait(event: asyncio.Event, seconds: float | None) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass


__all__ = ["AsyncEngine", "CacheSelector", "FinishReason", "RequestStream"]
