"""What became of blocks that a tier does not hold any more, and when. Bounded, and only in memory:
a restart knows nothing of before."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass

from offload.tier import BlockKey, Entry

EVICTED = "evicted"
EXPIRED = "expired"
RESET = "reset"
FAILED_VERIFICATION = "failed verification"
SAVE_FAILED = "save failed"
LOST = "lost"  # its save was put off too long, or its file vanished or cannot be read
SUPERSEDED = "superseded"  # evicted, because its conversation had left that branch

_MAX_FATES = 65_536


@dataclass(frozen=True, slots=True)
class Fate:
    """The last that is known of a block in one tier."""

    tier: str
    what: str  # one of the words above
    when: float  # seconds since the epoch


class History:
    """The latest fate of a block in each tier, for so many of them; the oldest is forgotten first.

    Planner only. A note is one change of a dict, for there is one for every block evicted.
    """

    def __init__(self, max_fates: int = _MAX_FATES) -> None:
        self._max_fates = max_fates
        self._fates: OrderedDict[tuple[BlockKey, str], tuple[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._fates)

    def note(self, key: BlockKey, tier: str, what: str) -> None:
        fates = self._fates
        fates[key, tier] = what, time.time()
        fates.move_to_end((key, tier))
        if len(fates) > self._max_fates:
            fates.popitem(last=False)

    def fate(self, key: BlockKey, tiers: list[str]) -> list[Fate]:
        """What is known of a block in these tiers, the latest first."""
        found = [(tier, self._fates.get((key, tier))) for tier in tiers]
        fates = [Fate(tier, *noted) for tier, noted in found if noted is not None]
        return sorted(fates, key=lambda fate: fate.when, reverse=True)


def eviction(entry: Entry) -> str:
    """How to call it that this block is evicted."""
    return SUPERSEDED if entry.superseded else EVICTED


def unheard(key: BlockKey, what: str) -> None:
    """For a tier that nobody watches."""
