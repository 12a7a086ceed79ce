"""What drafters are: they guess tokens, the engine verifies them.

So a drafter can cost time, which `engine.guarded_drafter` bounds, but never truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What a drafter learns about one request."""

    request_id: str
    token_ids: Sequence[int]  # prompt and output so far; never changes, slices are tuples
    max_tokens: int  # drafts of any use at this step
    salt: str | None  # cache salt: what is learnt from one salt must not show in another
    num_prompt_tokens: int = 0
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0  # the target draws the token at position p with the noise of (seed, p)


class Drafter(Protocol):
    """Built as `DrafterClass(vocab_size=..., max_tokens=...)`; called from one thread only.

    One that learns from what was generated may have a method `remember(context)` too: it is called
    with all tokens of a request (`max_tokens` 0) right before that request's `finish`. A method
    `forget(salts)` is called when caches are reset: what was learnt of these salts, or of all if it
    is None, must not be used any more. `engine.speculation` asks ours for more where
    they have `likelihoods()`: for each context of the last `propose`, how likely each of its drafts
    is right if those before it are.
    """

    def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        """For each context at most its `max_tokens` guesses of what follows; [] for none."""
        ...

    def finish(self, request_id: str) -> None:
        """The request is over; it will not be proposed for again."""
        ...
