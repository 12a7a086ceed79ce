"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from api import errors
from api.answering import answer
from api.body import parse, read_json, schema_of
from api.context import Context
from api.generation import Choice, Generation, check_room, choices_of, sampling_params
from api.logprobs import chat_logprobs
from api.prompts import Prompt, check_length, encode_conversation
from api.protocol import ChatBody, check_stream_options
from engine.outputs import RequestOutput

if TYPE_CHECKING:
    from engine.tokenizer import Tokenizer


def router(context: Context) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", openapi_extra=schema_of(ChatBody))
    async def create_chat_completion(request: Request) -> Response:
        engine = context.holder.for_new_work()
        raw = await read_json(request, context.settings.max_body_bytes)
        body = parse(ChatBody, raw, context.metrics)
        check_stream_options(body)
        _check(body)
        model_name = context.model_name(body.model)
        check_room(engine, body.n)
        prompt = await encode_conversation(
            engine,
            body.messages,
            body.add_special_tokens,
            body.cache_salt,
            body.prompt_cache_key,
        )
        check_length(engine, len(prompt.token_ids), body, "messages")
        params = sampling_params(
            body,
            max_tokens=body.asked_max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )
        choices = choices_of(engine, [prompt], params, body.n)
        generation = await Generation.start(engine, body, choices, context.metrics)
        return await answer(
            request,
            body,
            generation,
            ChatWriter(engine.tokenizer, body, prompt),
            model_name=model_name,
            fingerprint=engine.fingerprint,
            time_limit=context.settings.request_timeout,
        )

    return routes


def _check(body: ChatBody) -> None:
    if body.top_logprobs and not body.logprobs:
        raise errors.invalid_request(
            "'top_logprobs' wants 'logprobs' to be true.", "top_logprobs", "invalid_value"
        )
    if body.asked_max_tokens == 0:
        raise errors.invalid_request(
            f"'{body.max_tokens_field}' must be at least 1.", body.max_tokens_field, "invalid_value"
        )


class ChatWriter:
    """Choices with a `message`; streamed, a role first and then the message piece by piece."""

    id_prefix = "chatcmpl"
    plain_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, body: ChatBody, prompt: Prompt) -> None:
        self._tokenizer = tokenizer
        self._body = body
        self._prompt = prompt
        self._begun: set[int] = set()  # choices whose role is out

    def plain(self, outputs: Sequence[Sequence[RequestOutput]]) -> dict[str, Any]:
        choices = []
        for index, parts in enumerate(outputs):
            content = "".join(output.text for output in parts)
            message = {"role": "assistant", "content": content, "refusal": None}
            choices.append(self._entry(index, "message", message, parts))
        return {"choices": choices, **self._prompt_ids()}

    def chunks(self, choice: Choice, output: RequestOutput) -> list[dict[str, Any]]:
        index = choice.index
        chunks: list[dict[str, Any]] = []
        if index not in self._begun:
            self._begun.add(index)
            role = self._entry(index, "delta", {"role": "assistant", "content": ""}, [])
            chunks.append({"choices": [{**role, **self._prompt_ids()}], **self._prompt_ids()})
        shows_ids = self._body.return_token_ids and output.token_ids
        if output.text or output.logprobs or output.finish_reason or shows_ids:
            delta = {"content": output.text} if output.text or not output.finish_reason else {}
            chunks.append({"choices": [self._entry(index, "delta", delta, [output])]})
        return chunks

    def _entry(
        self, index: int, key: str, message: dict[str, Any], outputs: Sequence[RequestOutput]
    ) -> dict[str, Any]:
        last = outputs[-1] if outputs else None
        entry: dict[str, Any] = {
            "index": index,
            key: message,
            "logprobs": self._logprobs(outputs) if outputs else None,
            "finish_reason": last.finish_reason if last else None,
            "stop_reason": last.stop_reason if last else None,
        }
        if self._body.return_token_ids:
            entry["token_ids"] = [token for output in outputs for token in output.token_ids]
        return entry

    def _logprobs(self, outputs: Sequence[RequestOutput]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        entries = [entry for output in outputs for entry in output.logprobs or ()]
        return chat_logprobs(self._tokenizer, entries)

    def _prompt_ids(self) -> dict[str, Any]:
        """At the top of the plain answer; streamed, on each choice's first chunk as well."""
        if not self._body.return_token_ids:
            return {}
        return {"prompt_token_ids": self._prompt.token_ids}
