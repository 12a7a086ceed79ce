"""The engine's place in the server: empty while it loads, then serving, then draining.

loading --loaded--> serving --begin_drain--> draining --close--> closed
   '----failed----> failed (the server stops; the process exits 2)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from api import errors
from api.activity import ActivityLog

if TYPE_CHECKING:
    from engine.async_engine import AsyncEngine

logger = logging.getLogger(__name__)

ProgressFn = Callable[[str, float], None]
LoadFn = Callable[[ProgressFn], Awaitable["AsyncEngine"]]


class EngineHolder:
    """Loads the engine in the background and says how far it is.

    `load` gets a progress function that any thread may call with a phase and a percentage, and
    returns the engine. `on_failure` is called once if it raises: the place to stop the server.
    """

    def __init__(self, load: LoadFn, on_failure: Callable[[], None] | None = None) -> None:
        self._load = load
        self.on_failure = on_failure
        self.phase = "starting"
        self.percent = 0.0
        self.engine: AsyncEngine | None = None
        self.failure: Exception | None = None
        self.draining = False
        self._loading: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._activity: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to load. Call it once, on the server's event loop."""
        if self._loading is None:
            self._loading = asyncio.create_task(self._run_load(), name="engine load")

    async def wait_loaded(self) -> None:
        """Returns once the load has ended, well or not (see `failure`). Cancellation is harmless:
        the load goes on."""
        if self._loading is not None:
            await asyncio.wait((self._loading,))

    async def _run_load(self) -> None:
        try:
            engine = await self._load(self._report)
        except Exception as error:
            self.failure = error
            self.phase = "failed"
            logger.debug("The engine did not load", exc_info=error)
            if self.on_failure is not None:
                self.on_failure()
            return
        if self.draining:
            engine.stop_intake()
        self.engine = engine
        self._activity = asyncio.create_task(ActivityLog(engine.stats).run(), name="activity log")
        self._report("ready", 100.0)

    def _report(self, phase: str, percent: float) -> None:
        self.phase = phase
        self.percent = percent

    @property
    def status(self) -> str:
        """One word: loading, ok, draining or failed."""
        if self.failure is not None or (self.engine is not None and not self.engine.healthy):
            return "failed"
        if self.draining:
            return "draining"
        return "loading" if self.engine is None else "ok"

    def loaded(self) -> AsyncEngine:
        """The engine, also while it drains. Raises `ApiError` 503 before it has loaded and 500
        after it has failed."""
        if self.engine is None:
            if self.draining:
                raise errors.draining()
            raise errors.unavailable(
                f"The model is loading ({self.phase}, {self.percent:.0f} %).", "loading", 2.0
            )
        if not self.engine.healthy:
            raise errors.internal("The engine has failed and serves no more requests.")
        return self.engine

    def for_new_work(self) -> AsyncEngine:
        """Like `loaded`, but 503 while draining."""
        if self.draining:
            raise errors.draining()
        return self.loaded()

    def begin_drain(self) -> None:
        """From now on `/ready` is 503 and new work is refused; running requests go on."""
        self.draining = True
        if self.engine is not None:
            self.engine.stop_intake()

    async def close(self, drain_timeout: float = 0.0) -> None:
        """Drains for up to `drain_timeout` seconds, aborts the rest, closes the engine.

        May be called again: later calls wait for the first. Cancelling a caller does not stop the
        closing.
        """
        self.begin_drain()
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(drain_timeout), name="engine close")
        await asyncio.shield(self._closing)

    async def _close(self, drain_timeout: float) -> None:
        if self._loading is not None and not self._loading.done():
            self._loading.cancel()
            await asyncio.wait((self._loading,))
        if self.engine is not None:
            await self.engine.close(drain_timeout)
        if self._activity is not None:
            self._activity.cancel()
