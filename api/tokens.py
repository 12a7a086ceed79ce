"""`/tokenize`, `/detokenize`, `/tokenizer_info`: what a remote scorer needs of the tokenizer."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from api import errors
from api.body import parse, read_json, schema_of
from api.context import Context
from api.prompts import check_token_ids, encode, encode_messages
from api.protocol import DetokenizeBody, TokenizeBody


def router(context: Context) -> APIRouter:
    routes = APIRouter()

    @routes.post("/tokenize", openapi_extra=schema_of(TokenizeBody))
    async def tokenize(request: Request) -> dict[str, Any]:
        engine = context.holder.loaded()
        raw = await read_json(request, context.settings.max_body_bytes)
        body = parse(TokenizeBody, raw, context.metrics)
        context.model_name(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise errors.invalid_request("Give either 'prompt' or 'messages'.", "prompt")
        if body.prompt is not None:
            token_ids = await encode(
                engine.tokenizer, body.prompt, body.add_special_tokens is not False
            )
        else:
            prompt = await encode_messages(engine, body.messages, body.add_special_tokens is True)
            token_ids = prompt.token_ids
        return {
            "tokens": token_ids,
            "count": len(token_ids),
            "max_model_len": engine.model.max_model_len,
        }

    @routes.post("/detokenize", openapi_extra=schema_of(DetokenizeBody))
    async def detokenize(request: Request) -> dict[str, Any]:
        engine = context.holder.loaded()
        raw = await read_json(request, context.settings.max_body_bytes)
        body = parse(DetokenizeBody, raw, context.metrics)
        context.model_name(body.model)
        check_token_ids(engine, body.tokens, "tokens")
        return {"prompt": engine.tokenizer.decode(body.tokens, skip_special_tokens=False)}

    @routes.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        engine = context.holder.loaded()
        tokenizer = engine.tokenizer
        return {
            "tokenizer_class": tokenizer.class_name,
            **tokenizer.special_tokens,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "chat_template": tokenizer.chat_template,
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": engine.model.max_model_len,
        }

    return routes
