"""How many drafts each request gets in the next step: as many as pay, by what was measured.

    acceptance  of a request's first drafts, and of later ones once those before were accepted:
                two shares, since text that a drafter knows comes in stretches
    gain        of a depth: the tokens that its drafts are expected to add to the step
    cost        of a step: its pass over one row per request, per draft and per token of prompts,
                plus the drafter's own time, whether it drafts anything or not

A step is worth (requests + gains + prompt rows) / cost tokens per second. Deepening goes by the
likeliest drafts first, over all requests, to the bound where that is highest. What a step without
drafts costs is measured first, and again from time to time: drafts cannot be said to pay before
that. (Goodput as the measure of a depth: Liu et al., "Optimizing Speculative Decoding for Serving
Large Language Models Using Goodput", 2024; per request and per draft it is worked out here anew.)

Where no draft pays, a few are tried all the same, for a hundredth of the time that steps take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine.step_costs import StepCosts

# What is taken for granted of a drafter that has not drafted yet.
FIRST_SHARE, LATER_SHARE = 0.6, 0.8
# Drafts' worth of what other requests have shown, for a new one; what is left after each own run.
_TRUST_IN_OTHERS, _TRUST_LEFT, _LEAST_TRUST = 2.0, 0.85, 1e-3
_MEMORY = 0.9  # weight of a run of drafts after each further one of its request
_MEMORY_OF_ALL = 0.99
_MEMORY_OF_ANSWERS = 0.95  # of whether the drafter had any draft
PROBE_SHARE = 0.01  # of the time of steps that probes may take
_MOST_CREDIT = 2.0  # seconds of it that are saved up
_PROBE_DEPTH = 2
# How likely the last draft must be: what is tried. Rough steps suffice, the optimum is flat.
_BOUNDS = np.array(
    (0.95, 0.85, 0.7, 0.55, 0.4, 0.3, 0.22, 0.16, 0.11, 0.08, 0.055, 0.04, 0.025, 0.015, 0.008)
)

Floats = npt.NDArray[np.float64]


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
    last_drafted: int = 0  # the step


@dataclass(slots=True)
class _Look:
    """A step with drafts for the sake of probes alone, and what came of it."""

    num_requests: int
    num_accepted: int = 0
    seconds: float = 0.0


class DraftDepth:
    """Depths from measurements; the engine loop tells it of every step."""

    def __init__(self, max_depth: int, *, adaptive: bool = True) -> None:
        """`max_depth` drafts at most; always as many unless `adaptive`."""
        self._max_depth = max_depth
        self._adaptive = adaptive
        self._pass_costs = StepCosts()
        self._call_costs = StepCosts(first_guess=0.0)  # of the drafter, by the deepest asked for
        self._answers = 1.0  # share of requests asked for that got drafts
        self._all = Acceptance()
        self._requests: dict[str, _Drafted] = {}
        self._step = 0
        self._credit = 0.0  # seconds that probes may take
        self._look: _Look | None = None

    def plan(
        self, wanted: Sequence[tuple[str, int]], num_prompt_rows: int = 0, num_spare_rows: int = 512
    ) -> list[int]:
        """Depths for the decoding requests of a step: (id, tokens of any use) each.

        The step will have `num_prompt_rows` rows of prompts beside them; all drafts together take
        `num_spare_rows` rows at most.
        """
        rooms = np.array([min(room, self._max_depth) for _, room in wanted], dtype=np.int64)
        if not self._adaptive or not wanted:
            return [int(room) for room in rooms]
        self._step += 1
        self._settle_look()
        states = [self._requests.setdefault(request_id, _Drafted()) for request_id, _ in wanted]
        if not self._pass_costs.knows_from(len(wanted) + num_prompt_rows):
            return [0] * len(wanted)
        shares = self._shares(states)
        num_rows = len(wanted) + num_prompt_rows
        depths = self._best(shares, rooms, num_rows, num_spare_rows, self._answers)
        return self._with_probes(states, depths, rooms, num_spare_rows)

    def weigh(
        self,
        likely: Sequence[tuple[int, float]],
        num_requests: int,
        num_prompt_rows: int,
        num_spare_rows: int,
    ) -> list[int]:
        """How many of the drafts there are to verify, of each run: (drafts, likelihood of each if
        those before it are right). `num_requests` decode in the step, with drafts or without.

        Nothing needs to be tried: who knows likelihoods learns from guesses that were not made.
        """
        rooms = np.array([num_drafts for num_drafts, _ in likely], dtype=np.int64)
        if not self._adaptive or not rooms.any():
            return [int(room) for room in rooms]
        num_rows = num_requests + num_prompt_rows
        if not self._pass_costs.knows_from(num_rows):
            return [0] * len(likely)
        one = np.array([likelihood for _, likelihood in likely]).clip(1e-9, 1 - 1e-9)
        shares = np.stack((one, one))
        best = self._best(shares, rooms, num_rows, num_spare_rows, 1.0, is_asked=True)
        return [int(depth) for depth in best]

    def _shares(self, states: Sequence[_Drafted]) -> Floats:
        """First and later shares of each request, [2, requests], inside (0, 1)."""
        others = self._all.shares(FIRST_SHARE, LATER_SHARE)
        shares = np.array([state.acceptance.shares(*others) for state in states]).T
        return shares.clip(1e-9, 1 - 1e-9)

    def _best(
        self,
        shares: Floats,
        rooms: npt.NDArray[np.int64],
        num_rows: int,
        num_spare_rows: int,
        answers: float,
        *,
        is_asked: bool = False,
    ) -> npt.NDArray[np.int64]:
        """Draft j of a request is accepted with first * later ** (j - 1): the sum is the gain.

        `num_rows` is without drafts, `answers` the share of runs that there will be; `is_asked`:
        the drafter's time has been spent.
        """
        first, later = shares
        best, best_rate = np.zeros_like(rooms), num_rows / self._pass_costs.seconds(num_rows)
        reach = np.log(_BOUNDS[:, None] / first) / np.log(later)
        table = np.where(first < _BOUNDS[:, None], 0, 1 + np.minimum(reach, 1e6)).astype(np.int64)
        before = -1
        for depths in np.minimum(table, rooms):
            depths = _within(depths, num_spare_rows)
            total = int(depths.sum())
            if total in (0, before):
                continue
            before = total
            gains = float((first * (1.0 - later**depths) / (1.0 - later)).sum())
            cost = self._pass_costs.seconds(num_rows + answers * total)
            if not is_asked:
                cost += self._call_costs.seconds(int(depths.max()))
            rate = (num_rows + answers * gains) / cost
            if rate > best_rate:
                best, best_rate = depths, rate
        return best

    def _with_probes(
        self,
        states: Sequence[_Drafted],
        depths: npt.NDArray[np.int64],
        rooms: npt.NDArray[np.int64],
        num_spare_rows: int,
    ) -> list[int]:
        """What was planned, and a look at whether drafts pay by now where none are."""
        planned = [int(depth) for depth in depths]
        left = num_spare_rows - sum(planned)
        is_look = not any(planned)  # there are drafts for the sake of the probes alone
        call = self._call_costs.seconds(_PROBE_DEPTH) if is_look else 0.0
        for i in sorted(range(len(states)), key=lambda i: states[i].last_drafted):
            state = states[i]
            if planned[i]:
                state.last_drafted = self._step
                continue
            num_rows = len(states) + sum(planned)
            depth = min(_PROBE_DEPTH, int(rooms[i]), left)
            price = call + self._pass_costs.seconds(num_rows + depth)
            price -= self._pass_costs.seconds(num_rows)
            if depth <= 0 or price > self._credit:
                continue
            if not is_look:
                self._credit -= price
            planned[i], state.last_drafted = depth, self._step
            left -= depth
            call = 0.0
        if is_look and any(planned):
            self._look = _Look(len(states))
        return planned

    def _settle_look(self) -> None:
        """What probes cost beyond what their tokens are worth without drafts is paid."""
        look, self._look = self._look, None
        if look is not None:
            worth = 1.0 + look.num_accepted / look.num_requests
            plain = self._pass_costs.seconds(look.num_requests)
            self._credit += min(0.0, worth * plain - look.seconds)

    def observe_drafts(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        """A run of a live request was verified."""
        if not num_drafts or not self._adaptive:
            return
        self._all.observe(num_drafts, num_accepted, _MEMORY_OF_ALL)
        state = self._requests.setdefault(request_id, _Drafted())
        state.acceptance.observe(num_drafts, num_accepted, _MEMORY)
        if self._look is not None:
            self._look.num_accepted += num_accepted

    def observe_pass(self, num_rows: int, seconds: float) -> None:
        """A pass of decoding requests alone, drafts included."""
        self._pass_costs.observe(num_rows, seconds)
        if self._look is not None:
            self._look.seconds += seconds
        self._credit = min(_MOST_CREDIT, self._credit + PROBE_SHARE * seconds)

    def observe_call(self, deepest: int, seconds: float, num_asked: int, num_answered: int) -> None:
        """The drafter was asked for `deepest` drafts at most, for `num_asked` requests, and took
        `seconds`; `num_answered` got any."""
        self._call_costs.observe(deepest, seconds)
        if self._look is not None:
            self._look.seconds += seconds
        kept = _MEMORY_OF_ANSWERS
        self._answers = kept * self._answers + (1.0 - kept) * num_answered / num_asked

    def finish(self, request_id: str) -> None:
        """Forget a request; unknown ids are ignored."""
        self._requests.pop(request_id, None)


def _within(depths: npt.NDArray[np.int64], num_rows: int) -> npt.NDArray[np.int64]:
    """The same, the deepest cut so that all together take `num_rows` at most."""
    low, high = 0, int(depths.max(initial=0))
    while low < high:
        middle = (low + high + 1) // 2
        if int(np.minimum(depths, middle).sum()) <= num_rows:
            low = middle
        else:
            high = middle - 1
    return np.minimum(depths, low)
