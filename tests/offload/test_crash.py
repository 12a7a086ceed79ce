"""Killed at any instant, a writer leaves each block absent or whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Forks a writer for every system call of a save that evicts, and ends it just before that call;
# with "half", the call writes half of what it should first.
STEPS = """
import itertools, os, sys
from pathlib import Path
from offload.disk_tier import DiskTier
from tests.offload.harness import *

path, half = Path(sys.argv[1]), sys.argv[2] == "half"
CALLS = ("open", "mkdir", "writev", "fdatasync", "rename", "unlink", "rmdir", "close", "fstat")


def end_before(step):
    count = itertools.count(1)

    def wrap(name):
        real = getattr(os, name)

        def call(*args, **options):
            if next(count) == step:
                if half and name == "writev":
                    real(args[0], [bytes(args[1][0]), bytes(args[1][1][:5000])])
                os._exit(9)
            return real(*args, **options)

        return call

    for name in CALLS:
        setattr(os, name, wrap(name))


def open_tier():
    return DiskTier.open(path, fingerprint=FINGERPRINT, block_bytes=BLOCK_BYTES,
                         capacity_bytes=CAPACITY)


def save(tier, number):
    reservation = tier.reserve(key(number), meta(number))
    result = tier.write(reservation, meta(number), memoryview(content(number)))
    assert tier.settle(reservation, result), result


CAPACITY = 10 * RECORD_BYTES
number = 0
for step in itertools.count(1):
    tier = open_tier()
    while not tier.usage().evicted_blocks:  # so that the next save evicts
        number += 1
        save(tier, number)
    tier.close()
    number += 1
    child = os.fork()
    if not child:
        tier = open_tier()
        end_before(step)
        save(tier, number)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    tier = open_tier()
    for held in tier.present():
        entry = tier.pin(held)
        into = bytearray(BLOCK_BYTES)
        tier.read(entry, memoryview(into))
        [known] = [n for n in range(number + 1) if key(n) == held]
        assert into == content(known), (step, known)
        tier.unpin(entry)
    assert code == 9 or key(number) in tier.present()
    assert not list(path.rglob(".tmp.*")), step
    assert physical_bytes(path) == tier._used_bytes <= CAPACITY, step
    tier.close()
    if code == 0:
        print(step)
        break
    assert code == 9, code
"""

# Forks a writer a hundred times, kills it at some instant, and looks at what it leaves.
ROUNDS = """
import os, random, signal, sys, time
from pathlib import Path
from offload.cpu_tier import CpuTier
from offload.disk_tier import DiskTier
from tests.offload.harness import *

path, CAPACITY, ROUNDS = Path(sys.argv[1]), 32 * RECORD_BYTES, 100
NUMBERS = {key(number): number for number in range(500)}


def open_tier():
    return DiskTier.open(path, fingerprint=FINGERPRINT, block_bytes=BLOCK_BYTES,
                         capacity_bytes=CAPACITY)


def write_for_ever(first, started):
    planner = Planner(CpuTier(8 * BLOCK_BYTES, block_bytes=BLOCK_BYTES), open_tier())
    os.write(started, b"!")
    number = first
    while True:
        planner.commit(number % 500)
        number += 1
        planner.round()
        while planner.manager.pending_saves("disk") > 20:
            planner.round()


assert "torch" not in sys.modules
rng = random.Random(7)
found = orphans = 0
for count in range(ROUNDS):
    ready, started = os.pipe()
    child = os.fork()
    if not child:
        write_for_ever(count * 37, started)
    os.read(ready, 1)
    time.sleep(rng.uniform(0.0, 0.02))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(ready), os.close(started)
    assert physical_bytes(path) <= CAPACITY, count
    orphans += len(list(path.rglob(".tmp.*")))
    tier = open_tier()
    assert not list(path.rglob(".tmp.*")), count
    for held in tier.present():
        entry = tier.pin(held)
        into = bytearray(BLOCK_BYTES)
        assert tier.read(entry, memoryview(into)) == meta(NUMBERS[held])
        assert into == content(NUMBERS[held]), count
        tier.unpin(entry)
        found += 1
    assert tier._used_bytes == physical_bytes(path), count
    tier.close()
print(found, orphans)
"""


@pytest.mark.parametrize("how", ["before", "half"])
def test_ended_at_each_step_of_a_save(how: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STEPS, str(tmp_path / "store"), how],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 15  # it walked through the steps


def test_killed_a_hundred_times(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ROUNDS, str(tmp_path / "store")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    found, orphans = map(int, done.stdout.split())
    assert found > 100
    assert orphans > 10  # it was writing when it died
