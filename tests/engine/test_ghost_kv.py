"""Whatever happens, in whatever order: nobody attends to KV that is not its own.

A hypothesis state machine over the real core, scheduler, KV manager, pool, offload manager and
tiers, with ghost memory in place of a model (`ghost_kv`) and a script in place of threads
(`ghost_engine`). After each rule every slot that could be read is compared with what it should
hold, and the conservation laws are checked. A failure prints the shortest script that hypothesis
found, as calls of the rules below.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.outputs import FinishReason
from engine.request import Request
from tests.engine.ghost_engine import EIO, ENOSPC, GhostEngine, Shape, Told, patch_threads
from tests.engine.ghost_kv import VOCAB_SIZE

TOKENS = st.integers(0, VOCAB_SIZE - 1)
SALTS = st.sampled_from(["own", "own", "own", "none", "a", "b"])
LARGE_DISK = 1 << 23  # nothing is evicted
TIERS = st.sampled_from(["all", "all", "device", "below"])
FAULTS = st.sampled_from([None, None, None, EIO, ENOSPC, RuntimeError("bug")])

SHAPES = st.builds(
    Shape,
    num_blocks=st.sampled_from([7, 12, 20]),
    block_size=st.sampled_from([2, 4]),
    windows=st.sampled_from([(None,), (None,), (None, 5), (3, None), (6, 2), (4,), (9,)]),
    max_num_seqs=st.sampled_from([2, 4]),
    max_num_batched_tokens=st.sampled_from([5, 12, 40]),
    cpu_blocks=st.sampled_from([0, 2, 5]),
    disk_bytes=st.sampled_from([0, 160 << 10, LARGE_DISK, LARGE_DISK]),
    prompt_only=st.sampled_from([False, False, True]),
)


class GhostMachine(RuleBasedStateMachine):
    """The rules are what clients, disks and operators do."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="ghost-"))
        self.engine: GhostEngine | None = None
        self.past: list[Told] = []

    @initialize(shape=SHAPES, sound=st.booleans())
    def start(self, shape: Shape, sound: bool) -> None:
        """A `sound` disk never fails, and then what was saved must be found."""
        self.sound = sound
        self.engine = GhostEngine(shape, self.directory / "kv")

    @property
    def running(self) -> GhostEngine:
        assert self.engine is not None
        return self.engine

    def teardown(self) -> None:
        try:
            if self.engine is not None:
                self.rest()
        finally:
            if self.engine is not None:
                self.engine.close()
            shutil.rmtree(self.directory)

    # --- clients ----------------------------------------------------------------------------

    @rule(
        stem=st.integers(0, 1 << 16),
        keep=st.integers(0, 40),
        tail=st.lists(TOKENS, max_size=9),
        aligned=st.booleans(),
        max_tokens=st.integers(0, 12),
        salt=SALTS,
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        may_stop=st.booleans(),
        prompt_logprobs=st.sampled_from([False, False, False, False, True]),
    )
    def arrive(
        self,
        stem: int,
        keep: int,
        tail: list[int],
        aligned: bool,
        max_tokens: int,
        salt: str,
        priority: int,
        may_stop: bool,
        prompt_logprobs: bool,
    ) -> None:
        """A prompt that begins as an older conversation does, perhaps to end with a block of it."""
        prompt, own_salt = tail or [0], None
        size = self.running.shape.block_size
        if self.past:
            past = self.past[stem % len(self.past)]
            own_salt = past.salt
            kept = past.tokens[:keep]
            aligned_to = len(kept) // size * size
            prompt = kept[:aligned_to] if aligned and aligned_to else [*kept, *prompt]
        capacity = self.running.capacity_tokens
        prompt = prompt[-capacity + 1 :]
        told = self.running.arrive(
            prompt,
            min(max_tokens, capacity - len(prompt)),
            salt={"own": own_salt, "none": None}.get(salt, salt),
            priority=priority,
            may_stop=may_stop,
            prompt_logprobs=prompt_logprobs,
        )
        self.past.append(told)

    @precondition(lambda self: self.past)
    @rule(
        which=st.integers(0, 1 << 16),
        tail=st.lists(TOKENS, min_size=1, max_size=5),
        max_tokens=st.integers(1, 12),
        evict=st.booleans(),
        num_recomputed=st.integers(0, 2),
    )
    def next_turn(
        self, which: int, tail: list[int], max_tokens: int, evict: bool, num_recomputed: int
    ) -> None:
        """A conversation goes on, perhaps after the device has lost it."""
        engine = self.running
        if evict:
            for _ in range(4):
                self.all_io(steps=True)
            engine.reset(["device"])
        engine.num_recomputed = num_recomputed
        told = self.past[which % len(self.past)]
        prompt = [*told.tokens, *tail][-engine.capacity_tokens + 1 :]
        max_tokens = min(max_tokens, engine.capacity_tokens - len(prompt))
        self.past.append(engine.arrive(prompt, max_tokens, salt=told.salt))

    @precondition(lambda self: self.running.live)
    @rule(which=st.integers(0, 1 << 16))
    def abort(self, which: int) -> None:
        live: list[Request] = self.running.live
        self.running.abort(live[which % len(live)])

    # --- the engine -------------------------------------------------------------------------

    @rule(num_drafts=st.integers(0, 3), wrong=st.integers(0, 7), num_recomputed=st.integers(0, 3))
    def step(self, num_drafts: int, wrong: int, num_recomputed: int) -> None:
        self.running.num_recomputed = num_recomputed
        self.running.step(num_drafts, lambda position: bool(wrong >> position % 3 & 1))

    @rule(count=st.integers(2, 4), num_jobs=st.integers(0, 3))
    def steps(self, count: int, num_jobs: int) -> None:
        for _ in range(count):
            self.running.step(2, lambda position: position % 3 == 0)
            for _ in range(min(num_jobs, len(self.running.jobs))):
                self.running.run_job(0)

    @precondition(lambda self: self.running.core._num_failed_steps < 2 and self.running.live)
    @rule()
    def failing_pass(self) -> None:
        self.running.fail_pass()
        self.running.step()

    # --- media ------------------------------------------------------------------------------

    @precondition(lambda self: self.running.jobs)
    @rule(which=st.integers(0, 1 << 16), fault=FAULTS)
    def io(self, which: int, fault: Exception | None) -> None:
        self.running.run_job(which, None if self.sound else fault)

    @rule(steps=st.booleans())
    def all_io(self, steps: bool) -> None:
        for _ in range(len(self.running.jobs)):
            self.running.run_job(0)
        if steps:
            self.running.step()

    @precondition(lambda self: self.running.scheduler.waiting_for_loads())
    @rule()
    def loads_are_late(self) -> None:
        self.running.expire_loads()
        self.running.step()

    @precondition(lambda self: not self.sound and self.running.disk and self.running.disk.present())
    @rule(which=st.integers(0, 1 << 16), at=st.integers(0, 1 << 16))
    def rot(self, which: int, at: int) -> None:
        """A bit of a stored block flips."""
        self.running.rot(which, at)

    # --- operators --------------------------------------------------------------------------

    @precondition(lambda self: self.running.live or self.running.jobs)
    @rule(tiers=TIERS)
    def reset(self, tiers: str) -> None:
        self.running.reset(self._tiers(tiers))

    @precondition(lambda self: self.running.live)
    @rule(tiers=TIERS, jobs_first=st.booleans())
    def reset_during_pass(self, tiers: str, jobs_first: bool) -> None:
        if jobs_first:
            for _ in range(len(self.running.jobs)):
                self.running.run_job(0)
        self.running.reset(self._tiers(tiers), during_pass=True)
        self.running.step()

    def _tiers(self, tiers: str) -> list[str]:
        names = self.running.tier_names()
        return sorted({"all": names, "device": {"device"}, "below": names - {"device"}}[tiers])

    @precondition(lambda self: len(self.running.tasks) < 2)
    @rule()
    def flush(self) -> None:
        self.running.flush()

    @precondition(lambda self: self.running.num_steps_alive > 15)
    @rule()
    def kill_and_restart(self) -> None:
        self.running.restart()
        self.past = [told for told in self.past if told.reason is not None]

    def rest(self) -> None:
        """Everything comes to an end, and nothing is held."""
        self.running.settle()
        for told in self.past:
            assert told.reason is not None, "a request without an end"
        assert self.running.kv.pool.num_available == self.running.kv.pool.num_blocks
        assert all(stats.pinned_blocks == 0 for stats in self.running.offload.stats().values())
        self.running.check_disk()

    @precondition(lambda self: self.past and len(self.running.live) < 2)
    @rule()
    def replay_the_last(self) -> None:
        """A finished conversation is found as far as it was committed.

        Others may have gone on from its tokens, so more may be found; that it is right is checked
        where it lies.
        """
        engine = self.running
        self.rest()
        told = max(self.past, key=lambda told: told.num_steps_at_end)
        untouched = told.evictions_at_end == engine.kv.pool.num_evicted
        if told.resets_before != engine.num_resets or not untouched:
            return
        if told.reason is FinishReason.ERROR:
            return
        if len(told.tokens) + 2 <= engine.capacity_tokens:
            assert self._replay(told) >= told.committed // engine.shape.block_size

    @precondition(
        lambda self: (
            self.sound
            and self.running.shape.disk_bytes == LARGE_DISK
            and not self.running.shape.prompt_only
            and self.past
        )
    )
    @rule(which=st.integers(0, 1 << 16), restart=st.booleans())
    def replay_from_below(self, which: int, restart: bool) -> None:
        """What the device has lost is found on disk, as far as it was committed."""
        engine = self.running
        self.rest()
        told = self.past[which % len(self.past)]
        if told.resets_before != engine.num_resets or told.reason is FinishReason.ERROR:
            return
        if engine.is_partly_barred:
            return
        engine.flush()
        self.rest()
        if restart:
            engine.restart()
        else:
            engine.reset(["device"])
        engine.num_recomputed = 0
        if len(told.tokens) + 2 <= engine.capacity_tokens:
            assert self._replay(told) >= told.committed // engine.shape.block_size

    def _replay(self, told: Told) -> int:
        """Blocks that a request that goes on from the conversation finds."""
        engine = self.running
        again = engine.arrive([*told.tokens, 0], 1, salt=told.salt)
        self.past.append(again)
        while again.reason is None:
            if engine.step():
                continue
            if engine.jobs:
                engine.run_job(0)
            else:
                assert engine.offload._woken, "nobody would wake the engine"
        return again.request.cached.total // engine.shape.block_size


def run(max_examples: int, steps: int, derandomize: bool) -> None:
    run_state_machine_as_test(
        GhostMachine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=derandomize,
            suppress_health_check=list(HealthCheck),
            database=None,
            phases=[Phase.generate]
            if os.environ.get("NOSHRINK")
            else [Phase.generate, Phase.shrink],
        ),
    )


def test_nobody_attends_to_kv_that_is_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_threads(monkeypatch)
    run(max_examples=100, steps=60, derandomize=True)


@pytest.mark.soak
def test_nobody_attends_to_kv_that_is_not_its_own_in_many_more_orders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patch_threads(monkeypatch)
    run(max_examples=5000, steps=100, derandomize=False)
