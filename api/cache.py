"""`/cache/*`: what the tiers hold, making it durable, and forgetting it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from api import errors
from api.body import parse, read_optional_json, schema_of
from api.context import Context
from api.protocol import CacheResetBody
from offload.tier import OffloadError


def router(context: Context) -> APIRouter:
    routes = APIRouter(prefix="/cache")

    @routes.get("/stats")
    async def stats() -> dict[str, Any]:
        return context.holder.loaded().cache_stats()

    @routes.post("/flush")
    async def flush() -> dict[str, Any]:
        """Covers every request whose answer had been sent; does not wait for running ones."""
        return await context.holder.loaded().cache_flush()

    @routes.post("/reset", openapi_extra=schema_of(CacheResetBody, required=False))
    async def reset(request: Request) -> dict[str, Any]:
        """Nothing stored, queued or in flight before it is ever served again: of everything, of a
        salt, or of a conversation."""
        raw = await read_optional_json(request, context.settings.max_body_bytes)
        body = parse(CacheResetBody, raw, context.metrics)
        engine = context.holder.loaded()
        present = engine.cache_stats()["tiers"]
        named = dict.fromkeys(body.tiers or ())
        wanted = None if body.tiers is None else [tier for tier in named if tier in present]
        try:
            dropped = await engine.cache_reset(
                wanted, cache_salt=body.cache_salt, prompt_cache_key=body.prompt_cache_key
            )
        except OffloadError as error:  # whoever resets has to know that a restart may undo it
            raise errors.internal(f"The reset is not durable: {error}.") from error
        if body.tiers is None:
            return {"dropped": dropped}
        # A tier that this server does not have holds nothing: no fault, and nothing dropped.
        return {"dropped": {tier: dropped.get(tier, 0) for tier in named}}

    return routes
