"""A file system that is full, read-only or failing: what is stored stays, and saving resumes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from offload import lane
from offload.cpu_tier import CpuTier
from offload.disk_tier import DiskTier
from tests.offload.harness import FaultyTier, Planner, content, key

OpenDisk = Callable[..., DiskTier]
ROOT = Path(__file__).parents[2]

# A small file system of its own: a balloon takes the room that the cap would allow.
MOUNTED = """
import errno, os, subprocess, sys
from pathlib import Path
from offload import lane
from offload.disk_tier import DiskTier
from tests.offload.harness import *

lane._FIRST_RETRY = 0.01
mount = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", mount], check=True)


def open_tier():
    return DiskTier.open(mount / "store", fingerprint=FINGERPRINT, block_bytes=BLOCK_BYTES,
                         capacity_bytes=1 << 30)


tier = open_tier()
planner = Planner(tier)
for number in range(8):
    planner.commit(number)
    planner.settle()
with open(mount / "balloon", "wb") as balloon:
    try:
        while True:
            os.write(balloon.fileno(), bytes(4096))
    except OSError as error:
        assert error.errno == errno.ENOSPC
    for number in range(20, 23):
        planner.commit(number)
    planner.until(lambda: all(key(n) in tier.present() for n in range(20, 23)), 20)
    stats = planner.manager.stats()["disk"]
    assert stats.skipped["ENOSPC"] == stats.failed_blocks > 0, stats
    gone = [n for n in range(8) if key(n) not in tier.present()]
    assert gone and gone == list(range(len(gone))), gone  # the least valuable, oldest first
    assert len(gone) <= 5, gone
    again = open_tier()  # a full disk can be opened and read
    assert set(again.present()) == set(tier.present())
    assert planner.load(7, 63) == content(7)
os.unlink(mount / "balloon")
subprocess.run(["mount", "-o", "remount,ro", mount], check=True)
planner.commit(30)
planner.until(lambda: planner.manager.stats()["disk"].skipped.get("EROFS", 0) > 1)
assert key(30) not in tier.present()
assert planner.load(20, 62) == content(20)
try:
    open_tier()
except Exception as error:
    print(error)
subprocess.run(["mount", "-o", "remount,rw", mount], check=True)
planner.until(lambda: key(30) in tier.present())  # by itself: nobody touched it
planner.settle()
print(len(tier.present()), len(gone))
"""


@pytest.fixture
def fast_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "_FIRST_RETRY", 0.01)


def may_mount() -> bool:
    return subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0


def test_a_full_and_a_read_only_file_system(tmp_path: Path) -> None:
    if not may_mount():  # the tests below and the served one inject the same errors
        return
    done = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", MOUNTED, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    message, counts = done.stdout.splitlines()
    assert "Read-only file system; mount it writable" in message
    held, gone = map(int, counts.split())
    assert held == 12 - gone


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EMFILE])
def test_what_failed_is_stored_when_the_fault_has_gone(
    number: int, cpu: CpuTier, open_disk: OpenDisk, fast_retry: None
) -> None:
    disk = FaultyTier(open_disk())
    planner = Planner(cpu, disk)
    disk.faults["write"] = OSError(number, os.strerror(number))
    for block in range(10):
        planner.commit(block)
    planner.settle()
    for block in range(6):
        planner.manager.withdraw(key(block))  # the CPU tier, with its 8 slots, still has four
    del disk.faults["write"]
    planner.until(lambda: len(disk.present()) == 8)
    planner.settle()
    assert set(disk.present()) == {key(block) for block in range(2, 10)}
    assert planner.manager.next_look() is None


def test_a_fault_that_stays_is_tried_ever_more_rarely(
    open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(lane.time, "monotonic", lambda: now[0])
    disk = FaultyTier(open_disk())
    disk.faults["write"] = OSError(errno.EIO, "planted")
    planner = Planner(disk)
    for block in range(5):
        planner.commit(block)
    planner.settle()
    assert disk.calls.count("write") == 5
    waits = []
    for _ in range(8):
        wait = planner.manager.next_look()
        assert wait is not None
        waits.append(wait)
        now[0] += wait
        planner.round()
        planner.settle()
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert disk.calls.count("write") == 5 + 8  # one at a time
    disk.faults.clear()
    now[0] += 30
    planner.round()
    planner.settle()
    assert len(disk.present()) == 5  # one got through, and the others after it


def test_a_medium_that_stays_full_costs_few_stored_blocks(
    open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_disk()
    planner = Planner(tier)
    for number in range(8):
        planner.commit(number)
        planner.settle()

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "planted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", refuse)
        for number in range(10, 20):
            planner.commit(number)
            planner.settle()
    assert [n for n in range(8) if key(n) not in tier.present()] == [0, 1]
    for number in range(20, 24):
        planner.commit(number)
        planner.settle()
    assert {key(n) for n in (*range(2, 8), *range(20, 24))} <= set(tier.present())
    assert content(20) == planner.load(20)
