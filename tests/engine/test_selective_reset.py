"""Forgetting one tenant or one conversation on the device: nothing of it comes back, nothing else
goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.block_hash import chain_hashes, root_hash
from engine.request import Request
from engine.scheduler import ScheduledRequest, Scheduler
from offload.disk_tier import DiskTier
from offload.tier import BlockHash, Forget
from tests.engine.planned_engine import BLOCK_BYTES, PlannedEngine
from tests.engine.planning import (
    BLOCK_SIZE,
    FINGERPRINT,
    make_request,
    make_scheduler,
    run_pass,
    run_to_end,
)

PROMPT = list(range(100, 121))  # five whole blocks and a token


def of_salt(salt: str | None) -> Forget:
    return Forget(roots=frozenset((root_hash(FINGERPRINT, salt),)))


def hashes(tokens: list[int], salt: str | None = None) -> list[BlockHash]:
    return chain_hashes(root_hash(FINGERPRINT, salt), tokens, BLOCK_SIZE)


def serve(scheduler: Scheduler, salt: str | None = None, tokens: list[int] = PROMPT) -> int:
    """Cached tokens of a whole run."""
    request = make_request(tokens, max_tokens=1, salt=salt)
    scheduler.add(request)
    run_to_end(scheduler)
    return request.cached.total


def begin(scheduler: Scheduler, salt: str | None) -> tuple[Request, list[ScheduledRequest]]:
    """A request whose first pass, over the whole prompt, is under way."""
    request = make_request(PROMPT, max_tokens=3, salt=salt)
    scheduler.add(request)
    plan = scheduler.schedule()
    assert request.num_inflight_tokens == len(PROMPT)
    return request, plan


@pytest.mark.parametrize("salt", [None, "s"])
def test_a_salt_goes_and_the_others_stay(salt: str | None) -> None:
    scheduler = make_scheduler()
    for each in (None, "s", "t"):
        serve(scheduler, each)
    assert scheduler.kv.reset([], of_salt(salt)) == 5
    scheduler.kv.check([])
    found = {each: serve(scheduler, each) for each in (None, "s", "t")}
    assert found == {each: 0 if each == salt else 20 for each in (None, "s", "t")}


def test_blocks_go_by_their_keys() -> None:
    scheduler = make_scheduler()
    serve(scheduler)
    serve(scheduler, tokens=[*PROMPT[:8], *[9] * 9])
    keys = scheduler.kv.keys(hashes(PROMPT)[2:])
    assert scheduler.kv.reset([], Forget(keys=frozenset(keys))) == 3
    assert serve(scheduler, tokens=[*PROMPT[:8], *[9] * 9]) == 16
    assert serve(scheduler) == 8


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("by", ["root", "keys"])
def test_a_running_request_goes_on_and_its_blocks_are_not_published_again(
    in_flight: bool, by: str
) -> None:
    scheduler = make_scheduler()
    request, plan = begin(scheduler, "s")
    if not in_flight:
        run_pass(scheduler, plan)
    where = of_salt("s")
    if by == "keys":
        begun = scheduler.kv.begun(request)
        assert begun == hashes(PROMPT, "s")
        where = Forget(keys=frozenset(scheduler.kv.keys(begun)))
    scheduler.kv.reset(scheduler.live(), where)
    assert request.first_cacheable_block == 6
    if in_flight:
        run_pass(scheduler, plan)
    run_to_end(scheduler)
    assert request.num_output_tokens == 3
    assert serve(scheduler, "s") == 0
    assert serve(scheduler, "s") == 20  # what is new is kept


def test_a_running_request_of_another_salt_keeps_its_blocks() -> None:
    scheduler = make_scheduler()
    request, plan = begin(scheduler, "t")
    assert scheduler.kv.reset(scheduler.live(), of_salt("s")) == 0
    assert request.first_cacheable_block == 0
    run_pass(scheduler, plan)
    run_to_end(scheduler)
    assert serve(scheduler, "t") == 20


async def test_a_load_in_flight_serves_who_waits_and_nobody_after(tmp_path: Path) -> None:
    disk = DiskTier.open(
        tmp_path / "store", fingerprint=FINGERPRINT, block_bytes=BLOCK_BYTES, capacity_bytes=1 << 24
    )
    for salt in ("s", "t"):
        await PlannedEngine([disk]).serve(make_request(PROMPT, max_tokens=1, salt=salt))
    engine = PlannedEngine([disk])
    scheduler, kv = engine.scheduler, engine.kv
    requests = [make_request(PROMPT, max_tokens=1, salt=salt) for salt in ("s", "t")]
    for request in requests:
        scheduler.add(request)
    scheduler.schedule()
    assert [len(request.pending_loads) for request in requests] == [5, 5]
    kv.reset(scheduler.live(), of_salt("s"))
    found = [kv.loads.find(key) is None for key in kv.keys(hashes(PROMPT, "s"))]
    assert found == [True] * 5
    assert all(kv.loads.find(key) for key in kv.keys(hashes(PROMPT, "t")))
    while scheduler.live():
        await engine.turn()
    assert [request.cached.total for request in requests] == [20, 20]
    on_device = [
        [kv.pool.lookup(key) is not None for key in kv.keys(hashes(PROMPT, salt))]
        for salt in ("s", "t")
    ]
    assert on_device == [[False] * 5, [True] * 5]
    disk.close()
