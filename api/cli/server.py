"""The serving process: its socket, its signals, and the order in which it comes and goes.

listen -> load (the port answers already) -> serve -> drain -> flush -> exit
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

import uvicorn
import uvloop
from starlette.types import ASGIApp

from api.cli.errors import UsageError
from api.holder import EngineHolder

logger = logging.getLogger(__name__)

BACKLOG = 2048
# After the engine has ended every request, only clients that do not read keep connections open.
CONNECTION_GRACE = 5  # seconds


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket; raises `UsageError` if the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(
            f"--host {host} is no address of this machine: {error.strerror}"
        ) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Not later: two processes may both bind an address on which nobody listens yet.
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another with --port, "
            "or stop the process that has it"
        ) from error
    return listener


def public_url(listener: socket.socket) -> str:
    """The URL under which a client on this machine reaches `listener`."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class StopSignals:
    """SIGTERM and SIGINT: the first asks for a drain, the second ends the process at once.

    Installed before anything slow, so that a stop during the start is a stop, too.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._on_stop: Callable[[], None] | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            os._exit(128 + number)
        self.received = signal.Signals(number)
        if self._on_stop is not None:
            self._on_stop()

    def call(self, on_stop: Callable[[], None]) -> None:
        """Calls `on_stop` at the first signal, or now if it has come. `on_stop` may run between
        any two instructions of the main thread."""
        self._on_stop = on_stop
        if self.received is not None:
            on_stop()


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: they would close the port before the drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run_server(
    app: ASGIApp,
    holder: EngineHolder,
    listener: socket.socket,
    signals: StopSignals,
    *,
    drain_timeout: float,
    on_ready: Callable[[], None],
) -> None:
    """Serves until a signal has come and the drain is over. Raises what the load raised."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(app, holder, listener, signals, drain_timeout, on_ready))


async def _run(
    app: ASGIApp,
    holder: EngineHolder,
    listener: socket.socket,
    signals: StopSignals,
    drain_timeout: float,
    on_ready: Callable[[], None],
) -> None:
    server = _Server(
        uvicorn.Config(
            app,
            loop="none",
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=CONNECTION_GRACE,
        )
    )
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def request_stop() -> None:
        loop.call_soon_threadsafe(stop.set)

    signals.call(request_stop)
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    holder.start()
    loaded = asyncio.create_task(holder.wait_loaded(), name="wait loaded")
    await asyncio.wait((serving, stopping, loaded), return_when=asyncio.FIRST_COMPLETED)
    if holder.failure is None and not stop.is_set() and not serving.done():
        on_ready()
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    if signals.received is not None:
        logger.info(
            "%s: draining for up to %g s; a second signal stops at once",
            signals.received.name,
            drain_timeout,
        )
    await holder.close(drain_timeout)
    server.should_exit = True
    await serving
    for task in (stopping, loaded):
        task.cancel()
    if holder.failure is not None:
        raise holder.failure
    if signals.received is not None:
        logger.info("Stopped.")
        leave(0)


def leave(code: int) -> NoReturn:
    """Ends the process without waiting for threads: whatever still runs after the drain (a model
    load, a read from a hung disk) cannot be stopped and has nothing left to save."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
