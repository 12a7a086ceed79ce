"""Loaded blocks computed anew while nothing is asked for, and what follows if one was bad.

    sampled --idle--> [ borrow its prefix, compute its rows into private blocks, compare ]
                          |-- equal ------------------------------> passed
                          |-- apart by more than the threshold ---> failed: quarantined, reported
                          |-- gone from the device, no room ------> skipped
                          '-- a request came ---------------------> sampled

One block, or one per KV group of the same position, at a time, in the order of their chains, so
that what it was computed from has been audited before it. A block drawn behind one that was not
drawn may fail through the other's fault; its prefix is then audited too, and either way it goes,
because whatever follows a bad block is suspect. A pass is short, and between two of them a request
that came takes everything back.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

from engine.block_chain import hash_at
from engine.kv_cache_manager import KVCacheManager
from engine.load_samples import MAX_WAITING, LoadSample, LoadSamples
from engine.prefix_match import DEVICE
from engine.request import Request
from engine.step import AuditInput, AuditOutput, BlockPair, Comparison, SequenceInput
from offload.tier import BlockKey

logger = logging.getLogger(__name__)

# Rows of one pass: a request that arrives meanwhile waits for it.
MAX_ROWS = 32
# Of the pool, for private blocks: an audit is not worth more of what others may come back for.
MAX_POOL_SHARE = 1 / 4


@dataclass(frozen=True, slots=True)
class AuditFailure:
    """A block that is not what it claims, with everything that reproduces it."""

    sample: LoadSample
    comparison: Comparison
    threshold: float
    locations: list[str]  # where its bytes lay, below the device
    num_dropped: int  # blocks of the device that went with it


@dataclass(slots=True)
class AuditCounts:
    """Blocks by what became of their audit."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0


@dataclass(slots=True, eq=False)
class _Audit:
    """The one under way. `request` is nobody's: it borrows tables and is never committed."""

    samples: list[LoadSample]
    request: Request
    cold: list[int] = field(default_factory=list)  # borrowed blocks that nobody was expected to ask
    is_forgotten: bool = False  # a reset came: it ends when its pass has, and nothing is told of it


class LoadAuditor:
    """Plans audits and judges them; engine loop only."""

    def __init__(self, kv: KVCacheManager, samples: LoadSamples, threshold: float) -> None:
        self._kv = kv
        self._samples = samples
        self._threshold = threshold
        self._audit: _Audit | None = None
        self._sound: dict[BlockKey, int] = {}  # passed lately, and in which device block
        self._counts = AuditCounts()

    @property
    def num_waiting(self) -> int:
        """Blocks drawn and not yet judged."""
        return len(self._samples) + (len(self._audit.samples) if self._audit else 0)

    def counts(self) -> AuditCounts:
        """A copy."""
        skipped = self._counts.skipped + self._samples.num_dropped
        return replace(self._counts, skipped=skipped)

    def borrowers(self) -> list[Request]:
        """For the conservation check: whose tables hold references beside those of requests."""
        return [self._audit.request] if self._audit else []

    def audited(self) -> list[int]:
        """For the conservation check: device blocks referenced for being compared."""
        return [sample.block_id for sample in self._audit.samples] if self._audit else []

    # --- one audit --------------------------------------------------------------------------

    def next_pass(self) -> AuditInput | None:
        """What to compute next, legal while no request is live; None if nothing waits. The pass
        must be reported by `settle` before anything else is planned."""
        if self._audit is not None and self._audit.is_forgotten:
            self._end()
        while self._audit is None:
            samples = self._samples.take()
            if not samples:
                return None
            self._begin(samples)
        audit = self._audit
        request = audit.request
        start = request.num_computed_tokens
        num_rows = min(MAX_ROWS, request.num_tokens - start)
        end = start + num_rows
        request.num_inflight_tokens = num_rows
        num_blocks = self._kv.num_blocks_for(end)
        tables = [table[:num_blocks] for table in request.block_tables]
        pairs = [
            BlockPair(s.key.group, s.block_id, request.block_tables[s.key.group][s.index])
            for s in audit.samples
            if end == request.num_tokens
        ]
        return AuditInput([SequenceInput(request.token_ids[start:end], start, tables)], pairs)

    def _begin(self, samples: list[LoadSample]) -> None:
        """Reference what is to be compared and borrow what computing it reads."""
        pool, block_size = self._kv.pool, self._kv.block_size
        held = [sample for sample in samples if pool.lookup(sample.key) == sample.block_id]
        self._counts.skipped += len(samples) - len(held)
        if not held:
            return
        first = held[0]
        request = _private_request(first, (first.index + 1) * block_size)
        assert hash_at(request, first.index, block_size) == first.key.block_hash
        limit = int(pool.num_blocks * MAX_POOL_SHARE)
        cold = [sample.block_id for sample in held if pool.is_cold(sample.block_id)]
        for sample in held:  # first, lest room for the rest be made of them
            pool.reference(sample.block_id)
        audit = _Audit(held, request, cold)
        if self._kv.borrow(request, limit, audit.cold):
            self._audit = audit
            return
        self._counts.skipped += len(held)
        self._let_go(audit)

    def settle(self, output: AuditOutput) -> list[AuditFailure]:
        """Take the outcome of the pass; what was found bad is quarantined when this returns."""
        audit = self._audit
        assert audit is not None
        request = audit.request
        if audit.is_forgotten:
            self._end()
            return []
        if output.error is not None:
            logger.error("an audit's pass failed", exc_info=output.error)
            self._counts.skipped += len(audit.samples)
            self._end()
            return []
        request.num_computed_tokens += request.num_inflight_tokens
        request.num_inflight_tokens = 0
        if request.num_computed_tokens < request.num_tokens:
            return []
        self._end()
        failures = []
        for sample, comparison in zip(audit.samples, output.comparisons, strict=True):
            if comparison.worst.error <= self._threshold:
                self._passed(sample)
            else:
                self._counts.failed += 1
                failures.append(self._quarantine(sample, comparison))
        if failures and not audit.samples[0].is_prefix:
            self._suspect_prefix(audit.samples[0])
        return failures

    def _passed(self, sample: LoadSample) -> None:
        self._counts.passed += 1
        if len(self._sound) >= MAX_WAITING:
            self._sound.pop(next(iter(self._sound)))
        self._sound[sample.key] = sample.block_id

    def give_way(self) -> None:
        """A request has come: take nothing that it may need. The audit begins anew later."""
        if self._audit is not None:
            self._samples.put([] if self._audit.is_forgotten else self._audit.samples)
            self._end()

    def forget(self) -> None:
        """The device was reset: no block of before is audited any more, nor told of. Legal during a
        pass, whose blocks are held until it has ended."""
        self._samples.clear()
        self._sound.clear()
        if self._audit is not None:
            self._audit.is_forgotten = True

    def _end(self) -> None:
        assert self._audit is not None
        self._let_go(self._audit)
        self._audit = None

    def _let_go(self, audit: _Audit) -> None:
        for sample in audit.samples:
            self._kv.pool.release(sample.block_id)
        self._kv.release(audit.request)
        for block_id in audit.cold:
            self._kv.pool.demote(block_id)

    # --- a bad block ------------------------------------------------------------------------

    def _quarantine(self, sample: LoadSample, comparison: Comparison) -> AuditFailure:
        """Out of the prefix map and of every tier, with whatever may have been computed from it:
        other groups' KV of the same tokens included, which layers above may have been."""
        suspects, locations = self._kv.offload.condemn(sample.key, sample.root_hash, sample.tier)
        num_dropped = self._kv.forget(suspects)
        return AuditFailure(sample, comparison, self._threshold, locations, num_dropped)

    def _suspect_prefix(self, sample: LoadSample) -> None:
        """The blocks before a bad one that the device holds, drawn or not, unless they passed."""
        num_tokens = sample.index * self._kv.block_size
        request = _private_request(sample, num_tokens)
        prefix = []
        for index in range(sample.index):
            block_hash = hash_at(request, index, self._kv.block_size)
            for group in self._kv.groups:
                key = BlockKey(block_hash, group.index)
                block_id = self._kv.pool.lookup(key)
                if block_id is not None and self._sound.get(key) != block_id:
                    tier = self._kv.offload.lookup(key) or DEVICE
                    prefix.append(
                        replace(
                            sample,
                            key=key,
                            index=index,
                            block_id=block_id,
                            tier=tier,
                            is_prefix=True,
                        )
                    )
        self._samples.put(prefix)


def _private_request(sample: LoadSample, num_tokens: int) -> Request:
    return Request.of_nobody("audit", list(sample.token_ids[:num_tokens]), sample.root_hash)
