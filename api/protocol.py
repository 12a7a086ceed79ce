"""The bodies of the endpoints, field by field.

Absent values are OpenAI's. What the sampler has to say about a value's range it says itself
(`engine.sampling_params`); here are types, shapes and what is not supported.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from api import errors
from api.body import AsksNothing, Body
from engine.sampling_params import MAX_LOGPROBS, MAX_SEED, MIN_SEED

MAX_CHOICES = 128
MAX_TTL_SECONDS = 366 * 86400.0
ROLES = ("system", "developer", "user", "assistant", "tool")


def _empty(value: Any) -> bool:
    return value is False or value in ("", [], {})


def _default(*values: Any) -> AsksNothing:
    return lambda value: _empty(value) or value in values


def _text_format(value: Any) -> bool:
    return _empty(value) or (isinstance(value, dict) and value.get("type", "text") == "text")


def _stop(value: Any) -> Any:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(text, str) for text in strings):
        raise ValueError("give a string or a list of strings")
    return strings


def _logit_bias(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError("give an object that maps token ids to numbers")
    bias: dict[int, float] = {}
    for key, number in value.items():
        if not key.isascii() or not key.isdecimal():
            raise ValueError(f"{key[:32]!r} is not a token id")
        if type(number) not in (int, float):
            raise ValueError("give an object that maps token ids to numbers")
        bias[int(key)] = float(number)
    return bias


def _seed(value: Any) -> Any:
    # The JSON parser has made a float of what is longer than 64 bits.
    if type(value) is not int or not MIN_SEED <= value <= MAX_SEED:
        raise ValueError(f"give an integer from {MIN_SEED} to {MAX_SEED}")
    return value


def _token_ids(value: Any) -> Any:
    if not is_token_ids(value):
        raise ValueError("give a list of token ids, which are integers from 0 up")
    return value


def is_token_ids(value: Any) -> bool:
    """Whether `value` is a list of non-negative integers; true is not one."""
    return isinstance(value, list) and all(is_token_id(item) for item in value)


def is_token_id(value: Any) -> bool:
    """Whether `value` is a non-negative integer; true is not one."""
    return type(value) is int and value >= 0


def in_words(value: Any) -> str:
    """What a JSON value is, briefly, for whoever sent it where it does not belong."""
    if isinstance(value, str):
        return "a string"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if isinstance(value, dict):
        return "an object"
    if value is None:
        return "null"
    return str(value).lower()[:32]  # a number, true or false


def _no_name(value: Any) -> Any:
    """Clients without a name for the conversation send an empty one."""
    return None if value == "" else value


CacheSalt = Annotated[str | None, Field(min_length=1)]
TokenIds = Annotated[list[int], BeforeValidator(_token_ids)]

# What other engines or OpenAI know and we do not, each with what asks for nothing.
UNSUPPORTED_ANYWHERE: dict[str, AsksNothing] = {
    "best_of": _default(1),
    "use_beam_search": _empty,
    "length_penalty": _default(1),
    "early_stopping": _empty,
    "include_stop_str_in_output": _empty,
    "skip_special_tokens": lambda value: value is True,
    "spaces_between_special_tokens": lambda value: value is True,
    "truncate_prompt_tokens": _empty,
    "prompt_logprobs": _empty,
    "prompt_embeds": _empty,
    "allowed_token_ids": _empty,
    "bad_words": _empty,
    "logits_processors": _empty,
    "response_format": _text_format,
    "structured_outputs": _empty,
    "guided_json": _empty,
    "guided_regex": _empty,
    "guided_choice": _empty,
    "guided_grammar": _empty,
    "grammar": _empty,
    "json_schema": _empty,
    "typical_p": _default(1),
    "mirostat": _default(0),
}
HINTS = frozenset(
    {"user", "metadata", "service_tier", "safety_identifier", "prompt_cache_retention"}
)


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # the usage so far on every chunk; wants include_usage


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: item for name, item in value.items() if item is not None}
    return value


class GenerationBody(Body):
    """What both completion endpoints take."""

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None  # the newer name; wins where both are given
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Annotated[dict[int, float], BeforeValidator(_logit_bias)] = Field(
        default_factory=dict
    )
    seed: Annotated[int | None, BeforeValidator(_seed)] = None
    stop: Annotated[list[str], BeforeValidator(_stop)] = Field(default_factory=list)
    stop_token_ids: TokenIds = Field(default_factory=list)
    ignore_eos: bool = False
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stream: bool = False
    stream_options: Annotated[StreamOptions | None, BeforeValidator(_without_nulls)] = None
    priority: int = 0
    cache_salt: CacheSalt = None
    prompt_cache_key: Annotated[str | None, BeforeValidator(_no_name)] = None
    return_token_ids: bool = False

    @property
    def max_tokens_field(self) -> str:
        """The name under which the client gave its limit."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: Any  # text, texts, token ids or lists of them: see `prompts.parse_prompts`
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False
    add_special_tokens: bool = True

    known_and_ignored: ClassVar[frozenset[str]] = HINTS
    unsupported: ClassVar[dict[str, AsksNothing]] = {**UNSUPPORTED_ANYWHERE, "suffix": _empty}


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: Any  # see `prompts.parse_messages`
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool = False  # the template writes its own

    known_and_ignored: ClassVar[frozenset[str]] = HINTS | {
        "reasoning_effort",
        "verbosity",
        "prediction",
        "parallel_tool_calls",
    }
    unsupported: ClassVar[dict[str, AsksNothing]] = {
        **UNSUPPORTED_ANYWHERE,
        "tools": _empty,
        "tool_choice": _default("none", "auto"),
        "functions": _empty,
        "function_call": _default("none", "auto"),
        "modalities": _default(["text"]),
        "audio": _empty,
        "web_search_options": lambda value: False,
        "store": _empty,
        "echo": _empty,
        "chat_template": _empty,
        "chat_template_kwargs": _empty,
        "documents": _empty,
        "add_generation_prompt": lambda value: value is True,
        "continue_final_message": _empty,
    }


def check_stream_options(body: GenerationBody) -> None:
    """Raises `ApiError` 400 for options of a stream that was not asked for."""
    if body.stream_options is not None and not body.stream:
        raise errors.invalid_request(
            "'stream_options' wants 'stream' to be true.", "stream_options", "invalid_value"
        )


class TokenizeBody(Body):
    """`POST /tokenize`: exactly one of `prompt` and `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    add_special_tokens: bool | None = None  # default: true for a prompt, false for messages

    unsupported: ClassVar[dict[str, AsksNothing]] = {
        "tools": _empty,
        "chat_template": _empty,
        "chat_template_kwargs": _empty,
        "add_generation_prompt": lambda value: value is True,
        "continue_final_message": _empty,
        "return_token_strs": _empty,
    }


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: TokenIds


class CacheResetBody(Body):
    """`POST /cache/reset`; without `tiers`, all of them, and without the rest, everything.

    An unknown field is an error here: a misspelt `tiers` would drop every tier. So is null, which
    a client sends that has lost the name of its tenant.
    """

    refuses_unknown = True
    refuses_null = frozenset({"cache_salt", "prompt_cache_key"})

    tiers: list[Literal["device", "cpu", "disk"]] | None = None
    cache_salt: CacheSalt = None
    prompt_cache_key: str | None = Field(None, min_length=1)


class ConversationBody(Body):
    """`POST /cache/unpin`: exactly one of the first three names the conversation.

    An unknown field is an error here: a misspelt `cache_salt` would name another tenant's.
    """

    refuses_unknown = True

    prompt_cache_key: str | None = Field(None, min_length=1)
    prompt: Any = None  # one text or a list of token ids
    messages: Any = None  # see `prompts.parse_messages`
    cache_salt: CacheSalt = None
    add_special_tokens: bool | None = None  # default: true for a prompt, false for messages


class ConversationTtlBody(ConversationBody):
    """`POST /cache/pin` and `/cache/prefetch`."""

    ttl_seconds: float | None = Field(None, gt=0, allow_inf_nan=False, le=MAX_TTL_SECONDS)
