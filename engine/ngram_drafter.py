"""Drafts from text that was seen before: the n-gram, or suffix, drafter.

It looks for the longest match of a request's last tokens, in the request's own tokens and in those
that finished requests of the same salt left, and drafts what followed there:

    ... the quick brown fox jumps over ... the quick brown | fox jumps over ...
        |--- match ---| found                |-- suffix --|   drafts

A match that the drafts run out of (periodic text) goes on in circles. Where a long match ends with
a changed token, the place that it had reached stays known for a while as its `_Trail`: text that is
edited mostly goes on there, and a match of its own needs tokens yet. How many drafts a match is
good for is measured (`engine.match_trust`).
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from engine.drafter import DraftContext
from engine.finished_tokens import FinishedTokens
from engine.match_trust import MatchTrust
from engine.suffix_index import LONGEST_MATCH, SuffixIndex

MAX_REMEMBERED = 1 << 18  # tokens of finished requests, over all salts

_MOST_NEW = 1 << 14  # tokens indexed per call; a longer prompt takes more calls, without drafts yet
_OWN_GRAM = 2  # shortest match in a request's own tokens
_OTHERS_GRAM = 4  # in those of others, of which there are many more: fewer tokens match by chance
_TRAIL_MATCH = 8  # tokens of a match that leaves a trail
_TRAIL_LENGTH = 32  # tokens until a trail is cold
# Tokens that may have been left out since a trail was left, or put in; the likelier ones first.
_TRAIL_SHIFTS = (0, 1, -1, 2, -2, 3, -3, 4, -4)

# Kinds of matches, by where they are and how long: 2, 3, 4-5, 6-8, 9-15, 16-31, more.
_LENGTHS = (2, 3, 4, 6, 9, 16, 32)
_BUCKETS = [sum(length >= least for least in _LENGTHS[1:]) for length in range(LONGEST_MATCH + 1)]
_OTHERS = len(_LENGTHS)
_TRAIL = 2 * _OTHERS  # by the tokens that agree with it since it was left: 0, 1, 2 and more
_RATES = (0.4, 0.5, 0.65, 0.8, 0.9, 0.95, 0.97)
_PRIORS = (*_RATES, *_RATES, 0.6, 0.7, 0.8)


@dataclass(slots=True)
class _Trail:
    """Where the last long match would have gone on, and for how many tokens more that counts."""

    source: SuffixIndex
    position: int
    warmth: int = _TRAIL_LENGTH


@dataclass(slots=True)
class _Guess:
    """A continuation, drafted or not: what comes will tell how good its kind is."""

    kind: int
    source: SuffixIndex
    position: int  # of the first token in the source
    tokens: list[int]


@dataclass(slots=True)
class _Request:
    trust: MatchTrust
    index: SuffixIndex = field(default_factory=lambda: SuffixIndex(_OWN_GRAM))
    num_tokens: int = 0
    trail: _Trail | None = None
    guesses: list[_Guess] = field(default_factory=list)


class NgramDrafter:
    """A `Drafter` that needs no model. Some tens of microseconds per request and step.

    Everything is bounded: `finish` drops what is kept of a request, `max_remembered` is all that
    is kept of finished ones.
    """

    def __init__(
        self, *, vocab_size: int, max_tokens: int, max_remembered: int = MAX_REMEMBERED
    ) -> None:
        """`max_remembered` is in tokens; 0 to draft from a request's own tokens only.

        `vocab_size` belongs to the protocol: drafts are tokens that stood in a request.
        """
        self._max_tokens = max_tokens
        self._finished = FinishedTokens(max_remembered, _OTHERS_GRAM)
        self._trust = MatchTrust(_PRIORS)
        self._requests: dict[str, _Request] = {}
        self._likelihoods: list[float] = []  # of the last call

    def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        """For each context at most its `max_tokens` guesses of what follows; [] for none."""
        self._likelihoods.clear()
        drafts, budget = [], _MOST_NEW
        for context in contexts:
            request = self._request(context.request_id)
            # The few tokens of a step are always affordable, so that no prompt starves the others.
            end = request.num_tokens + max(budget, LONGEST_MATCH)
            new = context.token_ids[request.num_tokens : end]
            budget -= len(new)
            request.num_tokens += len(new)
            request.index.extend(new)
            self._learn(request, new)
            is_complete = request.num_tokens == len(context.token_ids)
            draft, rate = self._draft(request, context) if is_complete else ([], 0.0)
            drafts.append(draft)
            self._likelihoods.append(rate)
        return drafts

    def likelihoods(self) -> list[float]:
        """How likely each draft of the last call is right if those before it are, per context."""
        return list(self._likelihoods)

    def finish(self, request_id: str) -> None:
        """Forget the request, known or not."""
        self._requests.pop(request_id, None)

    def remember(self, context: DraftContext) -> None:
        """Keep all tokens of a request that is about to finish for later ones of its salt."""
        self._finished.remember(context.salt, array("i", context.token_ids[:]))

    def forget(self, salts: Collection[str | None] | None) -> None:
        """Keep nothing of what finished requests of these salts said; None: of any."""
        for salt in self._finished.salts if salts is None else salts:
            self._finished.forget(salt)

    def _request(self, request_id: str) -> _Request:
        request = self._requests.get(request_id)
        if request is None:
            request = _Request(MatchTrust(_PRIORS, parent=self._trust))
            request.index.begin()
            self._requests[request_id] = request
        return request

    def _draft(self, request: _Request, context: DraftContext) -> tuple[list[int], float]:
        """The drafts, and how likely each of them is."""
        most = min(context.max_tokens, self._max_tokens)
        suffix = request.index.last(LONGEST_MATCH)
        self._find_match(request, context.salt, suffix)
        best = max(request.guesses, key=lambda guess: request.trust.rate(guess.kind), default=None)
        if best is None:
            return [], 0.0
        num_drafts = request.trust.num_drafts(best.kind, most)
        return best.tokens[:num_drafts], request.trust.rate(best.kind)

    def _learn(self, request: _Request, came: Sequence[int]) -> None:
        """Compare the last guesses with what came instead."""
        if request.trail is not None:
            request.trail.position += len(came)
            request.trail.warmth -= len(came)
        for guess in request.guesses:
            num_known = min(len(came), len(guess.tokens))
            num_right = 0
            while num_right < num_known and guess.tokens[num_right] == came[num_right]:
                num_right += 1
            if num_known:
                request.trust.learn(guess.kind, num_right, failed=num_right < num_known)
            if num_right >= _TRAIL_MATCH:
                warmth = _TRAIL_LENGTH - (len(came) - num_right)
                request.trail = _Trail(guess.source, guess.position + len(came), warmth)
        request.guesses.clear()

    def _find_match(self, request: _Request, salt: str | None, suffix: array[int]) -> None:
        source = request.index
        position, length = source.longest(suffix)
        kind = _BUCKETS[length]
        others = self._finished.of(salt)
        if others is not None and length < LONGEST_MATCH:
            elsewhere, longer = others.longest(suffix, more_than=length)
            if longer:
                source, position, length = others, elsewhere, longer
                kind = _OTHERS + _BUCKETS[length]
        if length:
            self._guess(request, kind, source, position)
        if length >= _TRAIL_MATCH:
            request.trail = _Trail(source, position)
        elif request.trail is not None:
            self._follow_trail(request, request.trail, suffix)

    def _follow_trail(self, request: _Request, trail: _Trail, suffix: array[int]) -> None:
        if trail.warmth < 0:
            request.trail = None
            return
        shift, agreeing = 0, -1
        for candidate in _TRAIL_SHIFTS:
            agreement = trail.source.agreement(trail.position + candidate, suffix)
            if agreement > agreeing:
                shift, agreeing = candidate, agreement
        self._guess(request, _TRAIL + min(agreeing, 2), trail.source, trail.position + shift)

    def _guess(self, request: _Request, kind: int, source: SuffixIndex, position: int) -> None:
        tokens = source.following(position, self._max_tokens)
        if source is request.index and tokens:
            while len(tokens) < self._max_tokens:
                tokens += tokens[: self._max_tokens - len(tokens)]
        if tokens:
            request.guesses.append(_Guess(kind, source, position, tokens))
