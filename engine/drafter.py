"""Drafters guess tokens; the engine verifies them, so a drafter can cost time but never truth.

`find_drafter_class` finds what a user named, `build_drafter` makes one. `GuardedDrafter` stands
between it and the planner and turns everything a drafter can do wrong into a counter and a step
without drafts.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import logging
import math
import queue
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Integral
from typing import Any, Protocol

from engine.errors import StartupError
from engine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

DEFAULT_DEADLINE = 0.25  # seconds
FIRST_PAUSE = 1.0  # seconds without drafts after a call that was late
LONGEST_PAUSE = 60.0
MAX_PENDING_FINISHES = 4096

_CLASS_SPEC = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_AVAILABLE = "this version takes 'off' or 'package.module:Class'"


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What a drafter learns about one request."""

    request_id: str
    token_ids: Sequence[int]  # prompt and output so far; never changes, slices are tuples
    max_tokens: int  # drafts of any use at this step
    salt: str | None  # cache salt: what is learnt from one salt must not show in another
    num_prompt_tokens: int = 0
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0  # the target draws the token at position p with the noise of (seed, p)


class Drafter(Protocol):
    """Built as `DrafterClass(vocab_size=..., max_tokens=...)`; called from one thread only.

    One that learns from what was generated may have a method `remember(context)` too: it is called
    with all tokens of a request (`max_tokens` 0) right before that request's `finish`.
    """

    def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        """For each context at most its `max_tokens` guesses of what follows; [] for none."""
        ...

    def finish(self, request_id: str) -> None:
        """The request is over; it will not be proposed for again."""
        ...


def find_drafter_class(spec: str) -> type | None:
    """The class that `--speculative` names, None for "off"; needs no model, so it comes first.

    Raises StartupError, naming cause and mend, for whatever keeps it from being one.
    """
    if spec == "off":
        return None
    if spec == "ngram" or spec.partition(":")[0] == "draft":
        raise StartupError(f"--speculative {spec} is not available yet: {_AVAILABLE}")
    if not _CLASS_SPEC.fullmatch(spec):
        raise StartupError(f"--speculative {spec} names no drafter: {_AVAILABLE}")
    module_name, _, class_name = spec.partition(":")
    try:
        drafter_class = getattr(importlib.import_module(module_name), class_name, None)
    except ModuleNotFoundError as error:
        raise StartupError(
            f"--speculative {spec}: no module named {error.name!r} is found; install it, or put "
            "its directory on PYTHONPATH"
        ) from error
    except (Exception, SystemExit) as error:  # somebody else's module body runs here
        raise StartupError(
            f"--speculative {spec}: importing {module_name} failed with {_one_line(error)}; mend "
            "the module or choose 'off'"
        ) from error
    if not inspect.isclass(drafter_class):
        raise StartupError(
            f"--speculative {spec}: module {module_name} has no class {class_name}; check the name"
        )
    for method in ("propose", "finish"):
        function = getattr(drafter_class, method, None)
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise StartupError(
                f"--speculative {spec}: {class_name} needs a plain (not async) method {method}"
            )
    return drafter_class


def build_drafter(spec: str, drafter_class: type, *, vocab_size: int, max_tokens: int) -> Drafter:
    """An instance of what `find_drafter_class(spec)` found. Raises StartupError if that fails."""
    build: Any = drafter_class
    try:
        drafter: Drafter = build(vocab_size=vocab_size, max_tokens=max_tokens)
    except (Exception, SystemExit) as error:
        call = f"{drafter_class.__name__}(vocab_size={vocab_size}, max_tokens={max_tokens})"
        raise StartupError(
            f"--speculative {spec}: {call} failed with {_one_line(error)}; mend the class or "
            "choose 'off'"
        ) from error
    return drafter


class DraftFailure(StrEnum):
    """Why drafts were lost. Each is counted once per call, or per context where only it is hit."""

    RAISED = "raised"  # propose or finish raised
    SLOW = "slow"  # the call missed the deadline
    STUCK = "stuck"  # no call was made: the late one still runs, or its pause is not over
    WRONG_LENGTH = "wrong_length"  # not one list per context
    WRONG_TYPE = "wrong_type"  # not lists, or not lists of ints
    TOO_MANY = "too_many"  # more than the context's max_tokens
    OUT_OF_VOCABULARY = "out_of_vocabulary"
    UNFINISHED = "unfinished"  # a `finish` was dropped: too many wait behind a stuck call


class GuardedDrafter:
    """A drafter that can do no harm: every fault costs a counter and its drafts, nothing else.

    The drafter runs in one thread of its own, a daemon, so that a call that never returns keeps
    neither the planner nor the process. After a late call there are no drafts until it has
    returned and a pause is over, which doubles with each late call in a row: the deadline is paid
    ever more rarely. Use it from one event loop.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        vocab_size: int,
        deadline: float = DEFAULT_DEADLINE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`deadline` is in seconds and covers one call of `propose`; `clock` times the pauses."""
        self._drafter = drafter
        self._vocab_size = vocab_size
        self._deadline = deadline
        self._clock = clock
        self._counts: Counter[DraftFailure] = Counter()
        self._counting = threading.Lock()  # held for an increment: both threads count
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._running: asyncio.Future[list[list[int]] | None] | None = None
        self._pause = 0.0
        self._resume_at = -math.inf
        self._closed = False

    @property
    def failures(self) -> dict[DraftFailure, int]:
        """How often drafts were lost, by reason; only reasons that occurred."""
        with self._counting:
            return dict(self._counts)

    async def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        """One list of valid drafts per context, returned within the deadline.

        Raises nothing. Cancellation leaves the call running in its thread; until it has returned,
        no other is made and no drafts are proposed. It holds no block and no lock meanwhile.
        """
        nothing: list[list[int]] = [[] for _ in contexts]
        if not contexts or self._closed:
            return nothing
        if (self._running and not self._running.done()) or self._clock() < self._resume_at:
            self._count(DraftFailure.STUCK)
            return nothing
        self._running = self._submit(tuple(contexts))
        done, _ = await asyncio.wait((self._running,), timeout=self._deadline)
        if not done:
            self._count(DraftFailure.SLOW)
            self._pause = min(max(2 * self._pause, FIRST_PAUSE), LONGEST_PAUSE)
            self._resume_at = self._clock() + self._pause
            return nothing
        self._pause = 0.0
        return self._running.result() or nothing

    def finish(self, request_id: str) -> None:
        """Tell the drafter that a request is over. Never blocks, never raises."""
        if self._closed:
            return
        if self._calls.qsize() >= MAX_PENDING_FINISHES:
            self._count(DraftFailure.UNFINISHED)
            return
        self._call_soon(lambda: self._finish(request_id))

    def close(self) -> None:
        """End the thread as soon as the call it may be in returns; nobody waits for it."""
        self._closed = True
        self._calls.put(None)

    def _call_soon(self, call: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="drafter", daemon=True)
            self._thread.start()
        self._calls.put(call)

    def _submit(self, contexts: tuple[DraftContext, ...]) -> asyncio.Future[list[list[int]] | None]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[list[int]] | None] = loop.create_future()

        def call() -> None:
            drafts = self._propose(contexts)
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
                loop.call_soon_threadsafe(future.set_result, drafts)

        self._call_soon(call)
        return future

    # From here on: the drafter's thread.

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def _propose(self, contexts: tuple[DraftContext, ...]) -> list[list[int]] | None:
        # BaseException: a drafter that raises SystemExit must not end the thread either.
        try:
            proposed: Any = self._drafter.propose(contexts)
            if not isinstance(proposed, list | tuple):
                self._count(DraftFailure.WRONG_TYPE)
                return None
            if len(proposed) != len(contexts):
                self._count(DraftFailure.WRONG_LENGTH)
                return None
            return [self._valid(c, drafts) for c, drafts in zip(contexts, proposed, strict=True)]
        except BaseException as error:
            self._count(DraftFailure.RAISED, error)
            return None

    def _finish(self, request_id: str) -> None:
        try:
            self._drafter.finish(request_id)
        except BaseException as error:
            self._count(DraftFailure.RAISED, error)

    def _valid(self, context: DraftContext, drafts: Any) -> list[int]:
        """A copy of one context's drafts, or [] if there is anything wrong with them."""
        if not isinstance(drafts, list | tuple):
            self._count(DraftFailure.WRONG_TYPE)
        elif len(drafts) > context.max_tokens:
            self._count(DraftFailure.TOO_MANY)
        elif any(isinstance(t, bool) or not isinstance(t, Integral) for t in drafts):
            self._count(DraftFailure.WRONG_TYPE)
        elif not all(0 <= token_id < self._vocab_size for token_id in drafts):
            self._count(DraftFailure.OUT_OF_VOCABULARY)
        else:
            return [int(token_id) for token_id in drafts]
        return []

    def _count(self, reason: DraftFailure, error: BaseException | None = None) -> None:
        with self._counting:
            self._counts[reason] += 1
            first = self._counts[reason] == 1
        if first:  # once per reason: a broken drafter fails at every step
            logger.warning(
                "drafts of %s are lost (%s); counted from now on without a line each",
                type(self._drafter).__name__,
                reason,
                exc_info=error,
            )


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
