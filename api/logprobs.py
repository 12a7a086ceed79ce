"""Log probabilities in OpenAI's two formats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from engine.outputs import TokenLogprobs

if TYPE_CHECKING:
    from engine.tokenizer import Tokenizer

LOWEST = -9999.0  # JSON has no minus infinity

# A token and its entry, which is None for the first token of a prompt: nothing comes before it.
Position = tuple[int, TokenLogprobs | None]


def positions(entries: Iterable[TokenLogprobs]) -> list[Position]:
    return [(entry.token_id, entry) for entry in entries]


def completion_logprobs(
    tokenizer: Tokenizer, entries: Sequence[Position], text_offset: int
) -> tuple[dict[str, Any], int]:
    """The `logprobs` of a completion choice, and the offset at which the next chunk goes on.

    `text_offset` counts characters of the tokens' own texts, which is the text itself but for
    special tokens and characters that span several tokens. Of two alternatives with one text the
    likelier stays.
    """
    tokens: list[str] = []
    offsets: list[int] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    for token_id, entry in entries:
        text = tokenizer.token_text(token_id)
        tokens.append(text)
        offsets.append(text_offset)
        text_offset += len(text)
        if entry is None:
            token_logprobs.append(None)
            top_logprobs.append(None)
            continue
        token_logprobs.append(max(entry.logprob, LOWEST))
        top: dict[str, float] = {}
        for other in entry.top:
            top.setdefault(tokenizer.token_text(other.token_id), max(other.logprob, LOWEST))
        top.setdefault(text, max(entry.logprob, LOWEST))
        top_logprobs.append(top)
    body = {
        "tokens": tokens,
        "token_logprobs": token_logprobs,
        "top_logprobs": top_logprobs,
        "text_offset": offsets,
    }
    return body, text_offset


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """The `logprobs` of a chat choice."""
    return {
        "content": [
            {
                **_token(tokenizer, entry.token_id, entry.logprob),
                "top_logprobs": [
                    _token(tokenizer, other.token_id, other.logprob) for other in entry.top
                ],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": max(logprob, LOWEST),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }
