"""The guard around a drafter: whatever it does wrong is a counter and a step without drafts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from enum import StrEnum
from numbers import Integral
from typing import Any

from engine.drafter import DraftContext, Drafter

logger = logging.getLogger(__name__)

DEFAULT_DEADLINE = 0.25  # seconds
FIRST_PAUSE = 1.0  # seconds without drafts after a call that was late
LONGEST_PAUSE = 60.0
MAX_PENDING_FINISHES = 4096
MAX_PENDING_LESSONS = 64  # each holds all tokens of a request

Call = Callable[[], object]


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


class DrafterThread:
    """Runs a drafter's calls in order; a daemon, so that one that never returns keeps nobody."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def post(self, call: Call) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="drafter", daemon=True)
            self._thread.start()
        self._calls.put(call)

    @property
    def num_waiting(self) -> int:
        return self._calls.qsize()

    def close(self) -> None:
        """End as soon as the call it may be in returns; nobody waits for it."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


class GuardedDrafter:
    """A drafter that can do no harm: every fault costs a counter and its drafts, nothing else.

    Where it is called depends on whose it is. Somebody else's runs in a `DrafterThread`, against a
    deadline. After a late call there are no drafts until it has returned and a pause is over,
    which doubles with each late call in a row: the deadline is paid ever more rarely. Ours are
    called where it costs least and have no deadline: on the event loop, or, where they compute
    with torch, on the torch thread (`post`). Use it from one event loop.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        vocab_size: int,
        thread: DrafterThread | None = None,
        post: Callable[[Call], object] | None = None,
        deadline: float = DEFAULT_DEADLINE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`thread` or `post` runs its calls, in order; without either they run where they are made.

        `deadline` is in seconds and covers one call of `propose` in a `thread`; `clock` times the
        pauses.
        """
        self._drafter = drafter
        self._remember = getattr(drafter, "remember", None)
        self._forget = getattr(drafter, "forget", None)
        self._likelihoods = getattr(drafter, "likelihoods", None)
        self._vocab_size = vocab_size
        self._thread = thread
        self._post = thread.post if thread else post
        self._deadline = deadline if thread else None
        self._clock = clock
        self._counts: Counter[DraftFailure] = Counter()
        self._counting = threading.Lock()  # held for an increment: both threads count
        self._running: asyncio.Future[list[list[int]] | None] | None = None
        self._pause = 0.0
        self._resume_at = -math.inf
        self._closed = False

    @property
    def tells_likelihoods(self) -> bool:
        """Whether `propose_likely` can be called: it knows how good its guesses are, and is called
        where it is asked, so that they are those of the call before."""
        return self._likelihoods is not None and self._post is None

    def propose_likely(
        self, contexts: Sequence[DraftContext]
    ) -> list[tuple[list[int], float]] | None:
        """Like `propose`: drafts, and how likely each is right if those before it are. None where
        that went wrong."""
        proposed = None if self._closed or not contexts else self._propose(contexts)
        if proposed is None or self._likelihoods is None:
            return None
        try:
            told = [min(max(float(likelihood), 0.0), 1.0) for likelihood in self._likelihoods()]
            return list(zip(proposed, told, strict=True))
        except Exception as error:
            self._count(DraftFailure.RAISED, error)
            return None

    @property
    def failures(self) -> dict[DraftFailure, int]:
        """How often drafts were lost, by reason; only reasons that occurred."""
        with self._counting:
            return dict(self._counts)

    async def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        """One list of valid drafts per context, returned within the deadline if there is one.

        Raises nothing. Cancellation leaves the call running in its thread; until it has returned,
        no other is made and no drafts are proposed. It holds no block and no lock meanwhile.
        """
        nothing: list[list[int]] = [[] for _ in contexts]
        if not contexts or self._closed:
            return nothing
        if self._post is None:
            return self._propose(contexts) or nothing
        if (self._running and not self._running.done()) or self._clock() < self._resume_at:
            self._count(DraftFailure.STUCK)
            return nothing
        self._running = self._submit(self._post, tuple(contexts))
        done, _ = await asyncio.wait((self._running,), timeout=self._deadline)
        if not done:
            self._count(DraftFailure.SLOW)
            self._pause = min(max(2 * self._pause, FIRST_PAUSE), LONGEST_PAUSE)
            self._resume_at = self._clock() + self._pause
            return nothing
        self._pause = 0.0 if self._pause <= FIRST_PAUSE else self._pause / 2
        return self._running.result() or nothing

    def finish(self, context: DraftContext, *, teaches: bool = True) -> None:
        """Tell the drafter that a request is over, and all its tokens if it wants to learn them and
        may (`teaches`).

        Never blocks, never raises.
        """
        num_waiting = self._thread.num_waiting if self._thread else 0
        if num_waiting >= MAX_PENDING_FINISHES:
            self._count(DraftFailure.UNFINISHED)
            return
        request_id = context.request_id
        is_lesson = self._remember is not None and teaches and num_waiting < MAX_PENDING_LESSONS
        lesson = context if is_lesson else None
        self._call(lambda: self._finish(request_id, lesson))

    def forget(self, salts: Collection[str | None] | None) -> None:
        """What the drafter learnt of these salts, or of all, must not be used any more.

        Never blocks, never raises.
        """
        if (forget := self._forget) is not None:
            self._call(lambda: self._guarded(forget, salts))

    def _call(self, call: Call) -> None:
        if self._closed:
            return
        if self._post is None:
            call()
        else:
            self._post(call)

    def close(self) -> None:
        """No more calls; the thread of its own, if it has one, ends by itself."""
        self._closed = True
        if self._thread:
            self._thread.close()

    def _submit(
        self, post: Callable[[Call], object], contexts: tuple[DraftContext, ...]
    ) -> asyncio.Future[list[list[int]] | None]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[list[int]] | None] = loop.create_future()

        def call() -> None:
            drafts = self._propose(contexts)
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
                loop.call_soon_threadsafe(future.set_result, drafts)

        post(call)
        return future

    # From here on: where the drafter is called.

    def _propose(self, contexts: Sequence[DraftContext]) -> list[list[int]] | None:
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

    def _finish(self, request_id: str, lesson: DraftContext | None) -> None:
        if self._remember is not None and lesson is not None:
            self._guarded(self._remember, lesson)
        self._guarded(self._drafter.finish, request_id)

    def _guarded(self, method: Callable[[Any], object], argument: object) -> None:
        try:
            method(argument)
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
