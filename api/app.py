"""The HTTP application: routes, the gate before them, and the engine's life beside them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from api import (
    cache,
    cache_explain,
    cache_steering,
    chat,
    completions,
    errors,
    health,
    models,
    tokens,
)
from api.context import Context
from api.gate import Gate
from api.holder import EngineHolder
from api.metrics import Metrics
from api.settings import ServerSettings
from engine.errors import OverwinterError


def create_app(settings: ServerSettings, holder: EngineHolder) -> FastAPI:
    """An ASGI app that serves at once and loads the engine in the background.

    Its lifespan starts the load and, at the end, closes the engine without draining: whoever wants
    to drain calls `holder.close(drain_timeout)` before stopping the server. A load that fails is in
    `holder.failure`, after `holder.on_failure` was called.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        holder.start()
        try:
            yield
        finally:
            await holder.close()

    context = Context(settings, holder, Metrics())
    app = FastAPI(
        title="Overwinter", version=settings.version, lifespan=lifespan, redirect_slashes=False
    )
    app.add_middleware(Gate, settings=settings, metrics=context.metrics)
    app.add_exception_handler(errors.ApiError, _told)
    app.add_exception_handler(OverwinterError, _told)
    app.add_exception_handler(HTTPException, _http_error)
    modules = (completions, chat, models, tokens, cache, cache_steering, cache_explain, health)
    for module in modules:
        app.include_router(module.router(context))
    return app


async def _told(request: Request, error: Exception) -> Response:
    return errors.error_response(errors.from_engine(error))


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router itself refuses: unknown paths and wrong methods."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    if error.status_code == 405:
        told = errors.wrong_method(path, request.method, (error.headers or {})["Allow"])
    else:
        message = f"{error.detail}: {request.method} {path}"
        told = errors.ApiError(
            error.status_code, message, errors.INVALID_REQUEST, headers=error.headers
        )
    return errors.error_response(told)
