"""Questions about the tiers that change nothing: who holds a block, what lies near one that is
missing, and whether another fingerprint has it.

What an index knows is answered at once. The rest is read on an I/O thread, behind loads and saves,
within `_ANSWER_SECONDS`: a hung disk costs the explanation, not the one who asks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from offload.io_threads import Urgency
from offload.lane import Lane
from offload.tier import BlockHash, BlockKey, BlockMeta, BlockState, MetasUnder

_ANSWER_SECONDS = 5.0
_PATIENCE = 0.002  # seconds between looks

T = TypeVar("T")


class Inquiry:
    """`resident` are the blocks of the device that the tiers were offered. Planner only."""

    def __init__(
        self, lanes: Sequence[Lane], resident: Mapping[BlockKey, tuple[BlockMeta, int]]
    ) -> None:
        self._lanes = lanes
        self._resident = resident

    def holders(self, key: BlockKey) -> list[str]:
        """Names of the tiers that hold the block, nearest first; one that hangs holds nothing."""
        return [lane.tier.name for lane in self._lanes if lane.holds(key)]

    def children(self, parent_hash: BlockHash) -> list[BlockKey]:
        """Blocks that may follow this one or this root, on the device or in a tier. The indexes of
        tiers know the beginning of its hash alone: what `metas` says of them decides."""
        found = {k: None for k, (m, _) in self._resident.items() if m.parent_hash == parent_hash}
        for lane in self._lanes:
            found.update(dict.fromkeys(lane.tier.children(parent_hash)))
        return list(found)

    async def metas(self, keys: Sequence[BlockKey]) -> dict[BlockKey, BlockMeta]:
        """What blocks claim to hold, of those that can tell."""
        known = {key: self._resident[key][0] for key in keys if key in self._resident}
        for lane in self._lanes:
            missing = [key for key in keys if key not in known]
            held = [k for k in missing if lane.tier.state(k) is BlockState.PRESENT]
            if lane.in_memory:
                remembered = ((key, lane.tier.meta(key)) for key in held)
                known.update((key, meta) for key, meta in remembered if meta is not None)
            elif held:
                known.update(await self._read_metas(lane, held))
        return known

    async def _read_metas(self, lane: Lane, keys: Sequence[BlockKey]) -> dict[BlockKey, BlockMeta]:
        def read() -> dict[BlockKey, BlockMeta]:
            metas = ((key, lane.tier.read_meta(key)) for key in keys)
            return {key: meta for key, meta in metas if meta is not None}

        found: dict[BlockKey, BlockMeta] | None = await self._ask(lane, read)
        return found or {}

    async def elsewhere(self, metas_under: MetasUnder) -> dict[int, str]:
        """Which of the blocks other fingerprints hold in the directories we share with them: the
        index into what `metas_under` gives, and the fingerprint (hex) that has it.

        `metas_under` is called on an I/O thread.
        """
        found: dict[int, str] = {}
        for lane in self._lanes:
            if not lane.in_memory:
                question = partial(lane.tier.find_elsewhere, metas_under)
                found = {**(await self._ask(lane, question) or {}), **found}
        return found

    async def _ask(self, lane: Lane, question: Callable[[], T]) -> T | None:
        """The answer of a blocking call; None if it failed or is late. Cancelled or late, the call
        ends by itself and its answer is dropped."""
        job = lane.threads.submit(question, Urgency.UPKEEP, lambda job: None)
        deadline = time.monotonic() + _ANSWER_SECONDS
        try:
            while not job.finished:
                if time.monotonic() > deadline:
                    return None
                await asyncio.sleep(_PATIENCE)
        finally:
            job.cancelled = True
        answer: T | None = job.result if job.error is None else None
        return answer
