"""As many drafts as pay: never those that are always wrong, all of those that are always right."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable

import pytest

from engine.draft_depth import Acceptance, DraftDepth


def cheap(rows: int) -> float:
    """The weights dominate."""
    return 0.030 * (1 + rows / 150)


def dear(rows: int) -> float:
    """Every row by itself."""
    return 0.030 * rows


class Step:
    """A drafter with some right drafts per run, on a machine where passes cost `cost(rows)`."""

    def __init__(self, cost: Callable[[int], float], max_depth: int = 31) -> None:
        self.depth = DraftDepth(max_depth)
        self.cost = cost
        self.seconds = 0.0
        self.tokens = 0

    def run(
        self,
        rights: dict[str, int],
        room: int = 1000,
        *,
        seconds_per_call: float = 0.0,
        seconds_per_draft: float = 0.0,
        answers: bool = True,
        spare: int = 512,
    ) -> list[int]:
        """One step; the depths that it had."""
        depths = self.depth.plan([(name, room) for name in rights], 0, spare)
        deepest = max(depths)
        if deepest:
            call = seconds_per_call + deepest * seconds_per_draft
            num_asked = sum(map(bool, depths))
            self.depth.observe_call(deepest, call, num_asked, num_asked if answers else 0)
            self.seconds += call
        drafts = depths if answers else [0] * len(depths)
        for (name, num_right), number in zip(rights.items(), drafts, strict=True):
            self.depth.observe_drafts(name, number, min(num_right, number))
            self.tokens += 1 + min(num_right, number)
        rows = len(rights) + sum(drafts)
        self.depth.observe_pass(rows, self.cost(rows))
        self.seconds += self.cost(rows)
        return depths

    def slowdown(self) -> float:
        """Seconds per token, as a multiple of those of one stream without drafts."""
        return self.seconds / self.tokens / self.cost(1)


def test_the_counts_are_of_drafts_that_were_judged() -> None:
    acceptance = Acceptance()
    acceptance.observe(8, 3, memory=1.0)  # 3 accepted, one refused, four never looked at
    acceptance.observe(8, 0, memory=1.0)
    acceptance.observe(2, 2, memory=1.0)
    assert (acceptance.first_judged, acceptance.first_accepted) == (3, 2)
    assert (acceptance.later_judged, acceptance.later_accepted) == (4, 3)
    acceptance.observe(1, 1, memory=0.5)
    assert (acceptance.first_judged, acceptance.first_accepted) == (2.5, 2.0)
    assert (acceptance.later_judged, acceptance.later_accepted) == (2.0, 1.5)


def test_drafts_that_are_always_right_are_made_to_the_full() -> None:
    step = Step(cheap)
    depths = [step.run({"a": 99})[0] for _ in range(12)]
    assert depths[:3] == [0, 0, 0], "what a step without drafts costs is measured first"
    assert depths[3] >= 4, "no draft has been judged yet, and rows are cheap"
    assert depths[8:] == [31] * 4


def test_no_more_than_there_is_room_for() -> None:
    step = Step(cheap)
    for _ in range(12):
        step.run({"a": 99})
    assert step.run({"a": 99}, room=5) == [5]
    assert step.run({"a": 99}, room=0) == [0]
    shallow = Step(cheap, max_depth=3)
    assert [shallow.run({"a": 99})[0] for _ in range(9)][-1] == 3


def test_rows_that_do_not_suffice_are_shared_evenly() -> None:
    step = Step(cheap)
    streams = {str(number): 99 for number in range(40)}
    for _ in range(12):
        step.run(streams, spare=400)
    assert step.run(streams, spare=400) == [10] * 40
    assert step.run(streams | {"0": 0}, spare=0) == [0] * 40


@pytest.mark.parametrize("cost", [cheap, dear])
@pytest.mark.parametrize("num_streams", [1, 64])
def test_drafts_that_are_always_wrong_cost_a_fiftieth_at_most(
    cost: Callable[[int], float], num_streams: int
) -> None:
    """In answers of thirty tokens, each with its own beginning; once the drafter is known."""
    step = Step(cost)
    plain = 0.0
    for turn in range(1000):
        names = [f"{number}.{(turn + number) // 30}" for number in range(num_streams)]
        for number in range(num_streams):
            step.depth.finish(f"{number}.{(turn + number) // 30 - 1}")
        if turn == 200:
            step.seconds = plain = 0.0
        step.run(dict.fromkeys(names, 0))
        plain += cost(num_streams)
    assert 1.0 < step.seconds / plain < 1.02


@pytest.mark.parametrize("answers", [True, False])
def test_a_drafter_whose_calls_take_long_and_bring_nothing_is_hardly_called(answers: bool) -> None:
    step = Step(cheap)
    for turn in range(3000):
        if turn == 1000:
            step.seconds, step.tokens = 0.0, 0
        step.run({"a": 0}, seconds_per_call=0.2, answers=answers)
    assert 1.0 < step.slowdown() < 1.02


def test_where_every_row_costs_as_much_as_a_step_only_sure_drafts_are_made() -> None:
    """A row each: drafts of nine in ten right cost more than they bring."""
    step = Step(dear)
    coin = itertools.cycle([31] * 9 + [0])
    for turn in range(500):
        if turn == 100:
            step.seconds, step.tokens = 0.0, 0
        step.run({"a": next(coin)})
    assert step.slowdown() < 1.02


@pytest.mark.parametrize("num_streams", [1, 32])
def test_text_that_becomes_known_is_soon_drafted_to_the_full(num_streams: int) -> None:
    step = Step(cheap)
    streams = [str(number) for number in range(num_streams)]
    for _ in range(400):
        step.run(dict.fromkeys(streams, 0))
    waited: dict[str, int] = {}
    for turn in range(400):
        depths = step.run(dict.fromkeys(streams, 99), spare=2000)
        for name, depth in zip(streams, depths, strict=True):
            if depth > 20:
                waited.setdefault(name, turn)
    assert len(waited) == num_streams
    assert statistics.median(waited.values()) < 60


def test_each_request_has_the_depth_of_its_own_acceptance() -> None:
    step = Step(cheap)
    depths = [step.run({"right": 99, "wrong": 0}) for _ in range(60)]
    assert depths[-1][0] == 31
    assert max(wrong for _, wrong in depths[40:]) == 2, "a look beside others costs next to nothing"
    step.depth.finish("wrong")
    step.depth.finish("unknown")
    assert step.run({"right": 99, "wrong": 0})[1] >= 1, "a new request begins as others do"


def test_a_drafter_that_takes_its_time_is_asked_for_less() -> None:
    coins = [0, 1, 0, 2, 4, 0, 1, 1, 0, 3]

    def mean_depth(seconds_per_draft: float) -> float:
        step, coin = Step(cheap), itertools.cycle(coins)
        depths = [
            step.run({"a": next(coin)}, seconds_per_draft=seconds_per_draft)[0] for _ in range(200)
        ]
        return statistics.mean(depths[50:])

    assert mean_depth(0.0) > 4
    assert mean_depth(0.03) < 1


def test_what_a_step_costs_without_drafts_is_measured_again() -> None:
    """Its first measurements were three times too slow, so drafts seemed to cost nothing."""

    def cost(rows: int) -> float:
        return 0.030 * (1 + rows / 40)

    slow = iter([3.0] * 3)
    step = Step(lambda rows: cost(rows) * next(slow, 1.0))
    coin = itertools.cycle([0, 0, 1, 0, 0, 2, 0])
    streams = [str(number) for number in range(32)]
    for turn in range(1500):
        if turn == 700:
            step.seconds, step.tokens = 0.0, 0
        step.run({name: next(coin) for name in streams})
    assert step.seconds / step.tokens < 1.02 * cost(32) / 32


def test_a_fixed_depth_is_always_the_most() -> None:
    depth = DraftDepth(5, adaptive=False)
    for _ in range(50):
        assert depth.plan([("a", 9), ("b", 3), ("c", 0)]) == [5, 3, 0]
        depth.observe_drafts("a", 5, 0)
        depth.observe_pass(11, 1.0)


# --- drafters that know how good their guesses are


def measured(cost: Callable[[int], float], *sizes: int) -> DraftDepth:
    depth = DraftDepth(31)
    for rows in sizes or (1, 2, 4, 8, 16, 32, 64, 128):
        for _ in range(3):
            depth.observe_pass(rows, cost(rows))
    return depth


def test_sure_guesses_are_verified_and_unsure_ones_left() -> None:
    """A row costs 1/151 of the step: it pays down to that likelihood of its draft, or nearly."""
    depth = measured(cheap)
    assert depth.weigh([(31, 0.99)], 1, 0, 500) == [31]
    assert depth.weigh([(31, 0.002)], 1, 0, 500) == [0]
    (unsure,) = depth.weigh([(31, 0.5)], 1, 0, 500)
    assert 4 <= unsure <= 8
    assert depth.weigh([(31, 0.99), (31, 0.002), (3, 0.9), (0, 0.0)], 9, 0, 500) == [31, 0, 3, 0]
    assert depth.weigh([(31, 0.99)] * 4, 4, 0, 40) == [10] * 4


def test_where_rows_are_dear_only_nearly_certain_guesses_are_verified() -> None:
    depth = measured(lambda rows: 0.030 * (1 + (rows - 1) * 0.9))
    assert depth.weigh([(31, 0.85)], 1, 0, 500) == [0]
    assert depth.weigh([(31, 0.999)], 1, 0, 500)[0] > 8


def test_a_first_draft_that_costs_half_a_step_must_be_worth_it() -> None:
    """On a machine where two rows cost half as much again as one, and eight little more."""

    def cost(rows: int) -> float:
        return 0.117 if rows == 1 else 0.170 + 0.003 * rows

    depth = measured(cost)
    assert depth.weigh([(4, 0.3)], 1, 0, 500) == [0]
    assert depth.weigh([(8, 0.8)], 1, 0, 500) == [8]


def test_likelihoods_are_weighed_once_a_step_without_drafts_was_measured() -> None:
    depth = DraftDepth(31)
    assert depth.weigh([(31, 0.99)], 1, 0, 500) == [0]
    for _ in range(3):
        depth.observe_pass(1, 0.030)
    assert depth.weigh([(31, 0.99)], 1, 0, 500) == [31]
    assert DraftDepth(31, adaptive=False).weigh([(7, 0.0)], 1, 0, 500) == [7]
