"""Loads of a prefix that lies in several tiers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.block_pool import BlockPool
from engine.kv_cache_manager import KVCacheManager
from engine.kv_loads import KVLoads
from engine.load_policy import LoadPlan
from engine.prefix_match import PrefixHit
from engine.request import Request
from engine.scheduler import Scheduler, SchedulerLimits, load_everything
from offload.cpu_tier import CpuTier
from offload.disk_tier import DiskTier
from offload.manager import OffloadManager
from offload.tier import BlockHash, BlockKey, BlockMeta
from offload.transfers import CopyIn
from tests.engine.planned_engine import PlannedEngine, cpu
from tests.engine.planning import BLOCK_SIZE, FINGERPRINT, make_request, run_to_end, settle

BLOCK_BYTES = 4096
NUM_CPU_BLOCKS = 4
PROMPT = list(range(10 * BLOCK_SIZE))  # nine whole blocks can be hit


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier.open(
        tmp_path / "store", fingerprint=FINGERPRINT, block_bytes=BLOCK_BYTES, capacity_bytes=1 << 24
    )
    yield tier
    tier.close()


@pytest.fixture
def scheduler(disk: DiskTier) -> Scheduler:
    cpu = CpuTier(NUM_CPU_BLOCKS * BLOCK_BYTES, block_bytes=BLOCK_BYTES)
    offload = OffloadManager([cpu, disk], block_bytes=BLOCK_BYTES)
    return Scheduler(SchedulerLimits(4, 64), KVCacheManager(32, BLOCK_SIZE, offload))


def serve(scheduler: Scheduler, request: Request) -> None:
    scheduler.add(request)
    run_to_end(scheduler)
    settle(scheduler)


def test_promoting_a_head_does_not_evict_the_tail_of_the_same_hit(scheduler: Scheduler) -> None:
    """The tail alone is in memory: reading the head into memory wants the tail's slots."""
    serve(scheduler, make_request(PROMPT, max_tokens=1))
    scheduler.kv.reset([])
    again = make_request(PROMPT, max_tokens=1)
    sources = scheduler.kv.match(again).sources
    assert (sources[0], sources[-1]) == ("disk", "cpu")
    scheduler.add(again)
    assert scheduler.schedule() == []
    settle(scheduler)
    run_to_end(scheduler)
    assert again.cached.total == len(PROMPT) - BLOCK_SIZE
    assert (again.cached.cpu, again.cached.disk) == (
        sources.count("cpu") * BLOCK_SIZE,
        sources.count("disk") * BLOCK_SIZE,
    )
    scheduler.kv.check([])


class ScriptedOffload:
    """Holds every block; loads end when the test says so."""

    def __init__(self) -> None:
        self.loads: list[BlockKey] = []
        self.cancelled: list[int] = []
        self.held: list[BlockKey] = []

    def load(self, key: BlockKey, block_id: int, tier: str | None = None) -> int:
        self.loads.append(key)
        return len(self.loads)

    def cancel(self, ticket: int) -> None:
        self.cancelled.append(ticket)

    def hold(self, key: BlockKey, meta: BlockMeta, block_id: int) -> None:
        self.held.append(key)


KEY = BlockKey(BlockHash(b"k" * 32), 0)
META = BlockMeta(BlockHash(b"p" * 32), (1, 2, 3, 4), BlockHash(b"r" * 32))


class Loading:
    """Requests that all want block 3 of theirs to be KEY, and the pool it is loaded into."""

    def __init__(self, num_requests: int = 1) -> None:
        self.pool = BlockPool(4, on_evict=lambda key: None)
        self.offload = ScriptedOffload()
        self.loads = KVLoads(self.pool, self.offload)  # type: ignore[arg-type]
        self.requests = [make_request(17) for _ in range(num_requests)]
        self.block_id = self.pool.allocate()
        self.loads.start(self.requests[0], 3, KEY, META, self.block_id, "disk")
        for request in self.requests[1:]:
            self.pool.reference(self.block_id)
            self.loads.join(request, 3, KEY)

    def hand_out(self) -> None:
        self.loads.copying([CopyIn(1, KEY, self.block_id, memoryview(b""))])

    def go(self, request: Request) -> None:
        """`request` gives up its block, as an abort does."""
        self.loads.leave(request)
        self.pool.release(self.block_id)

    @property
    def num_references(self) -> int:
        return self.pool.ref_count(self.block_id)


def test_a_block_is_found_only_once_its_bytes_are_in_place() -> None:
    loading = Loading()
    assert loading.pool.lookup(KEY) is None
    loading.hand_out()
    assert loading.pool.lookup(KEY) is None  # handed out is not written
    assert loading.loads.loaded(1) == loading.requests
    assert loading.pool.lookup(KEY) == loading.block_id
    assert loading.offload.held == [KEY]
    assert loading.requests[0].pending_loads == {}


def test_requests_that_want_one_block_share_one_load() -> None:
    loading = Loading(num_requests=3)
    assert loading.offload.loads == [KEY]
    assert loading.num_references == 4  # each request's, and the load's
    loading.hand_out()
    assert loading.loads.loaded(1) == loading.requests
    assert [request.pending_loads for request in loading.requests] == [{}, {}, {}]
    assert loading.num_references == 3


def test_a_failed_load_is_told_to_everyone_and_published_to_nobody() -> None:
    loading = Loading(num_requests=3)
    assert loading.loads.failed(1) == [(request, 3) for request in loading.requests]
    assert [request.pending_loads for request in loading.requests] == [{}, {}, {}]
    assert loading.pool.lookup(KEY) is None
    assert loading.loads.find(KEY) is None
    assert loading.num_references == 3
    assert loading.loads.failed(1) == []  # told once


def test_the_last_to_leave_cancels_the_load() -> None:
    loading = Loading(num_requests=2)
    loading.go(loading.requests[0])
    assert loading.offload.cancelled == []
    loading.go(loading.requests[1])
    assert loading.offload.cancelled == [1]
    assert loading.num_references == 0


def test_a_load_abandoned_while_it_is_copied_keeps_its_block_until_the_copy_has_ended() -> None:
    """Freed earlier, the block could be somebody else's when the bytes arrive."""
    loading = Loading()
    loading.hand_out()
    loading.go(loading.requests[0])
    assert loading.offload.cancelled == []
    assert loading.num_references == 1
    assert loading.block_id not in [loading.pool.allocate() for _ in range(3)]
    assert loading.loads.loaded(1) == []
    assert loading.num_references == 0
    assert loading.pool.lookup(KEY) == loading.block_id  # whole and verified: somebody may use it


def test_a_load_of_before_a_reset_serves_its_waiters_alone() -> None:
    loading = Loading()
    loading.loads.reset()
    assert loading.loads.find(KEY) is None
    loading.hand_out()
    assert loading.loads.loaded(1) == loading.requests
    assert loading.pool.lookup(KEY) is None


async def test_a_block_that_expires_between_match_and_load_is_loaded(tmp_path: Path) -> None:
    """Planning has counted on it; the engine loop would not survive its absence."""
    now = 2e9
    tier = DiskTier.open(
        tmp_path / "store",
        fingerprint=FINGERPRINT,
        block_bytes=BLOCK_BYTES,
        capacity_bytes=1 << 24,
        ttl_seconds=10,
        clock=lambda: now,
    )
    engine = PlannedEngine([tier])
    await engine.serve(make_request(PROMPT, max_tokens=1))
    engine.kv.pool.reset()

    def choose(hit: PrefixHit, num_competing: int) -> LoadPlan:
        nonlocal now
        now += 11
        return load_everything(hit, num_competing)

    engine.scheduler._plan_loads = choose
    again = await engine.serve(make_request(PROMPT, max_tokens=1))
    assert again.cached.disk == len(PROMPT) - BLOCK_SIZE
    tier.close()


async def test_what_somebody_asked_for_and_found_in_a_tier_counts_as_used_again() -> None:
    tier = cpu(64)
    engine = PlannedEngine([tier])
    first = await engine.serve(make_request(PROMPT, max_tokens=1))
    assert [entry.reused for entry in tier.entries()] == [False] * 10
    ahead = make_request([*PROMPT, *range(BLOCK_SIZE)], max_tokens=1)
    ahead.is_background = True
    await engine.serve(ahead)
    assert [entry.reused for entry in tier.entries()] == [False] * 11
    engine.kv.pool.reset()
    again = await engine.serve(make_request(PROMPT, max_tokens=1))
    assert again.cached.cpu == 9 * BLOCK_SIZE
    used = {entry.key for entry in tier.entries() if entry.reused}
    assert used == set(engine.kv.keys(first.block_hashes[:9]))
