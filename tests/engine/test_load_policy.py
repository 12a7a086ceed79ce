"""When loading pays, and loads that go on beside the computing of what lies before them."""

from __future__ import annotations

import math

import pytest

from engine.block_hash import root_hash
from engine.kv_cache_manager import KVCacheManager
from engine.kv_groups import KVGroup
from engine.load_policy import LoadChooser, LoadPlan
from engine.prefix_match import BlockHit, PrefixHit
from engine.request import NO_BLOCK, RequestState
from engine.scheduler import Scheduler, SchedulerLimits
from offload.cpu_tier import CpuTier
from offload.manager import OffloadManager
from offload.tier import BlockKey
from tests.engine.planning import BLOCK_SIZE, FINGERPRINT, make_request, run_pass, settle

BLOCK_BYTES = 64
NUM_HELD = 10
PROMPT = list(range(NUM_HELD * BLOCK_SIZE + 3))


class Rates:
    """Stands in for the manager's measurements: seconds a block of a tier takes, and `latency`
    that every load of it has besides."""

    def __init__(self, latency: float = 0.0, **seconds: float) -> None:
        self._latency = latency
        self._seconds = seconds

    def estimated_load_seconds(self, tier: str, num_blocks: int) -> float | None:
        if tier not in self._seconds or not num_blocks:
            return None
        return self._latency + self._seconds[tier] * num_blocks


def hit(*sources: str, num_device: int = 0) -> PrefixHit:
    key = BlockKey(root_hash(FINGERPRINT), 0)
    ahead = [BlockHit(num_device + i, key, source, None) for i, source in enumerate(sources)]
    return PrefixHit(num_device, num_device + len(sources), 0, (), tuple(ahead), ())


def chooser(policy: str = "auto", speed: float | None = 4.0, **seconds: float) -> LoadChooser:
    """Computing a block takes a second unless `speed` (tokens a second) says otherwise."""
    made = LoadChooser(policy, BLOCK_SIZE, Rates(**seconds))  # type: ignore[arg-type]
    if speed is not None:
        made.observe_pass(64, 64 / speed)
    return made


TEN_FROM_DISK = hit(*["disk"] * 10, num_device=2)


@pytest.mark.parametrize(
    ("policy", "speed", "seconds", "expected"),
    [
        ("always", 4.0, 100.0, LoadPlan(2)),
        ("never", 4.0, 0.001, LoadPlan(12)),
        ("auto", 4.0, 0.1, LoadPlan(2, 10.0)),  # loading takes a tenth
        ("auto", None, 100.0, LoadPlan(2)),  # how long computing takes is not known
        ("auto", 4.0, 1.0, LoadPlan(7, 5.0)),  # half and half
        ("auto", 4.0, 4.0, LoadPlan(10, 2.0)),  # eight seconds either way
        ("auto", 4.0, 100.0, LoadPlan(12)),  # one block takes longer than computing all
    ],
)
def test_what_is_loaded(
    policy: str, speed: float | None, seconds: float, expected: LoadPlan
) -> None:
    assert chooser(policy, speed, disk=seconds).plan(TEN_FROM_DISK, 0) == expected


@pytest.mark.parametrize(("latency", "start"), [(9.5, 2), (10.5, 2), (11.5, 12)])
def test_a_load_is_skipped_only_where_it_costs_a_tenth_more(latency: float, start: int) -> None:
    """Computing takes ten seconds; however few blocks are loaded, they take as long as all."""
    assert chooser(latency=latency, disk=0.0).plan(TEN_FROM_DISK, 0).start == start


def test_an_unmeasured_tier_counts_as_cheap() -> None:
    assert chooser().plan(TEN_FROM_DISK, 0).start == 2


def test_other_prompts_make_computing_dearer() -> None:
    """Alone a mix wins; beside three others computing is four times as slow and loading wins."""
    made = chooser(disk=1.0)
    assert made.plan(TEN_FROM_DISK, 0).start == 7
    assert made.plan(TEN_FROM_DISK, 3) == LoadPlan(2, 40.0)


def test_each_tier_counts_at_its_own_cost() -> None:
    mixed = hit(*["disk"] * 5, *["cpu"] * 5)
    assert chooser(disk=0.1, cpu=0.01).plan(mixed, 0).start == 0
    assert chooser(disk=100.0, cpu=0.01).plan(mixed, 0).start == 5  # memory alone


def test_blocks_on_the_device_cost_nothing() -> None:
    assert chooser("never").plan(hit(num_device=3), 0).start == 3
    assert chooser(disk=100.0).plan(hit("device", "device", num_device=3), 0).start == 3


def test_speed_is_that_of_prompts_and_follows_the_load() -> None:
    made = chooser(speed=None)
    made.observe_pass(8, 0.001)  # too few rows to tell
    assert made.prefill_tokens_per_second is None
    made.observe_pass(100, 1.0)
    assert made.prefill_tokens_per_second == 100.0
    made.observe_pass(100, 2.0)
    assert made.prefill_tokens_per_second == 85.0


# --- loads beside computing -----------------------------------------------------------------


def scheduler_with(start: int, groups: tuple[KVGroup, ...] = (KVGroup(0),)) -> Scheduler:
    """A CPU tier that holds the prompt's blocks, a device that does not; loads begin at `start`.

    A load arrives when `settle` lets it."""
    cpu = CpuTier(512 * BLOCK_BYTES, block_bytes=BLOCK_BYTES)
    offload = OffloadManager([cpu], block_bytes=BLOCK_BYTES)
    kv = KVCacheManager(64, BLOCK_SIZE, offload, groups=groups)
    made = Scheduler(SchedulerLimits(4, 8), kv, lambda hit, others: LoadPlan(start, 5.0))
    first = make_request(PROMPT, max_tokens=1)
    made.add(first)
    while made.live():
        run_pass(made, made.schedule())
    settle(made)
    kv.reset([])
    return made


def compute(scheduler: Scheduler) -> int:
    """One pass; its rows."""
    plan = scheduler.schedule()
    run_pass(scheduler, plan)
    return sum(scheduled.num_rows for scheduled in plan)


def test_the_front_is_computed_while_the_back_is_loaded() -> None:
    scheduler = scheduler_with(start=4)
    request = make_request(PROMPT, max_tokens=2)
    scheduler.add(request)
    assert compute(scheduler) == 8
    assert request.state is RequestState.RUNNING
    assert sorted(request.pending_loads.values()) == [4, 5, 6, 7, 8, 9]
    settle(scheduler)  # all have come, and two blocks are still to be computed before them
    assert compute(scheduler) == 8
    assert compute(scheduler) == 3  # behind the loaded ones, and the first token is drawn
    assert request.num_output_tokens == 1
    assert (request.cached.cpu, request.cached.total) == (6 * BLOCK_SIZE, 6 * BLOCK_SIZE)
    assert request.recomputed_by_choice == 4 * BLOCK_SIZE
    assert compute(scheduler) == 1
    scheduler.kv.check([])


def test_the_back_is_loaded_last_block_first() -> None:
    """The loads that computing may overtake are those that come last."""
    scheduler = scheduler_with(start=4)
    request = make_request(PROMPT)
    scheduler.add(request)
    scheduler.schedule()
    copies = scheduler.kv.offload.poll().copies_in
    indices = [request.pending_loads[copy.ticket] for copy in copies]
    assert indices == [9, 8, 7, 6, 5, 4]


def test_loads_that_do_not_come_are_overtaken() -> None:
    scheduler = scheduler_with(start=2)
    request = make_request(PROMPT, max_tokens=1)
    scheduler.add(request)
    assert compute(scheduler) == 8
    assert compute(scheduler) == 0
    assert scheduler.waiting_for_loads() == [request]
    scheduler.load_late(request)
    assert request.load_patience == 0.0
    assert compute(scheduler) == 8  # two blocks of a pass; their loads are given up
    assert sorted(request.pending_loads.values()) == [4, 5, 6, 7, 8, 9]
    assert request.cached.total == 6 * BLOCK_SIZE
    settle(scheduler)
    assert compute(scheduler) == 3
    assert request.cached.total == 6 * BLOCK_SIZE
    scheduler.kv.check([])


def test_every_load_may_be_overtaken() -> None:
    scheduler = scheduler_with(start=2)
    request = make_request(PROMPT, max_tokens=1)
    scheduler.add(request)
    rows = []
    while scheduler.live():
        rows.append(compute(scheduler))
        if scheduler.waiting_for_loads():
            scheduler.load_late(request)
    assert sum(rows) == len(PROMPT)
    assert request.cached.total == 0
    scheduler.kv.check([])
    assert scheduler.kv.offload.idle()


def test_a_failed_load_ends_what_is_loaded_ahead() -> None:
    scheduler = scheduler_with(start=4)
    request = make_request(PROMPT, max_tokens=1)
    scheduler.add(request)
    compute(scheduler)
    failed = {index: ticket for ticket, index in request.pending_loads.items()}[6]
    for waiter, index in scheduler.kv.loads.failed(failed):
        scheduler.load_failed(waiter, index)
    scheduler.kv.offload.cancel(failed)
    assert sorted(request.pending_loads.values()) == [4, 5]
    settle(scheduler)
    rows = []
    while scheduler.live():
        rows.append(compute(scheduler))
    assert sum(rows) == len(PROMPT) - 8 - 2 * BLOCK_SIZE
    assert request.cached.total == 2 * BLOCK_SIZE
    scheduler.kv.check([])


@pytest.mark.parametrize("end", ["finish", "preempt", "reset"])
def test_every_way_out_balances(end: str) -> None:
    scheduler = scheduler_with(start=4)
    request = make_request(PROMPT, max_tokens=1)
    scheduler.add(request)
    compute(scheduler)
    if end == "finish":
        scheduler.finish(request)
    elif end == "preempt":
        scheduler._preempt(request)
    else:
        scheduler.kv.reset(scheduler.live())
        settle(scheduler)
        while scheduler.live():
            compute(scheduler)
        assert scheduler.kv.pool.num_cached == 0  # the last block is not full
    scheduler.kv.check(scheduler.live())
    for _ in range(10):
        settle(scheduler)
        compute(scheduler)
    scheduler.kv.check([])
    assert scheduler.live() == []
    assert scheduler.kv.pool.num_available == 64


def test_with_windows_the_front_is_computed_for_every_group() -> None:
    groups = (KVGroup(0, 6, (0,)), KVGroup(1, None, (1,)))
    scheduler = scheduler_with(4, groups)
    request = make_request(PROMPT, max_tokens=2)
    scheduler.add(request)
    compute(scheduler)
    window, full = request.block_tables
    assert [i for i, block in enumerate(window) if block != NO_BLOCK] == [0, 1, 8, 9]
    assert [i for i, block in enumerate(full) if block == NO_BLOCK] == []
    settle(scheduler)
    assert compute(scheduler) == 8
    assert compute(scheduler) == 3
    assert request.cached.total == 6 * BLOCK_SIZE
    scheduler.kv.check(scheduler.live())


def test_with_windows_a_failed_load_leaves_nothing_ahead() -> None:
    """A shorter prefix would need window blocks that were not loaded."""
    groups = (KVGroup(0, 6, (0,)), KVGroup(1, None, (1,)))
    scheduler = scheduler_with(0, groups)
    request = make_request(PROMPT, max_tokens=1)
    scheduler.add(request)
    scheduler.schedule()
    assert request.state is RequestState.LOADING
    scheduler.load_failed(request, 9)
    assert request.state is RequestState.RUNNING
    assert (request.cached.total, request.pending_loads) == (0, {})
    while scheduler.live():
        compute(scheduler)
    scheduler.kv.check([])


def test_patience_is_what_computing_would_take() -> None:
    assert chooser(disk=0.1).plan(TEN_FROM_DISK, 0).patience == 10.0
    assert chooser("always", disk=0.1).plan(TEN_FROM_DISK, 0).patience == math.inf
