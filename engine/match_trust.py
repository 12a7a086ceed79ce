"""How far a match may be trusted: measured per kind of match, for each request.

A kind is for example "4 or 5 tokens match, in the request's own text". Of each is counted how often
the token that such a match predicted was the one that came. From that rate p follows the number of
drafts: the last of them is to be right with at least `ENOUGH`, so p ** n >= ENOUGH.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

ENOUGH = 0.15
_LOG_ENOUGH = math.log(ENOUGH)
_PRIOR_WEIGHT = 3.0  # what other requests saw counts for as many tokens of this one
_REQUEST_MEMORY = 0.85  # of an older step's count, per newer step of the same kind
_PRIOR_MEMORY = 0.98


class MatchTrust:
    """Rates by kind of match; `parent` has those of all requests, the prior of each."""

    def __init__(self, priors: Sequence[float], parent: MatchTrust | None = None) -> None:
        """`priors[kind]` is the rate that is believed before anything was seen."""
        self._parent = parent
        self._memory = _REQUEST_MEMORY if parent else _PRIOR_MEMORY
        self._weight = _PRIOR_WEIGHT if parent else 4 * _PRIOR_WEIGHT
        self._priors = priors
        self._right = [0.0] * len(priors)
        self._wrong = [0.0] * len(priors)

    def rate(self, kind: int) -> float:
        """How probably the next token that a match of this kind predicts is the right one."""
        prior = self._parent.rate(kind) if self._parent else self._priors[kind]
        right, wrong = self._right[kind], self._wrong[kind]
        return (right + self._weight * prior) / (right + wrong + self._weight)

    def num_drafts(self, kind: int, most: int) -> int:
        """How many drafts, `most` at most, a match of this kind is good for; maybe 0."""
        rate = self.rate(kind)
        if rate >= 1.0:
            return most
        return min(most, int(_LOG_ENOUGH / math.log(rate))) if rate > ENOUGH else 0

    def learn(self, kind: int, num_right: int, failed: bool) -> None:
        """A match predicted `num_right` tokens rightly; `failed`: and then a wrong one."""
        self._right[kind] = self._right[kind] * self._memory + num_right
        self._wrong[kind] = self._wrong[kind] * self._memory + failed
        if self._parent:
            self._parent.learn(kind, num_right, failed)
