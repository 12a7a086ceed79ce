"""Loads of a prefix that lies in several tiers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.kv_cache_manager import KVCacheManager
from engine.request import Request
from engine.scheduler import Scheduler, SchedulerLimits
from offload.cpu_tier import CpuTier
from offload.disk_tier import DiskTier
from offload.manager import OffloadManager
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
