"""As many drafts as pay: never those that are always wrong, all of those that are always right."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from engine.draft_depth import FIRST_PROBE, LAST_PROBE, Acceptance, DraftDepth


def cheap(rows: int) -> float:
    """The weights dominate."""
    return 0.030 * (1 + rows / 150)


def dear(rows: int) -> float:
    """Every row by itself."""
    return 0.030 * rows


class Step:
    """A drafter with `num_right` right drafts per run, on a machine that costs `cost(rows)`."""

    def __init__(self, cost: Callable[[int], float], max_depth: int = 31) -> None:
        self.depth = DraftDepth(max_depth)
        self.cost = cost

    def run(self, rights: dict[str, int], room: int = 1000) -> list[int]:
        """One step; the depths that it had."""
        depths = self.depth.plan([(name, room) for name in rights])
        for (name, num_right), depth in zip(rights.items(), depths, strict=True):
            self.depth.observe_drafts(name, depth, min(num_right, depth))
        rows = len(rights) + sum(depths)
        self.depth.observe_pass(rows, self.cost(rows))
        return depths


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


@pytest.mark.parametrize("cost", [cheap, dear])
def test_drafts_that_are_always_wrong_end_and_are_probed_ever_more_rarely(
    cost: Callable[[int], float],
) -> None:
    step = Step(cost)
    depths = [step.run({"a": 0})[0] for _ in range(1000)]
    last_planned = max(i for i, depth in enumerate(depths) if depth > 2)
    assert last_planned < 60
    probes = [i for i, depth in enumerate(depths) if depth and i > 100]
    assert all(depths[i] == 2 for i in probes)
    pauses = [after - before for before, after in itertools.pairwise(probes)]
    assert set(pauses[2:]) == {LAST_PROBE}
    assert FIRST_PROBE < LAST_PROBE


def test_where_every_row_costs_as_much_as_a_step_only_sure_drafts_are_made() -> None:
    """A row each: drafts of nine in ten right cost more than they bring."""
    step = Step(dear)
    coin = itertools.cycle([31] * 9 + [0])
    depths = [step.run({"a": next(coin)})[0] for _ in range(300)]
    assert sum(depths[50:]) < 0.2 * len(depths[50:])


def test_a_request_whose_text_becomes_known_is_found_by_a_probe() -> None:
    step = Step(cheap)
    for _ in range(200):
        step.run({"a": 0})
    depths = [step.run({"a": 99})[0] for _ in range(2 * LAST_PROBE)]
    assert depths[-1] == 31


def test_each_request_has_the_depth_of_its_own_acceptance() -> None:
    step = Step(cheap)
    depths = [step.run({"right": 99, "wrong": 0}) for _ in range(60)]
    assert depths[-1][0] == 31
    assert sum(wrong for _, wrong in depths[40:]) <= 6
    step.depth.finish("wrong")
    step.depth.finish("unknown")
    assert step.run({"right": 99, "wrong": 0})[1] >= 1, "a new request begins as others do"


def test_a_drafter_that_takes_its_time_is_asked_for_less() -> None:
    """0.6 then 0.6: with a free drafter five drafts or more, at 10 ms each hardly any."""
    coins = [0, 1, 0, 2, 4, 0, 1, 1, 0, 3]

    def mean_depth(seconds_per_draft: float) -> float:
        step, coin = Step(cheap), itertools.cycle(coins)
        depths = []
        for _ in range(200):
            (depth,) = step.run({"a": next(coin)})
            step.depth.observe_proposal(depth, seconds_per_draft * depth)
            depths.append(depth)
        return sum(depths[50:]) / 150

    assert mean_depth(0.0) > 4
    assert mean_depth(0.03) < 1


def test_a_fixed_depth_is_always_the_most() -> None:
    depth = DraftDepth(5, adaptive=False)
    for _ in range(50):
        assert depth.plan([("a", 9), ("b", 3), ("c", 0)]) == [5, 3, 0]
        depth.observe_drafts("a", 5, 0)
        depth.observe_pass(11, 1.0)
