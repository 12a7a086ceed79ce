"""Which drafts of a run stand.

    draft     a token that a drafter guesses for a position after the last known token
    draw      the token that the target itself draws at that position, from its own logits and the
              noise of (seed, position), reading the drafts before it as input
    accepted  a draft equal to the draw at its position, with every draft before it accepted too
    bonus     the draw right after the last accepted draft; it rests on accepted tokens alone, so
              it stands as well, and a run yields one token more than it accepts

A draw after the first draft that is not accepted rests on a wrong token and is dropped, and so is
its KV. Since a draft is accepted iff it *is* the target's draw, the tokens are those that would
have come without a drafter, greedy or sampled, and no residual distribution is needed.
"""

from __future__ import annotations

from collections.abc import Sequence


def accept(drafts: Sequence[int], draws: Sequence[int | None]) -> int:
    """How many of `drafts`, counted from the first, are accepted.

    `draws[i]` is the target's draw where `drafts[i]` was guessed, or None where it could not draw,
    which no draft equals; the one draw beyond the drafts is the bonus if all are accepted. The run
    yields `draws[: accepted + 1]`. Raises ValueError unless there is one draw more than drafts.
    """
    if len(draws) != len(drafts) + 1:
        raise ValueError(f"{len(drafts)} drafts need {len(drafts) + 1} draws, got {len(draws)}")
    for accepted, draft in enumerate(drafts):
        if draft != draws[accepted]:
            return accepted
    return len(drafts)
