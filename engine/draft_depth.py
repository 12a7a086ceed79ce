"""How many drafts each request gets in the next step: as many as pay, by what was measured.

    acceptance  of a request's first drafts, and of later ones once those before were accepted:
                two shares, since text that a drafter knows comes in stretches
    gain        of a depth: the tokens that its drafts are expected to add to the step
    cost        of a step: its pass over one row per request and one per draft, plus the drafter's
                own time, which grows with the deepest draft

A step is worth (requests + gains) / cost tokens per second. Deepening goes by the likeliest drafts
first, over all requests, to the bound where that is highest. (Goodput as the measure of a depth:
Liu et al., "Optimizing Speculative Decoding for Serving Large Language Models Using Goodput",
2024; per request and per draft it is worked out here anew.) What a step without drafts costs is
measured first: drafts cannot be said to pay before that.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from engine.step_costs import StepCosts

# What is taken for granted of a drafter that has not drafted yet, and how many drafts' worth.
FIRST_SHARE, LATER_SHARE = 0.6, 0.8
# Drafts' worth of what other requests have shown, for a new one; what is left after each own run.
_TRUST_IN_OTHERS, _TRUST_LEFT, _LEAST_TRUST = 2.0, 0.85, 1e-3
_MEMORY = 0.9  # weight of a run of drafts after each further one of its request
_MEMORY_OF_ALL = 0.99
# Where no draft pays, one is tried after so many steps, then ever more rarely.
FIRST_PROBE, LAST_PROBE = 8, 64
_PROBE_DEPTH = 2
# How likely the last draft must be: what is tried. Rough steps suffice, the optimum is flat.
_BOUNDS = (
    0.95,
    0.85,
    0.7,
    0.55,
    0.4,
    0.3,
    0.22,
    0.16,
    0.11,
    0.08,
    0.055,
    0.04,
    0.025,
    0.015,
    0.008,
)


@dataclass(slots=True)
class Acceptance:
    """Decayed counts of drafts judged and accepted, first ones of a run and later ones."""

    first_judged: float = 0.0
    first_accepted: float = 0.0
    later_judged: float = 0.0
    later_accepted: float = 0.0
    trust_in_others: float = _TRUST_IN_OTHERS

    def observe(self, num_drafts: int, num_accepted: int, memory: float) -> None:
        """A run of drafts; those behind the first that was not accepted were never judged."""
        num_judged = min(num_drafts, num_accepted + 1)
        self.first_judged = self.first_judged * memory + 1
        self.first_accepted = self.first_accepted * memory + (num_accepted > 0)
        self.later_judged = self.later_judged * memory + num_judged - 1
        self.later_accepted = self.later_accepted * memory + max(0, num_accepted - 1)
        self.trust_in_others = max(_LEAST_TRUST, self.trust_in_others * _TRUST_LEFT)

    def shares(self, first: float, later: float) -> tuple[float, float]:
        """How likely a first draft, and a later one, is accepted; the arguments are for no data."""
        weight = self.trust_in_others
        return (
            (self.first_accepted + weight * first) / (self.first_judged + weight),
            (self.later_accepted + weight * later) / (self.later_judged + weight),
        )


@dataclass(slots=True)
class _Drafted:
    """One live request."""

    acceptance: Acceptance = field(default_factory=Acceptance)
    num_without: int = 0  # steps since it last had a draft
    probe_after: int = FIRST_PROBE


class DraftDepth:
    """Depths from measurements; the engine loop tells it of every step."""

    def __init__(self, max_depth: int, *, adaptive: bool = True) -> None:
        """`max_depth` drafts at most; always as many unless `adaptive`."""
        self._max_depth = max_depth
        self._adaptive = adaptive
        self._costs = StepCosts()
        self._all = Acceptance()
        self._requests: dict[str, _Drafted] = {}
        self._seconds_per_depth: deque[float] = deque([0.0], maxlen=9)

    def plan(self, wanted: Sequence[tuple[str, int]], num_other_rows: int = 0) -> list[int]:
        """Depths for the decoding requests of a step: (id, tokens of any use) each.

        `num_other_rows` is how many rows of prompts the step will have beside them.
        """
        if not self._adaptive:
            return [min(room, self._max_depth) for _, room in wanted]
        first, later = self._all.shares(FIRST_SHARE, LATER_SHARE)
        shares = [
            self._requests.setdefault(request_id, _Drafted()).acceptance.shares(first, later)
            for request_id, _ in wanted
        ]
        rooms = [min(room, self._max_depth) for _, room in wanted]
        if not self._costs.knows_from(len(wanted) + num_other_rows):
            return [0] * len(wanted)
        depths = self._best(shares, rooms, len(wanted) + num_other_rows)
        return [
            self._probed(self._requests[request_id], depth, room)
            for (request_id, _), depth, room in zip(wanted, depths, rooms, strict=True)
        ]

    def _best(
        self, shares: Sequence[tuple[float, float]], rooms: Sequence[int], num_rows: int
    ) -> list[int]:
        best = [0] * len(shares)
        best_rate = len(shares) / self._costs.seconds(num_rows)
        per_depth = median(self._seconds_per_depth)
        for bound in _BOUNDS:
            depths = [
                min(room, _depth_within(bound, first, later))
                for (first, later), room in zip(shares, rooms, strict=True)
            ]
            deepest = max(depths, default=0)
            if not deepest:
                continue
            gain = sum(
                _expected(first, later, depth)
                for (first, later), depth in zip(shares, depths, strict=True)
            )
            cost = self._costs.seconds(num_rows + sum(depths)) + per_depth * deepest
            rate = (len(shares) + gain) / cost
            if rate > best_rate:
                best, best_rate = depths, rate
        return best

    @staticmethod
    def _probed(state: _Drafted, depth: int, room: int) -> int:
        """What was planned, or now and then a look at whether drafts pay by now."""
        if depth:
            state.num_without, state.probe_after = 0, FIRST_PROBE
            return depth
        state.num_without += 1
        if state.num_without < state.probe_after:
            return 0
        state.num_without = 0
        state.probe_after = min(2 * state.probe_after, LAST_PROBE)
        return min(_PROBE_DEPTH, room)

    def observe_drafts(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        """A run of a live request was verified."""
        if not num_drafts or not self._adaptive:
            return
        self._all.observe(num_drafts, num_accepted, _MEMORY_OF_ALL)
        state = self._requests.setdefault(request_id, _Drafted())
        state.acceptance.observe(num_drafts, num_accepted, _MEMORY)

    def observe_pass(self, num_rows: int, seconds: float) -> None:
        """A pass of decoding requests alone, drafts included."""
        self._costs.observe(num_rows, seconds)

    def observe_proposal(self, deepest: int, seconds: float) -> None:
        """The drafter took `seconds` for drafts of which the longest run had `deepest`."""
        if deepest:
            self._seconds_per_depth.append(seconds / deepest)

    def finish(self, request_id: str) -> None:
        """Forget a request; unknown ids are ignored."""
        self._requests.pop(request_id, None)


def _depth_within(bound: float, first: float, later: float) -> int:
    """The most drafts of which the last is still accepted with probability `bound` or more.

    Draft j is, with first * later ** (j - 1).
    """
    if first < bound:
        return 0
    if later >= 1.0:
        return 1 << 20
    if later <= 0.0:
        return 1
    return 1 + int(math.log(bound / first) / math.log(later))


def _expected(first: float, later: float, depth: int) -> float:
    """Tokens that `depth` drafts are expected to add: the sum of first * later ** (j - 1)."""
    if later >= 1.0:
        return first * depth
    return first * (1.0 - later**depth) / (1.0 - later)
