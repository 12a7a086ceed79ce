"""Is it alive, will it take work, what does it count, which version is it."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter, Response

from api.context import Context
from api.metrics import CONTENT_TYPE, MetricsPage


def router(context: Context) -> APIRouter:
    routes = APIRouter()
    holder = context.holder
    page = MetricsPage(context.settings, holder, context.metrics)

    def state(is_good: bool) -> Response:
        body: dict[str, Any] = {
            "status": holder.status,
            "phase": holder.phase,
            "percent": round(holder.percent, 1),
        }
        return Response(
            orjson.dumps(body),
            status_code=200 if is_good else 503,
            media_type="application/json",
        )

    @routes.get("/health")
    async def health() -> Response:
        """200 while alive, also while loading and draining; 503 after an engine fault."""
        return state(holder.status != "failed")

    @routes.get("/ready")
    async def ready() -> Response:
        """200 only when it will take work. A full queue does not change it."""
        return state(holder.status == "ok")

    @routes.get("/metrics")
    async def metrics() -> Response:
        return Response(page.render(), media_type=CONTENT_TYPE)

    @routes.get("/version")
    async def version() -> dict[str, str]:
        return {"version": context.settings.version}

    return routes
