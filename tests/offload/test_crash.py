"""Killed at any instant, a writer leaves each block absent or whole."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from offload.disk_tier import DiskTier
from tests.offload.harness import BLOCK_BYTES, content, key, meta, physical_bytes

OpenDisk = Callable[..., DiskTier]
ROOT = Path(__file__).parents[2]
CAPACITY = 32 * 12288

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

WRITER = """
import sys
from pathlib import Path
from offload.cpu_tier import CpuTier
from offload.disk_tier import DiskTier
from tests.offload.harness import *

disk = DiskTier.open(Path(sys.argv[1]), fingerprint=FINGERPRINT, block_bytes=BLOCK_BYTES,
                     capacity_bytes=int(sys.argv[2]))
planner = Planner(CpuTier(8 * BLOCK_BYTES, block_bytes=BLOCK_BYTES), disk)
assert "torch" not in sys.modules
print("writing", flush=True)
for number in range(10**9):
    planner.commit(number % 500)
    planner.round()
    while planner.manager.pending_saves("disk") > 20:
        planner.round()
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


def test_killed_at_random(tmp_path: Path, open_disk: OpenDisk) -> None:
    path = tmp_path / "store"
    rng = random.Random(7)
    found = 0
    for _ in range(5):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(CAPACITY)],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        ) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"writing\n"
            time.sleep(rng.uniform(0.02, 0.4))
            writer.send_signal(signal.SIGKILL)
        assert physical_bytes(path) <= CAPACITY
        tier = open_disk(CAPACITY, path=path)
        assert not list(path.rglob(".tmp.*"))
        numbers = {key(number): number for number in range(500)}
        for held in tier.present():
            entry = tier.pin(held)
            into = bytearray(BLOCK_BYTES)
            assert tier.read(entry, memoryview(into)) == meta(numbers[held])
            assert into == content(numbers[held])
            tier.unpin(entry)
            found += 1
    assert found > 20
