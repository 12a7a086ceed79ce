"""Prompts: what the client wrote, as token ids that fit the model.

Long texts are tokenised on a thread, so that nobody's stream waits for somebody's megabytes.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from api import errors
from api.conversation import Conversation
from api.protocol import ROLES, GenerationBody, in_words, is_token_id, is_token_ids

if TYPE_CHECKING:
    from engine.async_engine import AsyncEngine
    from engine.tokenizer import Tokenizer

T = TypeVar("T")

INLINE_CHARS = 16_384  # tokenised on the event loop up to here: a few milliseconds
# A text with more than this many characters for each token that fits is judged by its beginning.
HOPELESS_CHARS_PER_TOKEN = 8
PROMPT_SHAPES = (
    "it must be a string, a list of strings, a list of token ids (integers from 0 up) or a list of "
    "such lists."
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; `text` is what the client wrote, None where it sent token ids or messages."""

    token_ids: list[int]
    text: str | None = None
    conversation: Conversation | None = None  # to be told of the answers


def parse_prompts(value: Any) -> list[str | list[int]]:
    """The prompts of a completion request. Raises `ApiError` 400."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return list(value)
        if is_token_ids(value):
            return [value]
        if all(is_token_ids(item) for item in value):
            return list(value)
    raise errors.invalid_request(f"{_misfit(value)}; {PROMPT_SHAPES}", "prompt", "invalid_value")


def _misfit(value: Any) -> str:
    """The first thing about `value` that makes it no prompts."""
    if not isinstance(value, list) or not value:
        return f"'prompt' is {in_words(value)}"
    for index, item in enumerate(value):
        where = f"'prompt[{index}]' is {in_words(item)}"
        if isinstance(item, list):
            for inner, token_id in enumerate(item):
                if not is_token_id(token_id):
                    return f"'prompt[{index}][{inner}]' is {in_words(token_id)}"
        elif not isinstance(item, str) and not is_token_id(item):
            return where
        if type(item) is not type(value[0]):
            return f"{where} and 'prompt[0]' is {in_words(value[0])}"
    raise AssertionError("these are prompts")


def parse_messages(value: Any, *, knows_developer: bool) -> list[dict[str, Any]]:
    """The messages as the template takes them: plain text content, roles that it knows.

    `developer` becomes `system` where the template has no word for it. Raises `ApiError` 400.
    """
    if not isinstance(value, list) or not value:
        raise errors.invalid_request(
            "'messages' must be a non-empty list of messages.", "messages", "invalid_value"
        )
    messages = []
    for index, item in enumerate(value):
        where = f"messages[{index}]"
        if not isinstance(item, dict):
            raise errors.invalid_request(f"'{where}' must be an object.", where, "invalid_value")
        message = {name: entry for name, entry in item.items() if entry is not None}
        role = message.get("role")
        if role not in ROLES:
            raise errors.invalid_request(
                f"'{where}.role' must be one of {', '.join(ROLES)}.",
                f"{where}.role",
                "invalid_value",
            )
        if role == "developer" and not knows_developer:
            message["role"] = "system"
        if "content" not in message and not (role == "assistant" and message.get("tool_calls")):
            raise errors.invalid_request(
                f"'{where}.content' is required.", f"{where}.content", "missing_field"
            )
        message["content"] = _content(message.get("content", ""), f"{where}.content")
        messages.append(message)
    return messages


def _content(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise errors.invalid_request(
            f"'{where}' must be a string or a list of parts.", where, "invalid_value"
        )
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise errors.unsupported(
                f"{where}[{index}].type",
                f"'{where}[{index}]' is not a text part; this server takes text only.",
            )
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise errors.invalid_request(
                f"'{where}[{index}].text' must be a string.",
                f"{where}[{index}].text",
                "invalid_value",
            )
        texts.append(text)
    return "\n".join(texts)


async def encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Token ids of `text`, a long one on a thread that yields to the engine's."""
    if len(text) <= INLINE_CHARS:
        return tokenizer.encode(text, add_special_tokens)
    return await _aside(tokenizer.encode, text, add_special_tokens)


_encoders = ThreadPoolExecutor(
    1,
    thread_name_prefix="tokenizer",
    # Linux schedules threads, not processes: at this niceness a long text costs the running
    # streams a tenth of a core. At equal rank it halves one, and every parallel region of the
    # forward pass waits for its slower half.
    initializer=lambda: os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10),
)


async def _aside(work: Callable[..., T], *arguments: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(_encoders, work, *arguments)


async def refuse_hopeless(engine: AsyncEngine, text: str, param: str) -> None:
    """Raises `ApiError` 400 for a text that cannot fit, without tokenising all of it.

    Tokenising megabytes takes seconds. Where the beginning alone has more tokens than fit (and
    some to spare, for the one it may cut in two), the whole has.
    """
    limit = engine.max_request_tokens
    head = text[: limit * HOPELESS_CHARS_PER_TOKEN]
    if len(head) == len(text):
        return
    num_tokens = len(await encode(engine.tokenizer, head, False)) - 16
    if num_tokens <= limit:
        # Few tokens for its length, such as a run of blanks: by its longest token it may fit.
        num_tokens = len(text.encode("utf-8", "replace")) // engine.tokenizer.longest_token_bytes
    if num_tokens > limit:
        raise errors.invalid_request(
            f"The prompt has more than {num_tokens} tokens, but this server takes at most {limit} "
            "for prompt and answer together; shorten it.",
            param,
            "context_length_exceeded",
        )


async def encode_prompt(
    engine: AsyncEngine, prompt: str | list[int], add_special_tokens: bool
) -> Prompt:
    """Token ids of one prompt of a completion. Raises `ApiError` 400."""
    if isinstance(prompt, str):
        await refuse_hopeless(engine, prompt, "prompt")
        ids = await encode(engine.tokenizer, prompt, add_special_tokens)
        checked = Prompt(ids, prompt)
    else:
        check_token_ids(engine, prompt, "prompt")
        checked = Prompt(prompt)
    if not checked.token_ids:
        raise errors.invalid_request(
            "'prompt' has no tokens; give at least one.", "prompt", "empty_prompt"
        )
    return checked


async def encode_messages(engine: AsyncEngine, value: Any, add_special_tokens: bool) -> Prompt:
    """Token ids of a conversation with the turn opened for the answer, by the tokenizer alone.

    Special tokens come from the template alone; `add_special_tokens` puts those of the tokenizer
    around them. One that is spelled out in a message is plain text. Raises `ApiError` 400 and what
    the template raises.
    """
    messages = await _checked_messages(engine, value)
    token_ids = await _read(messages, lambda: engine.tokenizer.encode_chat(messages))
    before, after = _affixes(engine.tokenizer) if add_special_tokens else ([], [])
    return _chat_prompt([*before, *token_ids, *after])


async def encode_conversation(
    engine: AsyncEngine,
    value: Any,
    add_special_tokens: bool,
    cache_salt: str | None,
    cache_key: str | None = None,
    *,
    is_asked: bool = True,
) -> Prompt:
    """The same with the ids that were really generated, as far as they are known under this salt,
    and with the conversation, which is to be told of the answers. Counted if it `is_asked` to go
    on, not only looked at."""
    messages = await _checked_messages(engine, value)
    space, tokenizer = engine.space(cache_salt), engine.tokenizer
    look_up = engine.transcripts.encode if is_asked else engine.transcripts.read
    reading = await _read(messages, lambda: look_up(space, tokenizer.render_marked(messages)))
    before, after = _affixes(tokenizer) if add_special_tokens else ([], [])
    conversation = None
    if reading.turn is not None:
        conversation = Conversation(engine, messages, cache_salt, cache_key, reading.turn, before)
    return _chat_prompt([*before, *reading.token_ids, *after], conversation)


async def _checked_messages(engine: AsyncEngine, value: Any) -> list[dict[str, Any]]:
    template = engine.tokenizer.chat_template
    if template is None:
        raise errors.invalid_request(
            f"The model {engine.model.name} has no chat template; use /v1/completions.", "messages"
        )
    messages = parse_messages(value, knows_developer="developer" in template)
    await refuse_hopeless(engine, "\n".join(m["content"] for m in messages), "messages")
    return messages


async def _read(messages: Sequence[Mapping[str, Any]], work: Callable[[], T]) -> T:
    """Tokenising `messages`, long ones on the thread."""
    num_chars = sum(len(message["content"]) for message in messages)
    return work() if num_chars <= INLINE_CHARS else await _aside(work)


def _chat_prompt(token_ids: list[int], conversation: Conversation | None = None) -> Prompt:
    if not token_ids:
        raise errors.invalid_request(
            "'messages' make a prompt without tokens.", "messages", "empty_prompt"
        )
    return Prompt(token_ids, conversation=conversation)


def _affixes(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a text when asked to add special tokens."""
    bare = tokenizer.encode("x", False)
    dressed = tokenizer.encode("x", True)
    for start in range(len(dressed) - len(bare) + 1):
        if dressed[start : start + len(bare)] == bare:
            return dressed[:start], dressed[start + len(bare) :]
    return [], []


def check_token_ids(engine: AsyncEngine, token_ids: Sequence[int], param: str) -> None:
    """Raises `ApiError` 400 where an id is not in the vocabulary."""
    largest = max(token_ids, default=0)
    if largest >= engine.model.vocab_size:
        raise errors.invalid_request(
            f"'{param}' holds the token id {largest}; the vocabulary of {engine.model.name} has "
            f"{engine.model.vocab_size} tokens.",
            param,
            "invalid_token_id",
        )


def check_length(
    engine: AsyncEngine, num_prompt_tokens: int, body: GenerationBody, prompt_field: str
) -> None:
    """Raises `ApiError` 400 with both numbers where prompt and answer cannot fit together.

    Without `max_tokens` the answer is what fits, which must be at least one token.
    """
    limit = engine.max_request_tokens
    asked = body.asked_max_tokens
    if num_prompt_tokens + (1 if asked is None else max(asked, 0)) <= limit:
        return
    if asked is None or num_prompt_tokens > limit:
        param = prompt_field
        message = (
            f"The prompt has {num_prompt_tokens} tokens, but this server takes at most {limit} "
            "for prompt and answer together; shorten it."
        )
    else:
        param = body.max_tokens_field
        message = (
            f"The prompt has {num_prompt_tokens} tokens and {param} asks for {asked} more, but "
            f"this server takes at most {limit} together; shorten the prompt or ask for less."
        )
    raise errors.invalid_request(message, param, "context_length_exceeded")
