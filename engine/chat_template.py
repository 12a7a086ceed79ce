"""Renders a model's chat template as transformers does: sandboxed jinja2, the same helpers."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import InvalidRequestError

# Stands at the end of the message to continue, so that the template's closing can be cut away. Its
# last space tells whether the template trims messages.
_CONTINUE_HERE = "\ue000overwinter-continue\ue001 "


class ChatTemplateError(InvalidRequestError):
    """The template refused these messages, or the model has none."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; when serving it is only a bracket."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as an instance attribute)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which no model was trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


@functools.lru_cache(maxsize=16)
def compile_template(source: str) -> jinja2.Template:
    """Parse a template once.

    Raises:
        ChatTemplateError: it is not a valid template.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"the model's chat template is broken: {error}") from error


def render(
    source: str | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    special_tokens: Mapping[str, str],
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The prompt text of a conversation.

    `special_tokens` are the names a template may use (`bos_token`, ...). With
    `continue_final_message` the text ends inside the last message instead of after it.

    Raises:
        ChatTemplateError: no template, or the template refuses or fails on these messages.
    """
    if source is None:
        raise ChatTemplateError(
            "this model has no chat template; use the completions endpoint", param="messages"
        )
    if add_generation_prompt and continue_final_message:
        raise ChatTemplateError(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    # Keys set to None are what clients send for "absent"; templates print them as "None".
    plain = [{k: v for k, v in message.items() if v is not None} for message in messages]
    if continue_final_message:
        _mark_final(plain)
    variables: dict[str, Any] = {
        **special_tokens,
        **(template_kwargs or {}),
        "messages": plain,
        "tools": None if tools is None else [dict(tool) for tool in tools],
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    text = _run(compile_template(source), variables)
    return _cut_at_mark(text) if continue_final_message else text


def _run(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    # A template is foreign code over foreign data, so whatever it raises is the request's fault.
    guarded: Callable[[Mapping[str, Any]], str] = template.render
    try:
        return guarded(variables)
    except Exception as error:
        raise ChatTemplateError(
            f"the chat template refused these messages: {error}", param="messages"
        ) from error


def _mark_final(messages: list[dict[str, Any]]) -> None:
    """Append the mark to the last message's text, in place."""
    if not messages:
        raise ChatTemplateError("there is no message to continue", param="messages")
    content = messages[-1].get("content")
    if isinstance(content, str):
        messages[-1]["content"] = content + _CONTINUE_HERE
        return
    if isinstance(content, list) and content and isinstance(content[-1], Mapping):
        text = content[-1].get("text")
        if isinstance(text, str):
            marked = {**content[-1], "text": text + _CONTINUE_HERE}
            messages[-1]["content"] = [*content[:-1], marked]
            return
    raise ChatTemplateError("the last message has no text to continue", param="messages")


def _cut_at_mark(text: str) -> str:
    cut = text.rfind(_CONTINUE_HERE.rstrip())
    if cut < 0:
        raise ChatTemplateError(
            "the chat template drops the final message, so it cannot be continued",
            param="continue_final_message",
        )
    is_trimmed = not text.startswith(_CONTINUE_HERE, cut)
    return text[:cut].rstrip() if is_trimmed else text[:cut]
