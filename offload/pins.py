"""Pins with a name and an end: chains that no tier may evict for a while.

A pin never takes more than PIN_SHARE of a tier, all pins together. It covers what a tier holds when
it is set, lapses by itself, and protects from eviction only: what a reset drops or a verification
finds bad is gone, and stored again later it is a block like any other. Nothing of it is written
down, so no pin survives a restart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from offload.lane import Lane
from offload.tier import BlockKey, BlockState, Entry


@dataclass(frozen=True, slots=True)
class Pin:
    """What one name keeps, root first."""

    until: float  # seconds since the epoch
    kept: list[tuple[Lane, Entry]]


class PinTable:
    """All pins of all tiers. Planner only."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = lanes
        self._pins: dict[str, Pin] = {}
        self._next_end = math.inf  # no pin ends before

    def pin(self, name: str, keys: Sequence[BlockKey], until: float) -> tuple[int, int]:
        """Keep what the tiers hold of a chain, root first, as far as there is room for pins; in
        place of what the name kept before. Blocks, and their bytes in all tiers together."""
        self.unpin(name)
        kept: list[tuple[Lane, Entry]] = []
        lanes = list(self._lanes)
        for key in keys:
            for lane in list(lanes):
                if lane.tier.state(key) is BlockState.PRESENT:
                    entry = lane.tier.keep(key)
                    if entry is None:
                        lanes.remove(lane)  # full: what lies behind is worth less
                    else:
                        kept.append((lane, entry))
        if kept:
            self._pins[name] = Pin(until, kept)
            self._next_end = min(self._next_end, until)
        return _size(kept)

    def unpin(self, name: str) -> tuple[int, int]:
        """Let go what a name keeps: blocks and bytes that it still kept."""
        pin = self._pins.pop(name, None)
        if pin is None:
            return 0, 0
        kept = [(lane, entry) for lane, entry in pin.kept if entry.keeps]
        for lane, entry in reversed(kept):  # let go last is evicted last
            lane.tier.let_go(entry)
        return _size(kept)

    def lapse(self, now: float) -> None:
        """Let go what should not be kept longer; `now` in seconds since the epoch."""
        if now < self._next_end:
            return
        for name in [name for name, pin in self._pins.items() if pin.until <= now]:
            self.unpin(name)
        self._next_end = min((pin.until for pin in self._pins.values()), default=math.inf)

    def num_keeps(self, lane: Lane) -> int:
        """How often the pins keep a block that the tier still has."""
        return sum(
            1
            for pin in self._pins.values()
            for holder, entry in pin.kept
            if holder is lane and entry.keeps
        )


def _size(kept: Sequence[tuple[Lane, Entry]]) -> tuple[int, int]:
    return len({entry.key for _, entry in kept}), sum(entry.num_bytes for _, entry in kept)
