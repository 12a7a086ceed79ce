"""Which drafts of a run stand.

    draft     a token that a drafter guesses for a position after the last known token
    draw      the token that the target itself draws at that position, from its own logits and the
              noise of (seed, position), reading the drafts before it as input
    accepted  a draft equal to the draw at its position, with every draft before it accepted too
    bonus     the draw right after the last accepted draft; it rests on accepted tokens alone, so
              it stands as well, and a run yields one token more than it accepts

A draw after the first draft that is not accepted would rest on a wrong token, so none is made, and
the KV of that draft is dropped. Since a draft is accepted iff it *is* the target's draw, the tokens
are those that would have come without a drafter, greedy or sampled, and no residual distribution
is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar


class Draw(Protocol):
    """What came of drawing at one position."""

    @property
    def token_id(self) -> int | None:
        """None where nothing could be drawn, which no draft equals."""
        ...


D = TypeVar("D", bound=Draw)


def verify(drafts: Sequence[int], draw: Callable[[int], D]) -> list[D]:
    """The target's draws of a run: of each accepted draft, and the one after them.

    `draw(i)` is the target's draw after the first `i` drafts; it is called for i = 0, 1, ... as
    long as every draft before is accepted. So the result has one entry more than were accepted.
    """
    draws: list[D] = []
    for draft in drafts:
        draws.append(draw(len(draws)))
        if draws[-1].token_id != draft:
            return draws
    draws.append(draw(len(draws)))
    return draws
