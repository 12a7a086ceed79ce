"""Audits as plans: what they borrow, give back, skip and quarantine. No model: errors are given."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from engine import audit_report, load_audit
from engine.audit_report import AuditReporter
from engine.block_chain import hash_at
from engine.kv_cache_manager import KVCacheManager
from engine.kv_groups import KVGroup
from engine.load_audit import AuditCounts, LoadAuditor
from engine.load_samples import LoadSamples
from engine.scheduler import Scheduler, SchedulerLimits
from engine.step import AuditInput, AuditOutput, Comparison, SlotError
from offload.cpu_tier import CpuTier
from offload.manager import OffloadManager
from offload.tier import BlockKey
from tests.engine.planning import BLOCK_SIZE, make_request, run_to_end, settle

THRESHOLD = 0.01
PROMPT = list(range(9 * BLOCK_SIZE + 1))  # nine blocks can be hit
BLOCK_BYTES = 64


class Loaded:
    """An idle engine's plans after a request that loaded nine blocks per group."""

    def __init__(self, groups: int = 1, num_blocks: int = 64) -> None:
        cpu = CpuTier(64 * BLOCK_BYTES, block_bytes=BLOCK_BYTES)
        offload = OffloadManager([cpu], block_bytes=BLOCK_BYTES)
        self.samples = LoadSamples(1.0, 0, BLOCK_SIZE)
        self.kv = KVCacheManager(
            num_blocks,
            BLOCK_SIZE,
            offload,
            groups=[KVGroup(index) for index in range(groups)],
            samples=self.samples,
        )
        self.scheduler = Scheduler(SchedulerLimits(4, 64), self.kv)
        self.serve(PROMPT)
        self.kv.pool.reset()
        self.serve(PROMPT)
        self.auditor = LoadAuditor(self.kv, self.samples, THRESHOLD)

    def serve(self, prompt: list[int]) -> None:
        self.scheduler.add(make_request(prompt, max_tokens=1))
        while self.scheduler.live():
            if self.scheduler.schedule() or not self.scheduler.loading:
                run_to_end(self.scheduler)
            settle(self.scheduler)
        settle(self.scheduler)

    def check(self) -> None:
        self.kv.check(self.auditor.borrowers(), self.auditor.audited())

    def finish(self, step: AuditInput, *errors: float) -> list[load_audit.AuditFailure]:
        """The pass has come to these errors, one per pair."""
        worst = [SlotError(error, 0, "key", 0, 0) for error in errors]
        return self.auditor.settle(AuditOutput([Comparison(w, "", "") for w in worst]))

    def key(self, index: int, group: int = 0) -> BlockKey:
        return BlockKey(hash_at(make_request(PROMPT), index, BLOCK_SIZE), group)

    @property
    def num_referenced(self) -> int:
        return self.kv.pool.num_blocks - self.kv.pool.num_available


def test_an_audit_reads_the_prefix_and_writes_private_blocks_only() -> None:
    loaded = Loaded(groups=2)
    for index in range(9):
        step = loaded.auditor.next_pass()
        assert step is not None
        loaded.check()
        (sequence,) = step.sequences
        assert sequence.start == index * BLOCK_SIZE
        assert sequence.token_ids == PROMPT[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
        for group, table in enumerate(sequence.block_tables):
            held = [loaded.kv.pool.lookup(loaded.key(i, group)) for i in range(index)]
            assert list(table[:index]) == held
            known = [loaded.kv.pool.lookup(key) for key in loaded.kv.pool.known()]
            assert table[index] not in known  # nobody can find it
        pairs = [(pair.group, pair.block_id, pair.computed_id) for pair in step.pairs]
        assert pairs == [
            (group, loaded.kv.pool.lookup(loaded.key(index, group)), table[index])
            for group, table in enumerate(sequence.block_tables)
        ]
        assert loaded.num_referenced == 2 * (index + 2)
        assert loaded.finish(step, THRESHOLD, 0.0) == []
        assert loaded.num_referenced == 0
    assert loaded.auditor.next_pass() is None
    assert loaded.auditor.counts() == AuditCounts(passed=18)
    loaded.check()


def test_giving_way_holds_nothing_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_audit, "MAX_ROWS", 3)
    loaded = Loaded()
    step = loaded.auditor.next_pass()
    assert step is not None
    assert (len(step.sequences[0].token_ids), len(step.pairs)) == (3, 0)
    assert loaded.finish(step) == []
    loaded.check()
    loaded.auditor.give_way()
    assert loaded.num_referenced == 0
    assert loaded.auditor.num_waiting == 9
    loaded.auditor.give_way()  # with nothing under way it changes nothing
    again = loaded.auditor.next_pass()
    assert again is not None
    assert again.sequences[0].start == 0
    loaded.finish(again)
    last = loaded.auditor.next_pass()
    assert last is not None
    assert (last.sequences[0].start, len(last.pairs)) == (3, 1)


def test_what_has_left_the_device_is_skipped() -> None:
    loaded = Loaded()
    pool = loaded.kv.pool
    gone = pool.lookup(loaded.key(0))
    assert gone is not None
    pool.forget(gone)
    other = pool.allocate()  # the key came back, in another block
    pool.register(loaded.key(0), other, make_request(PROMPT).root_hash)
    pool.release(other)
    step = loaded.auditor.next_pass()
    assert step is not None
    assert step.sequences[0].start == BLOCK_SIZE
    assert loaded.auditor.counts() == AuditCounts(skipped=1)


def test_an_audit_does_not_cost_the_cache_more_than_its_share() -> None:
    """A prefix that is gone is computed again, up to a quarter of the pool."""
    loaded = Loaded(num_blocks=24)
    pool = loaded.kv.pool
    for index in range(2, 9):
        block_id = pool.lookup(loaded.key(index))
        assert block_id is not None
        if index < 8:
            pool.forget(block_id)
    for _ in range(2):
        step = loaded.auditor.next_pass()
        assert step is not None
        loaded.finish(step, 0.0)
    assert loaded.auditor.next_pass() is None  # seven blocks, and six are a quarter
    assert loaded.auditor.counts() == AuditCounts(passed=2, skipped=7)
    assert loaded.num_referenced == 0
    loaded.check()


def test_a_bad_block_goes_with_what_follows_it_and_nothing_else() -> None:
    loaded = Loaded(groups=2)
    loaded.serve([7, *PROMPT[1:]])
    other = BlockKey(hash_at(make_request([7, *PROMPT[1:]]), 5, BLOCK_SIZE), 0)
    for _ in range(3):
        step = loaded.auditor.next_pass()
        assert step is not None
        loaded.finish(step, 0.0, 0.0)
    step = loaded.auditor.next_pass()
    assert step is not None
    (failure,) = loaded.finish(step, 0.0, 1.01 * THRESHOLD)
    assert (failure.sample.index, failure.sample.key.group, failure.sample.tier) == (3, 1, "cpu")
    for group in range(2):
        for index in range(9):
            key = loaded.key(index, group)
            assert (loaded.kv.pool.lookup(key) is not None) == (index < 3)
            assert loaded.kv.offload.lookup(key) == ("cpu" if index < 3 else None)
    fates = loaded.kv.offload.fate(loaded.key(5))
    assert {(fate.tier, fate.what) for fate in fates} == {
        ("device", "failed verification"),
        ("cpu", "failed verification"),
    }
    assert loaded.kv.pool.lookup(other) is not None
    assert loaded.kv.offload.lookup(other) == "cpu"
    assert loaded.kv.offload.stats()["cpu"].verify_failures == 1
    assert loaded.auditor.next_pass() is None
    assert loaded.auditor.counts() == AuditCounts(passed=7, failed=1, skipped=10)
    loaded.check()


def test_a_disk_that_hangs_holds_up_nobody_who_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(audit_report, "MAX_FILES", 1)
    writing, go = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []
    plain = AuditReporter._write

    def hang(self: AuditReporter, record: dict[str, Any], name: str) -> Path | None:
        threads.append(threading.current_thread())
        writing.set()
        assert go.wait(30)
        return plain(self, record, name)

    monkeypatch.setattr(AuditReporter, "_write", hang)
    loaded, reporter = Loaded(), AuditReporter(tmp_path, bytes(32))
    step = loaded.auditor.next_pass()
    assert step is not None
    (failure,) = loaded.finish(step, 1.0)
    reporter.report(failure)
    assert writing.wait(10)
    reporter.report(failure)
    assert not reporter.wait(0)
    assert "quarantined" not in caplog.text
    reporter.report(failure)  # more than may wait: told without a file
    assert caplog.text.count("quarantined") == 1
    go.set()
    assert reporter.wait(10)
    assert caplog.text.count("quarantined") == 3
    assert {thread.daemon for thread in threads} == {True}
    assert len(list(tmp_path.glob("quarantine/*.json"))) == 1


def test_a_failed_pass_accuses_nobody() -> None:
    loaded = Loaded()
    assert loaded.auditor.next_pass() is not None
    assert loaded.auditor.settle(AuditOutput(error=RuntimeError("planted"))) == []
    assert loaded.auditor.counts() == AuditCounts(skipped=1)
    assert loaded.num_referenced == 0


def test_an_error_that_is_no_number_is_a_failure() -> None:
    loaded = Loaded()
    step = loaded.auditor.next_pass()
    assert step is not None
    assert len(loaded.finish(step, float("nan"))) == 1


def test_a_reset_forgets_what_waits() -> None:
    loaded = Loaded()
    loaded.kv.reset([])
    assert loaded.auditor.next_pass() is None
    assert loaded.auditor.counts() == AuditCounts()


@pytest.mark.parametrize("when", ["during its pass", "between two passes", "before it gives way"])
def test_a_reset_forgets_the_audit_under_way(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_audit, "MAX_ROWS", 3 if when == "between two passes" else 32)
    loaded = Loaded()
    step = loaded.auditor.next_pass()
    assert step is not None
    if when == "between two passes":
        loaded.finish(step)
    loaded.kv.reset([])
    loaded.auditor.forget()
    loaded.check()
    assert loaded.num_referenced == 2  # its own block and a private one: a pass may write it
    if when == "during its pass":
        assert loaded.finish(step, float("inf")) == []
    elif when == "before it gives way":
        loaded.auditor.give_way()
    assert loaded.auditor.next_pass() is None
    assert loaded.num_referenced == 0
    assert (loaded.auditor.num_waiting, loaded.auditor.counts()) == (0, AuditCounts())
    assert loaded.kv.offload.lookup(loaded.key(0)) == "cpu"
    loaded.check()


def test_cold_blocks_stay_cold() -> None:
    loaded = Loaded()
    pool = loaded.kv.pool
    blocks = [pool.lookup(loaded.key(index)) for index in range(2)]
    for block_id in blocks:
        assert block_id is not None
        pool.demote(block_id)
    for _ in range(2):
        step = loaded.auditor.next_pass()
        assert step is not None
        loaded.finish(step, 0.0)
    assert [pool.is_cold(block_id) for block_id in blocks if block_id is not None] == [True, True]
