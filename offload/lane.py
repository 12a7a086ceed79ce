"""One tier with what the manager keeps for it: threads, counters, and the saves it still lacks."""

from __future__ import annotations

import errno
import logging
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable

from offload.block_file import BlockCorruptError
from offload.io_threads import IoThreads, Job, Urgency
from offload.tier import BlockKey, BlockState, Entry, Tier, TierStats, WriteResult
from offload.transfer_rate import TransferRate

_SURVEY_SHARE = 30  # a survey takes at most this part of an I/O thread's time


logger = logging.getLogger(__name__)


class Lane:
    """The manager's side of one tier. Planner only."""

    def __init__(
        self,
        tier: Tier,
        *,
        io_threads: int,
        stall_seconds: float,
        survey_seconds: float,
        wake: Callable[[], None],
    ) -> None:
        self.tier = tier
        self.in_memory = tier.in_memory
        self.threads = IoThreads(f"offload-{tier.name}", io_threads, wake)
        self.rate = TransferRate()
        self.stats = TierStats(capacity_bytes=tier.capacity_bytes)
        self.skipped: Counter[str] = Counter()
        self.pending: OrderedDict[BlockKey, None] = OrderedDict()  # oldest first
        self.failed: set[BlockKey] = set()  # resident blocks to offer again when next used
        self.barred: set[BlockKey] = set()  # held elsewhere when this tier was reset
        self.condemned: set[BlockKey] = set()  # stored with bad bytes: never served again
        self.num_wipes = 0  # resets not durable yet; saves wait for them
        self._stall_seconds = stall_seconds
        self._survey_seconds = survey_seconds
        self._next_survey = time.monotonic() + survey_seconds
        self.surveying = False

    @property
    def stalled(self) -> bool:
        """Whether no load would be served: every thread hangs in a call."""
        return not self.in_memory and self.threads.stalled(self._stall_seconds)

    @property
    def saves_stalled(self) -> bool:
        """Whether no save would be served."""
        return not self.in_memory and self.threads.saves_stalled(self._stall_seconds)

    def holds(self, key: BlockKey) -> bool:
        """Whether a load of the block may be asked for."""
        is_present = self.tier.state(key) is BlockState.PRESENT
        return is_present and not self.stalled and key not in self.condemned

    def take_finished(self) -> None:
        """Settle what the threads have done since the last call."""
        for job in self.threads.take_finished():
            job.done(job)

    def discard_bad(self, entry: Entry, error: Exception) -> None:
        """A read failed: the block is not held any more, and a damaged file goes."""
        if isinstance(error, BlockCorruptError):
            self.stats.verify_failures += 1
            self.skipped[error.reason] += 1
            logger.warning(
                "%s tier: block %s failed verification (%s); it is dropped and computed anew."
                " `overwinter store verify` checks the others",
                self.tier.name,
                entry.key.block_hash.hex()[:16],
                error.reason,
            )
            self._remove(entry)
            return
        if isinstance(error, FileNotFoundError):
            self.skipped["vanished"] += 1
        else:
            self.skipped["unreadable"] += 1
            self.stats.failed_blocks += 1
        self.tier.forget(entry)

    def condemn(self, key: BlockKey) -> None:
        """A stored block is known to be bad, though it passes verification: it is never served
        again, and removed as soon as that can be, also if a survey finds it once more."""
        self.condemned.add(key)
        if self.tier.state(key) is BlockState.PRESENT:
            entry = self.tier.pin(key)
            self.tier.unpin(entry)
            self._remove(entry)
        if self.tier.state(key) is BlockState.ABSENT:
            self.condemned.discard(key)

    def stored(self, key: BlockKey) -> None:
        """New bytes of a block have been stored."""
        self.condemned.discard(key)

    def _remove(self, entry: Entry) -> None:
        epoch = self.tier.condemn(entry)
        if epoch is not None:
            self.threads.submit(
                lambda: self.tier.remove(entry, epoch),
                Urgency.UPKEEP,
                lambda job: self._removed(entry, outcome(job)),
            )

    def _removed(self, entry: Entry, result: WriteResult) -> None:
        self.tier.removed(entry, result)
        if entry.key in result.removed:
            self.condemned.discard(entry.key)

    def survey_if_due(self) -> None:
        """Look now and then at what the medium really holds."""
        if time.monotonic() >= self._next_survey:
            self.survey()

    def survey(self) -> None:
        """Look now; a look under way is followed by another."""
        if self.surveying:
            self._next_survey = 0.0
            return
        self._next_survey = math.inf
        request = self.tier.begin_survey()
        if request is not None:
            self.surveying = True
            self.threads.submit(lambda: self.tier.survey(request), Urgency.UPKEEP, self._surveyed)

    def _surveyed(self, job: Job) -> None:
        self.surveying = False
        pause = max(self._survey_seconds, _SURVEY_SHARE * job.seconds)
        self._next_survey = min(self._next_survey, time.monotonic() + pause)
        if job.error is None:
            self.tier.absorb(job.result)
            for key in list(self.condemned):
                self.condemn(key)
        if not self._next_survey:
            self.survey()

    def wipe(self) -> Job:
        """Make a reset durable."""
        self.num_wipes += 1
        return self.threads.submit(self.tier.wipe, Urgency.RESET, self._wiped)

    def _wiped(self, job: Job) -> None:
        self.num_wipes -= 1
        self.survey()  # removes what was renamed away, and counts its bytes off

    def snapshot(self, pending_saves: int) -> TierStats:
        """The counters with the gauges filled in, a copy."""
        usage = self.tier.usage()
        s = self.stats
        skipped = Counter(self.skipped)
        skipped.update(usage.skipped)
        return TierStats(
            usage.blocks,
            usage.num_bytes,
            s.capacity_bytes,
            usage.pinned_blocks,
            pending_saves,
            s.saved_blocks,
            usage.evicted_blocks,
            s.failed_blocks,
            s.loaded_blocks,
            s.load_bytes,
            s.load_seconds,
            s.store_bytes,
            s.store_seconds,
            dict(skipped),
            s.verify_failures,
        )


def outcome(job: Job) -> WriteResult:
    """What a `write` or `remove` job did, also when it raised or was not run."""
    if job.error is not None:
        return WriteResult(job.error)
    if job.result is None:
        return WriteResult(OSError(errno.ECANCELED, "not started"))
    result: WriteResult = job.result
    return result
