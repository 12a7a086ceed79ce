"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from api.answering import answer
from api.body import parse, read_json, schema_of
from api.context import Context
from api.generation import Choice, Generation, check_room, choices_of, sampling_params
from api.logprobs import Position, completion_logprobs, positions
from api.prompts import check_length, encode_prompt, parse_prompts
from api.protocol import CompletionBody, check_stream_options
from engine.outputs import RequestOutput

if TYPE_CHECKING:
    from engine.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16


def router(context: Context) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/completions", openapi_extra=schema_of(CompletionBody))
    async def create_completion(request: Request) -> Response:
        engine = context.holder.for_new_work()
        raw = await read_json(request, context.settings.max_body_bytes)
        body = parse(CompletionBody, raw, context.metrics)
        check_stream_options(body)
        model_name = context.model_name(body.model)
        given = parse_prompts(body.prompt)
        check_room(engine, len(given) * body.n)
        prompts = [await encode_prompt(engine, one, body.add_special_tokens) for one in given]
        asked = body.asked_max_tokens
        longest = max(len(prompt.token_ids) for prompt in prompts)
        check_length(engine, longest, body, "prompt")
        room = engine.max_request_tokens - longest
        params = sampling_params(
            body,
            max_tokens=min(DEFAULT_MAX_TOKENS, room) if asked is None else asked,
            logprobs=body.logprobs,
            # Echo computes the whole prompt, with or without logprobs to show for it.
            prompt_logprobs=(body.logprobs or 0) if body.echo else None,
        )
        choices = choices_of(engine, prompts, params, body.n)
        generation = await Generation.start(engine, body, choices, context.metrics)
        return await answer(
            request,
            body,
            generation,
            CompletionWriter(engine.tokenizer, body, choices),
            model_name=model_name,
            fingerprint=engine.fingerprint,
            time_limit=context.settings.request_timeout,
        )

    return routes


class CompletionWriter:
    """Choices with `text`, and the prompt before it with `echo`."""

    id_prefix = "cmpl"
    plain_object = chunk_object = "text_completion"

    def __init__(
        self, tokenizer: Tokenizer, body: CompletionBody, choices: Sequence[Choice]
    ) -> None:
        self._tokenizer = tokenizer
        self._body = body
        self._choices = choices
        self._begun: set[int] = set()  # choices whose first chunk is out
        self._text_offsets: dict[int, int] = {}

    def plain(self, outputs: Sequence[Sequence[RequestOutput]]) -> dict[str, Any]:
        return {"choices": [self._entry(choice, outputs[choice.index]) for choice in self._choices]}

    def chunks(self, choice: Choice, output: RequestOutput) -> list[dict[str, Any]]:
        begun = choice.index in self._begun
        shows_ids = self._body.return_token_ids and (output.token_ids or not begun)
        shows_echo = self._body.echo and not begun
        shows = output.text or output.logprobs or output.finish_reason or shows_ids or shows_echo
        return [{"choices": [self._entry(choice, [output])]}] if shows else []

    def _entry(self, choice: Choice, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The choice for outputs that follow those of the call before; a plain answer has one."""
        is_first = choice.index not in self._begun
        self._begun.add(choice.index)
        last = outputs[-1]
        text = "".join(output.text for output in outputs)
        if is_first and self._body.echo:
            text = self._prompt_text(choice) + text
        entry: dict[str, Any] = {
            "index": choice.index,
            "text": text,
            "logprobs": self._logprobs(choice, outputs, is_first),
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
        }
        if self._body.return_token_ids:
            entry["token_ids"] = [token for output in outputs for token in output.token_ids]
            if is_first:
                entry["prompt_token_ids"] = choice.prompt.token_ids
        return entry

    def _prompt_text(self, choice: Choice) -> str:
        prompt = choice.prompt
        if prompt.text is not None:
            return prompt.text
        return self._tokenizer.decode(prompt.token_ids, skip_special_tokens=False)

    def _logprobs(
        self, choice: Choice, outputs: Sequence[RequestOutput], is_first: bool
    ) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        entries: list[Position] = []
        if is_first and self._body.echo:
            prompt_logprobs = outputs[0].prompt_logprobs or []
            entries += zip(choice.prompt.token_ids, prompt_logprobs, strict=True)
        for output in outputs:
            entries += positions(output.logprobs or ())
        offset = self._text_offsets.get(choice.index, 0)
        body, self._text_offsets[choice.index] = completion_logprobs(
            self._tokenizer, entries, offset
        )
        return body
