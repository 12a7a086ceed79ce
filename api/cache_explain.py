"""`POST /cache/explain`: what a completion or a chat would find in the cache, and why no more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request

from api import errors
from api.body import parse, read_json, schema_of
from api.context import Context
from api.gate import is_admin
from api.prompts import Prompt, check_length, encode_conversation, encode_prompt, parse_prompts
from api.protocol import ChatBody, CompletionBody

if TYPE_CHECKING:
    from engine.async_engine import AsyncEngine


def router(context: Context) -> APIRouter:
    routes = APIRouter(prefix="/cache")

    @routes.post("/explain", openapi_extra=schema_of(CompletionBody))
    async def explain(request: Request) -> dict[str, Any]:
        """Takes the body of the request in question as it is, and runs nothing."""
        engine = context.holder.loaded()
        raw = await read_json(request, context.settings.max_body_bytes)
        body: CompletionBody | ChatBody
        if raw.get("messages") is None and raw.get("prompt") is None:
            raise errors.invalid_request(
                "Give the body of the request to explain: one with 'prompt' or with 'messages'.",
                "prompt",
                "missing_field",
            )
        if raw.get("prompt") is None:
            body = parse(ChatBody, raw, context.metrics)
            prompt = await encode_conversation(
                engine, body.messages, body.add_special_tokens, body.cache_salt, is_asked=False
            )
            check_length(engine, len(prompt.token_ids), body, "messages")
        else:
            body = parse(CompletionBody, raw, context.metrics)
            prompt = await _only_prompt(engine, body)
            check_length(engine, len(prompt.token_ids), body, "prompt")
        context.model_name(body.model)
        return await engine.cache_explain(
            prompt.token_ids,
            body.cache_salt,
            is_admin=is_admin(context.settings, request.headers),
            wants_prompt_logprobs=isinstance(body, CompletionBody) and body.echo,
        )

    return routes


async def _only_prompt(engine: AsyncEngine, body: CompletionBody) -> Prompt:
    given = parse_prompts(body.prompt)
    if len(given) != 1:
        raise errors.invalid_request(
            f"'prompt' holds {len(given)} prompts; ask about one at a time.",
            "prompt",
            "invalid_value",
        )
    return await encode_prompt(engine, given[0], body.add_special_tokens)
