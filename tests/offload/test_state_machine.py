"""Any order of operations: the laws hold after each, and a simple model agrees.

Two machines. One plays with a CPU tier, its index and its order of eviction; the other with a whole
manager over memory and a faulty disk, whose threads work step by step, so that a run is a pure
function of its operations and any interleaving of them can be reached.
"""

from __future__ import annotations

import asyncio
import errno
import math
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from offload.cpu_tier import CpuTier
from offload.disk_tier import DiskTier
from offload.history import EVICTED, SUPERSEDED
from offload.io_threads import IoThreads, Urgency
from offload.store_scan import block_name
from offload.tier import BlockState, Entry, Forget, Reservation, WriteResult
from offload.transfers import Transfers
from tests.offload.harness import (
    BLOCK_BYTES,
    FINGERPRINT,
    RECORD_BYTES,
    FaultyTier,
    Planner,
    content,
    key,
    meta,
    named,
    physical_bytes,
)

CI = settings(
    max_examples=40,
    stateful_step_count=60,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
SOAK = settings(CI, max_examples=2500, stateful_step_count=150, derandomize=False)

NUM_SLOTS = 7
NUM_NUMBERS = 24
CONTENTS = [content(number) for number in range(NUM_NUMBERS)]
NUMBER_OF = {key(number): number for number in range(NUM_NUMBERS)}
DONE = WriteResult(num_bytes=BLOCK_BYTES)

numbers = st.integers(0, NUM_NUMBERS - 1)
# They follow the numbers, as `harness.meta` has it, and begin at a few of them, so as to be met.
chains = st.builds(
    lambda first, length: list(range(first, min(first + length, NUM_NUMBERS))),
    st.integers(0, 4).map(lambda which: 5 * which),
    st.integers(1, 8),
)
seldom = st.integers(0, 3)  # what ends everything else happens when it is 0
rounds = st.integers(0, 3)  # of copies and work, at once after something was asked for


class CpuTierMachine(RuleBasedStateMachine):
    """Reserve, fill, settle, pin, keep, touch, age, drop: in any order."""

    num_steps = 0

    @initialize()
    def begin(self) -> None:
        self.tier = CpuTier(NUM_SLOTS * BLOCK_BYTES, block_bytes=BLOCK_BYTES)
        self.saving: list[tuple[int, Reservation, bool]] = []  # the last: overtaken by a drop
        self.present: dict[int, str] = {}  # number -> "", "superseded" or "kept"
        self.pins: list[tuple[int, Entry]] = []
        self.keeps: list[tuple[int, Entry]] = []
        self.gone: list[tuple[int, str]] = []
        self.tier.watch(lambda which, what: self.gone.append((NUMBER_OF[which], what)))
        self.save(list(range(NUM_SLOTS)))

    @rule(chain=chains)
    def save(self, chain: list[int]) -> None:
        for number in chain:
            before = len(self.saving)
            self.reserve(number, False)
            if len(self.saving) > before:
                self.settle(before, False)

    @rule(number=numbers, promotion=st.booleans())
    def reserve(self, number: int, promotion: bool) -> None:
        saving = {other for other, _, overtaken in self.saving if not overtaken}
        if number in self.present or number in saving:
            with pytest.raises(ValueError, match="a save of a block that is"):
                self.tier.reserve(key(number), meta(number))
            return
        dead = {id(entry) for other, entry in self.pins if not self.owns(other, entry)}
        room = NUM_SLOTS - len(self.present) - len(self.saving) - len(dead)
        pinned = {other for other, entry in self.pins if self.owns(other, entry)}
        may_go = {
            other for other, how in self.present.items() if how != "kept" and other not in pinned
        }
        reservation = self.tier.reserve(key(number), None if promotion else meta(number))
        assert (reservation is not None) == bool(room or may_go)
        if reservation is None:
            return
        victims = [NUMBER_OF[entry.key] for entry in reservation.evicted]
        assert len(victims) == (0 if room else 1)
        for victim in victims:
            first = {other for other in may_go if self.present[other] == "superseded"}
            assert victim in (first or may_go)
            what = SUPERSEDED if victim in first else EVICTED
            assert self.gone[-1] == (victim, what)
            del self.present[victim]
        self.saving.append((number, reservation, False))

    @rule(which=st.integers(0, 99), fails=st.booleans())
    def settle(self, which: int, fails: bool) -> None:
        if not self.saving:
            return
        number, reservation, overtaken = self.saving.pop(which % len(self.saving))
        self.tier.write(reservation, meta(number), memoryview(CONTENTS[number]))
        result = WriteResult(OSError("no")) if fails else WriteResult(None, meta=meta(number))
        assert self.tier.settle(reservation, result) == (not fails and not overtaken)
        if not fails and not overtaken:
            self.present[number] = ""

    @rule(number=numbers)
    def pin(self, number: int) -> None:
        if number in self.present:
            self.pins.append((number, self.tier.pin(key(number))))
        else:
            with pytest.raises(KeyError):
                self.tier.pin(key(number))

    @rule(which=st.integers(0, 99))
    def unpin(self, which: int) -> None:
        if self.pins:
            self.tier.unpin(self.pins.pop(which % len(self.pins))[1])

    @rule(number=numbers)
    def keep(self, number: int) -> None:
        entry = self.tier.keep(key(number))
        num_kept = list(self.present.values()).count("kept")
        how = self.present.get(number)
        assert (entry is not None) == (
            how == "kept" or (how is not None and num_kept < NUM_SLOTS // 2)
        )
        if entry is not None:
            self.keeps.append((number, entry))
            self.present[number] = "kept"

    @rule(which=st.integers(0, 99))
    def let_go(self, which: int) -> None:
        if self.keeps:
            number, entry = self.keeps.pop(which % len(self.keeps))
            self.tier.let_go(entry)
            if self.owns(number, entry) and all(other is not entry for _, other in self.keeps):
                self.present[number] = ""

    @rule(chain=chains, again=st.booleans())
    def touch(self, chain: list[int], again: bool) -> None:
        for number in reversed(chain):
            self.tier.touch(key(number), again)
            if self.present.get(number) == "superseded":
                self.present[number] = ""

    @rule(chain=chains)
    def age(self, chain: list[int]) -> None:
        for number in reversed(chain):
            self.tier.age(key(number))
            if self.present.get(number) == "":
                self.present[number] = "superseded"

    @rule(number=numbers)
    def lose(self, number: int) -> None:
        if number in self.present:
            entry = self.tier._index.get(key(number))
            self.tier.forget(entry)
            del self.present[number]
            self.tier.forget(entry)  # an old handle: nothing

    @rule()
    @precondition(lambda self: len(self.present) > 3)
    def drop(self) -> None:
        self.gone.clear()
        assert self.tier.drop_all() == len(self.present)
        assert {number for number, _ in self.gone} == set(self.present)
        self.present.clear()
        self.saving = [(number, reservation, True) for number, reservation, _ in self.saving]

    def owns(self, number: int, entry: Entry) -> bool:
        return number in self.present and self.tier._index.get(key(number)) is entry

    @invariant()
    def laws(self) -> None:
        type(self).num_steps += 1
        self.tier.check()
        assert {NUMBER_OF[which] for which in self.tier.present()} == set(self.present)
        assert self.tier.num_pins() == len(self.pins)
        alive = [entry for number, entry in self.keeps if self.owns(number, entry)]
        assert self.tier.num_keeps() == len(alive)
        pinned = {id(entry) for _, entry in self.pins} | {id(entry) for entry in alive}
        assert self.tier.usage().pinned_blocks == len(pinned)
        for number in self.present:
            entry = self.tier._index.get(key(number))
            assert self.tier.slot(entry) == CONTENTS[number]
        for number, entry in self.pins:  # dead ones too: somebody still reads them
            assert self.tier.slot(entry) == CONTENTS[number]

    def teardown(self) -> None:
        if not hasattr(self, "tier"):
            return
        while self.saving:
            self.settle(0, True)
        while self.pins:
            self.unpin(0)
        assert len(self.tier._free) == NUM_SLOTS - len(self.present)
        self.tier.check()


class SteppedThreads(IoThreads):
    """No threads: a job begins and ends when the machine says so."""

    def _start_thread(self) -> None:
        pass

    def begin(self) -> bool:
        """Start the next job that the threads would start."""
        with self._condition:
            if len(self._running) >= self._count or not self._may_start():
                return False
            job = self._queue[0][2]
            self._queue[:] = sorted(self._queue)[1:]
            job.started = time.monotonic()
            self._running.add(job)
        return True

    def end(self, which: int) -> bool:
        """Do the work of one of the jobs that run."""
        running = sorted(self._running, key=lambda job: job.order)
        if not running:
            return False
        job = running[which % len(running)]
        if not job.cancelled:
            try:
                job.result = job.run()
            except Exception as error:
                job.error = error
        job.finished = True
        self._running.discard(job)
        self._finished.append(job)
        self._wake()
        return True

    def hang(self, which: int) -> None:
        """One of the jobs that run has been at it for ever."""
        running = sorted(self._running, key=lambda job: job.order)
        if running:
            running[which % len(running)].started = -math.inf

    def drain(self) -> None:
        while self.begin() or self.end(0):
            pass


class ManagerMachine(RuleBasedStateMachine):
    """The device, the planner, a CPU tier of few blocks, and a disk that fails."""

    num_steps = 0
    num_loaded = 0

    @initialize()
    def begin(self) -> None:
        self.patches = [
            mock.patch("offload.lane.IoThreads", SteppedThreads),
            # What reached the medium is another test's matter, and takes most of the time.
            mock.patch("os.fdatasync", return_value=None),
            mock.patch("os.fsync", return_value=None),
        ]
        for patch in self.patches:
            patch.start()
        self.path = Path(tempfile.mkdtemp(prefix="overwinter-test-"))
        self.loop = asyncio.new_event_loop()
        self.legit: dict[str, set[int]] = {"cpu": set(), "disk": set()}
        self.open()
        self.commit(list(range(12)), 3)

    def play(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            self.execute()
            self.work(0, 3)
            self.work(0, 3)

    def open(self) -> None:
        self.cpu = CpuTier(NUM_SLOTS * BLOCK_BYTES, block_bytes=BLOCK_BYTES)
        self.capacity = 14 * RECORD_BYTES
        disk = DiskTier.open(
            self.path / "store",
            fingerprint=FINGERPRINT,
            block_bytes=BLOCK_BYTES,
            capacity_bytes=self.capacity,
        )
        self.disk = FaultyTier(disk)
        self.planner = Planner(
            self.cpu,
            self.disk,
            staging_bytes=4 * BLOCK_BYTES,
            io_threads=3,
            survey_seconds=math.inf,
            stall_seconds=1e6,
            write_deadline=1e6,
        )
        self.manager = self.planner.manager
        self.threads: SteppedThreads = self.manager._lanes[1].threads  # type: ignore[assignment]
        self.resident: dict[int, int] = {}  # device block -> number
        self.given_away: list[int] = []  # device blocks to be overwritten when no copy is out
        self.loads: dict[int, tuple[int, int]] = {}  # ticket -> number, device block
        self.cancelled: dict[int, tuple[int, int]] = {}
        self.out: Transfers | None = None
        self.resetting: asyncio.Task[dict[str, int]] | None = None
        self.promoting: set[int] = set()
        self.seen: dict[str, set[int]] = {"cpu": set(), "disk": set()}
        self.offered: set[int] = set()
        self.pinned: dict[str, tuple[float, list[tuple[str, Entry]]]] = {}

    # -- what the engine does

    @rule(chain=chains, num_rounds=rounds)
    def commit(self, chain: list[int], num_rounds: int) -> None:
        for number in chain:
            self.commit_one(number)
        self.play(num_rounds)

    def commit_one(self, number: int) -> None:
        if number not in self.resident.values():
            free = [block for block in range(16) if block not in self.resident]
            if not free:
                self.give_away(next(iter(self.resident)))
                free = [block for block in range(16) if block not in self.resident]
            block = next((block for block in free if block not in self.given_away), None)
            if block is None:
                return
            self.resident[block] = number
            self.planner.commit(number, block)
            self.offered.add(number)
            for legit in self.legit.values():
                legit.add(number)

    @rule(which=st.integers(0, 99))
    def withdraw(self, which: int) -> None:
        if self.resident:
            self.give_away(sorted(self.resident)[which % len(self.resident)])

    def give_away(self, block: int) -> None:
        self.manager.withdraw(key(self.resident.pop(block)))
        self.given_away.append(block)
        self.scribble()

    def scribble(self) -> None:
        """Copies handed out are executed before their device blocks are overwritten."""
        if self.out is None:
            for block in self.given_away:
                self.planner.device[block][:] = b"\xee" * BLOCK_BYTES
            self.given_away.clear()

    @rule(chain=chains, tier=st.sampled_from([None, "cpu", "disk"]), num_rounds=rounds)
    def load(self, chain: list[int], tier: str | None, num_rounds: int) -> None:
        free = set(range(20, 60))
        free -= {block for _, block in (*self.loads.values(), *self.cancelled.values())}
        for number in chain:
            found = self.manager.lookup(key(number))
            if tier is not None and self.manager._lane(tier).holds(key(number)):
                found = tier
            if found is None or not free:
                break
            block = min(free)
            free.discard(block)
            ticket = self.manager.load(key(number), block, found)
            self.loads[ticket] = number, block
            if found == "disk":
                self.promoting.add(number)
        self.manager.start_loads()
        self.play(num_rounds)

    @rule(chain=chains, tier=st.sampled_from([None, "disk"]), num_rounds=rounds)
    def request(self, chain: list[int], tier: str | None, num_rounds: int) -> None:
        """What is held is loaded, the rest computed."""
        self.touch(chain, True)
        before = len(self.loads)
        self.load(chain, tier, 0)
        self.commit(chain[len(self.loads) - before :], num_rounds)
        self.touch(chain, False)

    @rule(which=st.integers(0, 99))
    def cancel(self, which: int) -> None:
        if self.loads:
            ticket = sorted(self.loads)[which % len(self.loads)]
            self.manager.cancel(ticket)
            self.cancelled[ticket] = self.loads.pop(ticket)

    @rule(chain=chains, again=st.booleans())
    def touch(self, chain: list[int], again: bool) -> None:
        self.manager.touch([key(number) for number in chain], again)

    @rule()
    def poll(self) -> None:
        if self.out is None:
            self.out = self.manager.poll()

    @rule()
    def execute(self) -> None:
        transfers = self.manager.poll() if self.out is None else self.out
        self.out = None
        self.planner.loaded.clear()
        self.planner.failed.clear()
        self.planner.execute(transfers)
        self.scribble()
        for copy in transfers.copies_in:
            number, block = self.loads.pop(copy.ticket, None) or self.cancelled.pop(copy.ticket)
            assert (copy.key, copy.block_id) == (key(number), block)
            assert self.planner.device[block] == CONTENTS[number], "another block's content"
            type(self).num_loaded += 1
        for ticket in transfers.failed_loads:
            # One that was reported before it was cancelled is out of the planner's hands.
            assert self.loads.pop(ticket, None) or self.cancelled.pop(ticket, None)

    # -- what users ask for

    @rule(
        tiers=st.sampled_from([["cpu"], ["disk"], ["cpu", "disk"], ["disk", "cpu"]]),
        chain=st.one_of(st.none(), chains),
        luck=seldom,
    )
    def reset(self, tiers: list[str], chain: list[int] | None, luck: int) -> None:
        if luck:
            return
        self.finish_reset()
        where = None if chain is None else Forget(keys=frozenset(key(number) for number in chain))
        self.resetting = self.loop.create_task(self.manager.reset(tiers, where))
        self.loop.run_until_complete(asyncio.sleep(0))
        dropped = set(range(NUM_NUMBERS) if chain is None else chain)
        for tier in tiers:
            self.legit[tier] -= dropped
        if "disk" in tiers:
            self.promoting -= dropped

    @rule()
    def finish_reset(self) -> None:
        if self.resetting is None:
            return
        jobs = [*(job for _, _, job in self.threads._queue), *self.threads._running]
        waiting = [job for job in jobs if job.urgency is Urgency.RESET]
        while not all(job.finished for job in waiting):
            assert self.threads.begin() or self.threads.end(0)
        self.loop.run_until_complete(self.resetting)
        self.resetting = None

    @rule()
    def offer_down(self) -> None:
        self.manager._saves.offer_down()  # what a flush begins with

    @rule(name=st.sampled_from("ab"), chain=chains, lasts=st.booleans())
    def pin(self, name: str, chain: list[int], lasts: bool) -> None:
        until = math.inf if lasts else 0.0
        blocks, num_bytes = self.manager.pin(name, [key(number) for number in chain], until)
        self.manager._pins.lapse(time.time())
        pin = self.manager._pins._pins.get(name)
        kept = [] if pin is None else [(lane.tier.name, entry) for lane, entry in pin.kept]
        if lasts:
            assert num_bytes == sum(entry.num_bytes for _, entry in kept)
            assert blocks == len({entry.key for _, entry in kept})
        else:
            assert kept == []
        self.pinned[name] = time.time(), kept

    @rule(name=st.sampled_from("ab"))
    def unpin(self, name: str) -> None:
        self.manager.unpin(name)
        self.pinned.pop(name, None)

    @rule(chain=chains)
    def age(self, chain: list[int]) -> None:
        self.manager.age([key(number) for number in chain])

    # -- what the world does

    @rule(which=st.integers(0, 99), count=st.integers(1, 4))
    def work(self, which: int, count: int) -> None:
        for _ in range(count):
            self.threads.begin()
        self.threads.end(which)

    @rule()
    def work_off(self) -> None:
        self.threads.drain()

    @rule(which=st.integers(0, 99))
    def hang(self, which: int) -> None:
        self.threads.hang(which)

    @rule(
        call=st.sampled_from(["read", "write"]),
        error=st.sampled_from([OSError(errno.ENOSPC, "full"), OSError(errno.EIO, "bad"), None]),
    )
    def fault(self, call: str, error: Exception | None) -> None:
        self.disk.faults = {} if error is None else {call: error}

    @rule(number=numbers, how=st.sampled_from(["flip", "cut", "unlink"]))
    def damage(self, number: int, how: str) -> None:
        path = self.path / "store" / FINGERPRINT.hex() / "/".join(block_name(named(number)))
        if not path.exists():
            return
        data = path.read_bytes()
        path.unlink()  # never in place: a link to it may be open
        if how != "unlink":
            data = data[:-1] + bytes([data[-1] ^ 1]) if how == "flip" else data[:-4096]
            path.write_bytes(data)

    @rule()
    def survey(self) -> None:
        self.manager._lanes[1].survey()

    @rule(luck=seldom)
    def restart(self, luck: int) -> None:
        if luck:
            return
        self.settle()
        held = set(self.disk.present())
        self.close()
        self.open()
        found = {NUMBER_OF[which] for which in self.disk.present()}
        assert found <= self.legit["disk"], "a restart found what a reset had dropped"
        assert {NUMBER_OF[which] for which in held} >= found or self.disk.faults == {}
        self.legit["cpu"].clear()

    # -- the laws

    @invariant()
    def laws(self) -> None:
        if not hasattr(self, "manager"):
            return
        type(self).num_steps += 1
        self.manager.check()
        for tier in (self.cpu, self.disk):
            self.check_tier(tier)
        for when, kept in self.pinned.values():
            for name, entry in kept:
                for fate in self.manager.fate(entry.key):
                    went = fate.tier == name and fate.when > when
                    assert not (went and fate.what in (EVICTED, SUPERSEDED)), (
                        "evicted though pinned"
                    )

    def check_tier(self, tier: Any) -> None:
        name = tier.name
        lane = self.manager._lane(name)
        present = {NUMBER_OF[which] for which in tier.present()}
        may_be = self.legit[name] | (self.promoting if name == "cpu" else set())
        assert present <= may_be, f"{name} serves what a reset had dropped"
        self.legit[name] |= present
        self.seen[name] |= present
        for number in (self.seen[name] | self.offered) - present:
            which = key(number)
            coming = which in lane.pending or which in self.manager._saves._copying
            if tier.state(which) is BlockState.ABSENT and not coming:
                fates = [fate for fate in self.manager.fate(which) if fate.tier == name]
                assert fates, f"nobody knows what became of {number} in {name}"

    # -- endings

    def settle(self) -> None:
        """Let everything end, as far as it can."""
        self.finish_reset()
        self.disk.faults = {}
        if self.out is not None:
            self.execute()
        for _ in range(200):
            self.threads.drain()
            self.execute()
            if self.manager.idle() and not self.threads.busy:
                break
        assert self.manager.idle(), "something never ends"
        assert self.loads == {}, "a load without an end"
        self.cancelled.clear()

    def close(self) -> None:
        for lane in self.manager._lanes:
            lane.threads.close(0)
        self.disk.close()

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        try:
            self.settle()
            for name in "ab":
                self.manager.unpin(name)
            self.manager.check()
            stats = self.manager.stats()
            assert [stats[name].pinned_blocks for name in ("cpu", "disk")] == [0, 0]
            assert [stats[name].pending_saves for name in ("cpu", "disk")] == [0, 0]
            staging = self.manager._staging
            assert staging.num_free == staging.num_buffers
            assert physical_bytes(self.path / "store") <= self.capacity
        finally:
            self.close()
            self.loop.close()
            for patch in self.patches:
                patch.stop()
            shutil.rmtree(self.path)


def test_cpu_tier() -> None:
    CpuTierMachine.num_steps = 0
    run_state_machine_as_test(CpuTierMachine, settings=CI)
    assert CpuTierMachine.num_steps > 1500


def test_manager() -> None:
    ManagerMachine.num_steps = ManagerMachine.num_loaded = 0
    run_state_machine_as_test(ManagerMachine, settings=CI)
    assert ManagerMachine.num_steps > 1500
    assert ManagerMachine.num_loaded > 25


@pytest.mark.soak
@pytest.mark.parametrize("machine", [CpuTierMachine, ManagerMachine])
def test_for_long(machine: type[RuleBasedStateMachine]) -> None:
    machine.num_steps = 0  # type: ignore[attr-defined]
    run_state_machine_as_test(machine, settings=SOAK)
    assert machine.num_steps > 100_000  # type: ignore[attr-defined]
