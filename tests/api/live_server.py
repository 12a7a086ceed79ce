"""A real server on loopback, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import httpx
import openai
import uvicorn

from api.app import create_app
from api.holder import EngineHolder, ProgressFn
from api.settings import ServerSettings
from engine.async_engine import AsyncEngine
from engine.config import EngineConfig

MODEL = "tiny"
SETTINGS = ServerSettings(served_model_names=(MODEL, "tiny-alias"), version="1.2.3")
PATIENCE = 60.0  # seconds until a test gives up on something that takes milliseconds


class LiveServer:
    """An app served by uvicorn in a thread of its own; `with` starts and stops it.

    With `hold` it stays loading until `release` is called. A load that fails raises.
    """

    def __init__(
        self,
        config: EngineConfig,
        settings: ServerSettings = SETTINGS,
        *,
        host: str = "127.0.0.1",
        hold: bool = False,
    ) -> None:
        self.config = config
        self.settings = settings
        self._held = hold
        self._released = asyncio.Event()
        self.holder = EngineHolder(self._load, on_failure=self._stop)
        self._socket = socket.create_server((host, 0))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._server = uvicorn.Server(
            uvicorn.Config(
                create_app(settings, self.holder),
                log_config=None,
                ws="none",
                timeout_graceful_shutdown=5,
            )
        )
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))
        self._loop: asyncio.AbstractEventLoop | None = None

    async def _load(self, progress: ProgressFn) -> AsyncEngine:
        self._loop = asyncio.get_running_loop()
        progress("waiting", 12.5)
        if self._held:
            await self._released.wait()
        return await AsyncEngine.from_config(self.config, progress=progress)

    def _stop(self) -> None:
        self._server.should_exit = True

    def __enter__(self) -> LiveServer:
        self._thread.start()
        if not self._held:
            self.wait_until(lambda: self.holder.engine is not None or not self._thread.is_alive())
        if self.holder.failure is not None:
            self.__exit__()
            raise self.holder.failure
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()
        self.join()
        self._socket.close()

    def release(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._released.set)

    def join(self) -> None:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the server did not stop"

    @property
    def engine(self) -> AsyncEngine:
        assert self.holder.engine is not None, self.holder.failure
        return self.holder.engine

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, "it never came true"
            time.sleep(0.005)

    @contextlib.contextmanager
    def slow_steps(self, seconds: float = 0.02) -> Iterator[None]:
        """Each step of the engine takes that much longer: nobody is done before a test is."""
        core = self.engine._core
        plain_step = core.step

        async def slow_step() -> bool:
            await asyncio.sleep(seconds)
            return await plain_step()

        core.step = slow_step  # type: ignore[method-assign]
        try:
            yield
        finally:
            core.step = plain_step  # type: ignore[method-assign]

    def wait_idle(self) -> None:
        """Until nothing runs or waits any more."""
        self.wait_until(lambda: self.engine.stats().num_running + self.num_waiting == 0)

    @property
    def num_running(self) -> int:
        return self.engine.stats().num_running

    @property
    def num_waiting(self) -> int:
        return self.engine.stats().num_waiting

    def on_loop(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of `work`, run where the engine lives."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE)

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE, **options)

    def openai(self, **options: Any) -> openai.OpenAI:
        given = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **given)

    def async_openai(self, **options: Any) -> openai.AsyncOpenAI:
        given = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE, **options}
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", **given)
