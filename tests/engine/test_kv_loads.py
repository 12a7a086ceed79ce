"""Loads of a prefix that lies in several tiers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.kv_cache_manager import KVCacheManager
from engine.request import Request
from engine.scheduler import Scheduler, SchedulerLimits
from offload.cpu_tier import CpuTier
from offload.disk_tier import DiskTier
from offload.manager import OffloadManager
from tests.engine.planning import BLOCK_SIZE, FINGERPRINT, make_request, run_to_end

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


def settle(scheduler: Scheduler) -> None:
    """Rounds of copies until no save and no load is under way."""
    offload, loads = scheduler.kv.offload, scheduler.kv.loads
    deadline = time.monotonic() + 10
    while not offload.idle():
        assert time.monotonic() < deadline, "transfers do not end"
        transfers = offload.poll()
        assert not transfers.failed_loads
        loads.copying(transfers.copies_in)
        offload.copied_out(transfers.copies_out)
        offload.copied_in(transfers.copies_in)
        for copy in transfers.copies_in:
            for request in loads.loaded(copy.ticket):
                if not request.pending_loads:
                    scheduler.loads_settled(request)
        time.sleep(0.002)


def serve(scheduler: Scheduler, request: Request) -> None:
    scheduler.add(request)
    run_to_end(scheduler)
    settle(scheduler)


def test_promoting_a_head_does_not_evict_the_tail_of_the_same_hit(scheduler: Scheduler) -> None:
    """The tail alone is in memory: reading the head into memory wants the tail's slots."""
    serve(scheduler, make_request(PROMPT, max_tokens=1))
    scheduler.kv.reset([])
    again = make_request(PROMPT, max_tokens=1)
    sources = [hit.source for hit in scheduler.kv.match(again)]
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
