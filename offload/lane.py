"""One tier with what the manager keeps for it: threads, counters, and the saves it still lacks."""

from __future__ import annotations

import errno
import logging
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable

from offload.block_file import BlockCorruptError
from offload.history import FAILED_VERIFICATION, LOST, History
from offload.io_threads import IoThreads, Job, Urgency
from offload.tier import BlockKey, BlockState, Entry, Forget, Tier, TierStats, WriteResult
from offload.transfer_rate import TransferRate

_SURVEY_SHARE = 30  # a survey takes at most this part of an I/O thread's time
_FIRST_RETRY = 0.5  # seconds from a failure to the next try; doubled each time it fails too
_LAST_RETRY = 30.0


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
        history: History,
        wake: Callable[[], None],
    ) -> None:
        self.tier = tier
        self.in_memory = tier.in_memory
        self.threads = IoThreads(f"offload-{tier.name}", io_threads, wake)
        self.rate = TransferRate()
        self.stats = TierStats(capacity_bytes=tier.capacity_bytes)
        self.skipped: Counter[str] = Counter()
        self.pending: OrderedDict[BlockKey, None] = OrderedDict()  # oldest first
        self.failed: dict[BlockKey, None] = {}  # still held above, to be offered again; in order
        self.barred: set[BlockKey] = set()  # held elsewhere when this tier was reset
        self.num_wipes = 0  # resets not durable yet; saves wait for them
        self._retry_seconds = _FIRST_RETRY
        self._next_retry = math.inf
        self.probe: BlockKey | None = None  # being tried again, to see whether the fault has gone
        self._stall_seconds = stall_seconds
        self._survey_seconds = survey_seconds
        self._next_survey = time.monotonic() + survey_seconds
        self.surveying = False
        self._history = history
        tier.watch(self.note)

    def note(self, key: BlockKey, what: str) -> None:
        """Remember what became of a block here."""
        self._history.note(key, self.tier.name, what)

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
        return self.tier.state(key) is BlockState.PRESENT and not self.stalled

    def take_finished(self) -> None:
        """Settle what the threads have done since the last call."""
        for job in self.threads.take_finished():
            job.done(job)

    def discard_bad(self, entry: Entry, error: Exception) -> None:
        """A read failed: the block is not held any more, and a damaged file goes."""
        if isinstance(error, BlockCorruptError):
            self.note(entry.key, FAILED_VERIFICATION)
            self.stats.verify_failures += 1
            self.skipped[error.reason] += 1
            logger.warning(
                "%s tier: block %s failed verification (%s); it is dropped and computed anew."
                " `overwinter store verify` checks the others",
                self.tier.name,
                entry.key.block_hash.hex()[:16],
                error.reason,
            )
            epoch = self.tier.condemn(entry)
            if epoch is not None:
                self.threads.submit(
                    lambda: self.tier.remove(entry, epoch),
                    Urgency.UPKEEP,
                    lambda job: self.tier.removed(entry, outcome(job)),
                )
            return
        if isinstance(error, FileNotFoundError):
            self.skipped["vanished"] += 1
        else:
            self.skipped["unreadable"] += 1
            self.stats.failed_blocks += 1
        self.note(entry.key, LOST)
        self.tier.forget(entry)

    def retry_later(self) -> None:
        """A save has failed: one will be tried again when the fault may have gone."""
        if self._next_retry == math.inf:
            self._next_retry = time.monotonic() + self._retry_seconds
            self._retry_seconds = min(_LAST_RETRY, 2 * self._retry_seconds)

    def retry_due(self) -> bool:
        """Whether it is time to try one; True once."""
        if time.monotonic() < self._next_retry:
            return False
        self._next_retry = math.inf
        return True

    def recovered(self) -> None:
        """A save has succeeded: the others need not wait much longer."""
        self._retry_seconds = _FIRST_RETRY
        if self._next_retry < math.inf:
            self._next_retry = min(self._next_retry, time.monotonic() + _FIRST_RETRY)

    @property
    def next_look(self) -> float:
        """When time alone will have brought something to do, of the monotonic clock."""
        retry = self._next_retry if self.failed else math.inf
        expires = self.tier.ttl_seconds and not self.surveying
        return min(retry, self._next_survey if expires else math.inf)

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
        if not self._next_survey:
            self.survey()

    def wipe(self, where: Forget | None) -> Job:
        """Make a reset durable, of everything or of some chains."""
        self.num_wipes += 1
        run = self.tier.wipe if where is None else lambda: self.tier.erase(where)
        return self.threads.submit(run, Urgency.RESET, self._wiped)

    def _wiped(self, job: Job) -> None:
        self.num_wipes -= 1
        if job.error is not None:
            logger.warning(
                "%s tier: a restart may find blocks that were dropped: %s",
                self.tier.name,
                job.error,
            )
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
            s.promoted_blocks,
        )


def outcome(job: Job) -> WriteResult:
    """What a `write` or `remove` job did, also when it raised or was not run."""
    if job.error is not None:
        return WriteResult(job.error)
    if job.result is None:
        return WriteResult(OSError(errno.ECANCELED, "not started"))
    result: WriteResult = job.result
    return result
