"""Loading only where it is cheaper: measured load cost against measured prefill speed."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engine.load_policy import LoadChooser, LoadPlan
from engine.prefix_match import DEVICE, BlockHit, PrefixHit
from offload.tier import BlockHash, BlockKey

BLOCK_SIZE = 4
TOKENS_PER_SECOND = 1000.0  # a block of four takes 4 ms to compute


class MeasuredOffload:
    """Tiers whose blocks take so many seconds each; a tier left out is unmeasured."""

    def __init__(self, **seconds_per_block: float) -> None:
        self._seconds = seconds_per_block

    def estimated_load_seconds(self, tier: str, num_blocks: int) -> float | None:
        return self._seconds[tier] * num_blocks if tier in self._seconds else None


def chooser(policy: Any = "auto", *, measured: bool = True, **seconds: float) -> LoadChooser:
    offload: Any = MeasuredOffload(**seconds)
    made = LoadChooser(policy, BLOCK_SIZE, offload)
    if measured:
        made.observe_pass(100, 100 / TOKENS_PER_SECOND)
    return made


def hit(num_device: int, *sources: str) -> PrefixHit:
    """`num_device` blocks on the device and one after them per source."""
    ahead = [
        BlockHit(num_device + i, BlockKey(BlockHash(bytes(32)), 0), source, None)
        for i, source in enumerate(sources)
    ]
    num_held = num_device + len(sources)
    return PrefixHit(num_device=num_device, num_held=num_held, ahead=tuple(ahead))


TEN_ON_DISK = hit(3, *["disk"] * 10)


@pytest.mark.parametrize(("policy", "start"), [("always", 3), ("never", 13)])
def test_policies_that_do_not_measure(policy: str, start: int) -> None:
    for seconds in (1e-9, 1e9):
        assert chooser(policy, disk=seconds).plan(TEN_ON_DISK, 0) == LoadPlan(start)


def test_what_is_unmeasured_counts_as_cheap() -> None:
    assert chooser(measured=False, disk=1e9).plan(TEN_ON_DISK, 0).start == 3
    assert chooser().plan(TEN_ON_DISK, 0).start == 3


def test_nothing_to_load_is_no_choice() -> None:
    assert chooser("never", disk=1.0).plan(hit(3, DEVICE), 0).start == 3
    assert chooser(disk=1e9).plan(hit(3), 0) == LoadPlan(3, math.inf)


def test_a_cheap_load_is_taken_whole() -> None:
    assert chooser(disk=0.001).plan(TEN_ON_DISK, 0).start == 3


@pytest.mark.parametrize("seconds", [0.04, 0.4, 4.0])
def test_a_load_dearer_than_computing_is_not_begun(seconds: float) -> None:
    """At ten times the cost of computing and beyond, not even the last block pays."""
    assert chooser(disk=seconds).plan(TEN_ON_DISK, 0).start == 13


def test_where_both_cost_the_same_half_is_computed_while_half_loads() -> None:
    assert chooser(disk=0.004).plan(TEN_ON_DISK, 0).start == 8


def test_the_dearer_the_load_the_later_it_begins() -> None:
    starts = [chooser(disk=ms / 1000).plan(TEN_ON_DISK, 0).start for ms in (1, 2, 4, 8, 16, 40)]
    assert starts == sorted(starts)
    assert (starts[0], starts[-1]) == (3, 13)
    assert 3 < starts[2] < 13


def test_what_others_compute_meanwhile_makes_loading_cheaper() -> None:
    made = chooser(disk=0.04)
    assert made.plan(TEN_ON_DISK, 0).start == 13
    assert made.plan(TEN_ON_DISK, 50).start == 3


def test_each_tier_counts_at_its_own_speed() -> None:
    mixed = hit(0, *["cpu"] * 5, *["disk"] * 5)
    assert chooser(cpu=0.0001, disk=0.001).plan(mixed, 0).start == 0
    assert chooser(cpu=0.0001, disk=4.0).plan(mixed, 0).start == 10


def test_patience_is_what_computing_the_loaded_part_would_take() -> None:
    plan = chooser(disk=0.001).plan(TEN_ON_DISK, 0)
    assert plan.patience == pytest.approx(10 * BLOCK_SIZE / TOKENS_PER_SECOND)


def test_short_passes_say_nothing_and_new_ones_weigh_three_tenths() -> None:
    made = chooser(measured=False)
    made.observe_pass(63, 1e-9)
    made.observe_pass(100, 0.0)
    assert made.prefill_tokens_per_second is None
    made.observe_pass(100, 0.1)
    made.observe_pass(200, 0.1)
    assert made.prefill_tokens_per_second == pytest.approx(1000 + 0.3 * 1000)
