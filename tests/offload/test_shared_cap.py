"""Several servers on one directory: together they never hold more than the cap, whoever dies."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from offload import block_directory
from offload.disk_tier import DiskTier
from offload.ledger import LEDGER_NAME, Ledger
from offload.store_scan import StoreFile, side_path
from offload.tier import RoomTakenError
from tests.offload.harness import (
    BLOCK_BYTES,
    FINGERPRINT,
    RECORD_BYTES,
    content,
    key,
    meta,
    physical_bytes,
)

OpenDisk = Callable[..., DiskTier]
ROOT = Path(__file__).parents[2]
OTHER = b"o" * 32

# Saves as fast as it can, surveys now and then, for ever.
WRITER = """
import random, sys
from pathlib import Path
from offload.disk_tier import DiskTier
from tests.offload.harness import *

path, capacity, fingerprint, seed = sys.argv[1:]
rng = random.Random(seed)
disk = DiskTier.open(Path(path), fingerprint=bytes.fromhex(fingerprint), block_bytes=BLOCK_BYTES,
                     capacity_bytes=int(capacity))
planner = Planner(disk, survey_seconds=rng.uniform(0.02, 0.2))
print("writing", flush=True)
while True:
    number = rng.randrange(400)
    if not planner.manager.lookup(key(number)):
        planner.commit(number)
    planner.round()
    while planner.manager.pending_saves("disk") > 8:
        planner.round()
        planner.woken.wait(0.01)
        planner.woken.clear()
"""


@contextmanager
def writer(path: Path, capacity: int, fingerprint: bytes, seed: int) -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-c", WRITER, str(path), str(capacity), fingerprint.hex(), str(seed)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, env=env) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"writing\n"
            yield process
        finally:
            process.kill()


def sampled(path: Path, processes: list[subprocess.Popen]) -> int:
    """Physical bytes at one instant: everybody who could change them stands still meanwhile."""
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    for process in processes:
        while Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
            time.sleep(0)
    total = physical_bytes(path)
    for process in processes:
        process.send_signal(signal.SIGCONT)
    return total


@pytest.mark.parametrize("other", [FINGERPRINT, OTHER], ids=["equal", "different"])
@pytest.mark.parametrize("shares", [(30, 30), (30, 18)], ids=["same cap", "unequal caps"])
def test_two_servers_and_a_kill_stay_under_the_cap(
    other: bytes, shares: tuple[int, int], tmp_path: Path, open_disk: OpenDisk
) -> None:
    path = tmp_path / "store"
    caps = [share * RECORD_BYTES for share in shares]
    rng = random.Random(3)
    samples = []
    with writer(path, caps[0], FINGERPRINT, 1) as first:
        with writer(path, caps[1], other, 2) as second:
            for _ in range(40):
                samples.append(sampled(path, [first, second]))
                time.sleep(rng.uniform(0.0, 0.01))
        second.wait()
        for _ in range(20):
            samples.append(sampled(path, [first]))
            time.sleep(rng.uniform(0.0, 0.01))
    assert max(samples) <= max(caps)
    assert max(samples) > 0.7 * max(caps)  # and they did write
    assert len(set(samples)) > 5
    tier = open_disk(max(caps), path=path)
    with tier._directory._accounting() as account:
        assert account.occupied == physical_bytes(path)  # what the dead left is put right
    numbers = {key(number): number for number in range(400)}
    for held in tier.present():
        entry = tier.pin(held)
        into = bytearray(BLOCK_BYTES)
        tier.read(entry, memoryview(into))
        tier.unpin(entry)
        assert into == content(numbers[held])


def store_block(tier: DiskTier, number: int) -> Exception | None:
    reservation = tier.reserve(key(number), meta(number))
    assert reservation is not None
    result = tier.write(reservation, meta(number), memoryview(content(number)))
    tier.settle(reservation, result)
    tier.check()
    return result.error


def test_room_taken_since_the_last_survey_is_not_written_into(
    open_disk: OpenDisk, store: Path
) -> None:
    capacity = 16 * RECORD_BYTES
    ours, theirs = open_disk(capacity), open_disk(capacity, OTHER)
    for number in range(6):
        assert store_block(ours, number) is None
    number = 100
    while physical_bytes(store) + RECORD_BYTES + 2 * 4096 <= capacity:
        assert store_block(theirs, number) is None
        number += 1
    error = store_block(ours, 50)  # it knows of room that others took
    assert isinstance(error, RoomTakenError)
    assert error.occupied_bytes == physical_bytes(store) <= capacity
    tries = 1
    while store_block(ours, 50) is not None:
        tries += 1
    assert tries <= 2  # it has learned how much to evict
    assert physical_bytes(store) <= capacity


SIDE_BYTES = 5 * RECORD_BYTES


def fill_side(store: Path, fingerprint: bytes, num_bytes: int = SIDE_BYTES) -> None:
    side_path(store, fingerprint).write_bytes(b"x" * num_bytes)


def occupied_bytes(tier: DiskTier) -> int:
    with tier._directory._accounting() as account:
        return account.occupied


@pytest.mark.parametrize("num_others", [0, 1, 2])
def test_side_files_that_grow_between_two_surveys_stay_under_the_cap(
    num_others: int, open_disk: OpenDisk, store: Path
) -> None:
    capacity = 30 * RECORD_BYTES
    others = [bytes([number]) * 32 for number in range(num_others)]
    ours = open_disk(capacity, side_bytes=SIDE_BYTES)
    for fingerprint in others:  # unheard of by ours, which has made its survey
        open_disk(capacity, fingerprint, side_bytes=SIDE_BYTES)
    for number in range(60):
        while isinstance(error := store_block(ours, number), RoomTakenError):
            pass  # it learns how much to evict
        assert error is None
    for fingerprint in (FINGERPRINT, *others):
        fill_side(store, fingerprint)
    filled = physical_bytes(store)
    assert filled <= capacity
    assert filled > capacity - 4 * RECORD_BYTES  # and no room is lost


def test_what_is_claimed_counts_once_and_while_somebody_lives(
    open_disk: OpenDisk, store: Path
) -> None:
    def theirs(side_bytes: int) -> DiskTier:
        return DiskTier.open(
            store,
            fingerprint=OTHER,
            block_bytes=BLOCK_BYTES,
            capacity_bytes=64 << 20,
            side_bytes=side_bytes,
        )

    ours, first = open_disk(), theirs(SIDE_BYTES)

    def seen() -> tuple[int, int]:
        ours.absorb(ours.survey(ours.begin_survey()))
        return ours._used_bytes - physical_bytes(store), occupied_bytes(ours) - ours._used_bytes

    assert seen() == (SIDE_BYTES, 0)
    fill_side(store, OTHER, 2 * 4096)
    assert seen() == (SIDE_BYTES - 2 * 4096, 0)
    fill_side(store, OTHER, SIDE_BYTES + 4096)
    assert seen() == (0, 0)  # more than was claimed counts as it lies
    fill_side(store, OTHER, 4096)
    (store / f"{OTHER.hex()}.side.bad").write_bytes(bytes(2 * 4096))
    assert seen() == (SIDE_BYTES - 4096, 0)  # what was set aside is beside it
    (store / LEDGER_NAME).unlink()
    assert occupied_bytes(ours) == ours._used_bytes  # made anew, too
    second = theirs(2 * SIDE_BYTES)
    assert seen() == (2 * SIDE_BYTES - 4096, 0)
    second.close()
    assert seen() == (SIDE_BYTES - 4096, 0)
    first.close()
    assert seen() == (0, 0)


def test_a_survey_that_looked_before_a_claim_does_not_undo_it(
    open_disk: OpenDisk, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = open_disk()
    plain_scan = block_directory.scan

    def scan(dir_fd: int) -> Iterator[StoreFile]:
        yield from plain_scan(dir_fd)
        monkeypatch.setattr(block_directory, "scan", plain_scan)
        open_disk(fingerprint=OTHER, side_bytes=SIDE_BYTES)

    monkeypatch.setattr(block_directory, "scan", scan)
    ours.absorb(ours.survey(ours.begin_survey()))
    assert occupied_bytes(ours) >= physical_bytes(store) + SIDE_BYTES


def test_a_claim_comes_back_with_a_store_that_was_removed(open_disk: OpenDisk, store: Path) -> None:
    ours, theirs = open_disk(), open_disk(fingerprint=OTHER, side_bytes=SIDE_BYTES)
    shutil.rmtree(store)
    assert occupied_bytes(theirs) == physical_bytes(store) + SIDE_BYTES
    assert occupied_bytes(ours) == physical_bytes(store) + SIDE_BYTES


def test_the_ledger_is_exact_when_nobody_writes(open_disk: OpenDisk, store: Path) -> None:
    tiers = [open_disk(20 * RECORD_BYTES, fingerprint) for fingerprint in (FINGERPRINT, OTHER)]
    rng = random.Random(9)
    for _ in range(120):
        tier = rng.choice(tiers)
        number = rng.randrange(50)
        if rng.random() < 0.1:
            tier.absorb(tier.survey(tier.begin_survey()))
        elif tier.state(key(number)).value == "present":
            entry = tier.pin(key(number))
            tier.unpin(entry)
            epoch = tier.condemn(entry)
            assert epoch is not None
            tier.removed(entry, tier.remove(entry, epoch))
        else:
            store_block(tier, number)
        with tier._directory._accounting() as account:
            assert account.occupied == physical_bytes(store) <= 20 * RECORD_BYTES


@pytest.mark.parametrize("damage", ["", "short", "garbage", "gone", "stale"])
def test_a_ledger_that_cannot_be_trusted_is_made_anew(
    damage: str, open_disk: OpenDisk, store: Path
) -> None:
    tier = open_disk()
    stale = (store / LEDGER_NAME).read_bytes()
    for number in range(5):
        store_block(tier, number)
    path = store / LEDGER_NAME
    if damage == "short":
        path.write_bytes(path.read_bytes()[:30])
    elif damage == "garbage":
        path.write_bytes(b"x" * 4096)
    elif damage == "gone":
        path.unlink()
    elif damage == "stale":  # what a power cut may leave
        path.write_bytes(stale)
        tier = open_disk()
    with tier._directory._accounting() as account:
        assert account.occupied == physical_bytes(store)
    assert store_block(tier, 7) is None


def test_a_survey_bounds_the_sum_by_what_went_on_meanwhile(tmp_path: Path) -> None:
    dir_fd = os.open(tmp_path, os.O_RDONLY)
    ledger = Ledger(dir_fd, lambda: 1000)
    with ledger.locked() as account:
        assert account.occupied == 1000
        mark = account.mark()
    with ledger.locked() as account:
        account.charge(500)
        account.release(200)
    with ledger.locked() as account:
        account.reconcile(mark, 1250)  # within what may have been seen of it
        assert account.occupied == 1300
        account.reconcile(mark, 600)  # 600 found, at most 500 of the new not seen
        assert account.occupied == 1100
        account.reconcile(mark, 2000)  # at most 200 of that seen and then removed
        assert account.occupied == 1800
        account.moved()
        account.reconcile(mark, 0)  # everything may have changed place
        assert account.occupied == 1800
    os.close(dir_fd)
