"""`/cache/pin`, `/unpin`, `/prefetch`: which conversation, and for how long."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from fastapi import APIRouter, Request

from api import errors
from api.body import parse, read_json, schema_of
from api.context import Context
from api.prompts import encode_conversation, encode_prompt, parse_prompts
from api.protocol import ConversationBody, ConversationTtlBody

if TYPE_CHECKING:
    from engine.async_engine import AsyncEngine
    from engine.cache_control import CacheSelector

SELECTORS = ("prompt_cache_key", "prompt", "messages")

B = TypeVar("B", bound=ConversationBody)


def router(context: Context) -> APIRouter:
    routes = APIRouter(prefix="/cache")

    async def read(request: Request, model: type[B]) -> B:
        raw = await read_json(request, context.settings.max_body_bytes)
        return parse(model, raw, context.metrics)

    @routes.post("/pin", openapi_extra=schema_of(ConversationTtlBody))
    async def pin(request: Request) -> dict[str, int]:
        """Keeps what is stored of it from eviction, for an hour without `ttl_seconds`."""
        engine = context.holder.loaded()
        body = await read(request, ConversationTtlBody)
        return engine.cache_pin(await selector_of(engine, body), body.ttl_seconds)

    @routes.post("/unpin", openapi_extra=schema_of(ConversationBody))
    async def unpin(request: Request) -> dict[str, int]:
        engine = context.holder.loaded()
        body = await read(request, ConversationBody)
        return engine.cache_unpin(await selector_of(engine, body))

    @routes.post("/prefetch", openapi_extra=schema_of(ConversationTtlBody))
    async def prefetch(request: Request) -> dict[str, int]:
        """Brings what is stored of it nearer, and pins it where `ttl_seconds` is given."""
        engine = context.holder.for_new_work()
        body = await read(request, ConversationTtlBody)
        return await engine.cache_prefetch(await selector_of(engine, body), body.ttl_seconds)

    return routes


async def selector_of(engine: AsyncEngine, body: ConversationBody) -> CacheSelector:
    """What the body names. Raises `ApiError` 400 for none or more than one selector."""
    from engine.cache_control import CacheSelector

    given = [name for name in SELECTORS if getattr(body, name) is not None]
    if len(given) != 1:
        one_of = ", ".join(f"'{name}'" for name in SELECTORS)
        raise errors.invalid_request(
            f"Give exactly one of {one_of}.", given[1] if given else SELECTORS[0], "invalid_value"
        )
    if body.prompt_cache_key is not None:
        return CacheSelector(body.cache_salt, prompt_cache_key=body.prompt_cache_key)
    special = body.add_special_tokens
    if body.messages is not None:
        prompt = await encode_conversation(engine, body.messages, special is True, body.cache_salt)
    else:
        prompts = parse_prompts(body.prompt)
        if len(prompts) != 1:
            raise errors.invalid_request(
                f"'prompt' holds {len(prompts)} prompts; give one.", "prompt", "invalid_value"
            )
        prompt = await encode_prompt(engine, prompts[0], special is not False)
    return CacheSelector(body.cache_salt, token_ids=prompt.token_ids)
