"""What a request's stream carries. Every field below is a *delta* unless it says otherwise."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Logprob:
    """One alternative; `rank` 1 is the most likely token of the raw distribution."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The token at one position and its alternatives, most likely first.

    Values are the log-softmax of the raw logits, before temperature, penalties, bias and filters.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Prompt tokens not computed at first admission, by the nearest tier that held them."""

    device: int = 0
    cpu: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        return self.device + self.cpu + self.disk


@dataclass(slots=True)
class RequestTimes:
    """Monotonic seconds; None until it happened."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One event of a request's stream. Exactly one, the last, has a `finish_reason`.

    `token_ids` and `logprobs` (if asked for) have one entry per token and run up to and including
    the token that ended the generation; `text` is cut before the stop. Text may lag behind ids:
    an incomplete character or a possible beginning of a stop string is held back.
    """

    request_id: str
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    prompt_logprobs: list[TokenLogprobs | None] | None  # whole, on the first event alone
    finish_reason: FinishReason | None
    stop_reason: int | str | None  # the stop id or string that ended it; None for EOS
    error: str | None  # for FinishReason.ERROR: what went wrong
    num_prompt_tokens: int  # running totals from here on
    num_output_tokens: int
    cached: CachedTokens
    recomputed_by_choice: int
    times: RequestTimes = field(repr=False)
    num_accepted_drafts: int = 0  # output tokens that a drafter had guessed
    num_rejected_drafts: int = 0  # guesses that are not in the output
