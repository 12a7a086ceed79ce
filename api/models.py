"""`/v1/models`, also as `/models` for clients that leave the version out."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter

from api.context import Context


def router(context: Context) -> APIRouter:
    routes = APIRouter()
    created = int(time.time())

    def card(name: str) -> dict[str, Any]:
        engine = context.holder.loaded()
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "overwinter",
            "root": engine.model.name,
            "parent": None,
            "max_model_len": engine.model.max_model_len,
        }

    @routes.get("/v1/models")
    @routes.get("/models", include_in_schema=False)
    async def list_models() -> dict[str, Any]:
        names = context.settings.served_model_names
        return {"object": "list", "data": [card(name) for name in names]}

    # Names may be paths, so the parameter takes slashes.
    @routes.get("/v1/models/{name:path}")
    @routes.get("/models/{name:path}", include_in_schema=False)
    async def get_model(name: str) -> dict[str, Any]:
        context.holder.loaded()
        return card(context.model_name(name))

    return routes
