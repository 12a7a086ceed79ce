"""A log line a minute while there is work: what the tiers moved, and how much prefill that saved.

    last 60 s: 3 requests ended, 4096 prompt tokens, hits device 50.0 % cpu 12.5 %,
        1.9 s of prefill saved, 300 tokens generated; cpu: saved 16 blocks (2.0MiB),
        loaded 4 (0.5MiB), promoted 0, put off 0, lost 0

An idle server says nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.stats import EngineStats
from offload.tier import TierStats

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 60.0
LOST = "put off, then lost"  # the tiers' name for a save whose block went before its turn came


@dataclass(frozen=True, slots=True)
class TierActivity:
    """What one tier did in an interval; `put_off` are the saves that wait at its end."""

    saved_blocks: int
    saved_bytes: int
    loaded_blocks: int
    loaded_bytes: int
    promoted_blocks: int
    put_off: int
    lost: int

    @classmethod
    def between(cls, before: TierStats, after: TierStats) -> TierActivity:
        return cls(
            # What a promotion brought came from below: that is no save.
            (after.saved_blocks - after.promoted_blocks)
            - (before.saved_blocks - before.promoted_blocks),
            after.store_bytes - before.store_bytes,
            after.loaded_blocks - before.loaded_blocks,
            after.load_bytes - before.load_bytes,
            after.promoted_blocks - before.promoted_blocks,
            after.pending_saves,
            after.skipped.get(LOST, 0) - before.skipped.get(LOST, 0),
        )

    @property
    def is_any(self) -> bool:
        """Whether something happened; a save still waiting is no event."""
        return bool(self.saved_blocks or self.loaded_blocks or self.promoted_blocks or self.lost)

    def __str__(self) -> str:
        return (
            f"saved {self.saved_blocks} blocks ({_mebibytes(self.saved_bytes)}),"
            f" loaded {self.loaded_blocks} ({_mebibytes(self.loaded_bytes)}),"
            f" promoted {self.promoted_blocks}, put off {self.put_off}, lost {self.lost}"
        )


@dataclass(frozen=True, slots=True)
class Activity:
    """What the engine did in an interval of `seconds`; tokens unless the name says otherwise."""

    seconds: float
    ended_requests: int
    prompt_tokens: int
    generation_tokens: int
    hit_tokens: dict[str, int]  # by tier, device included
    prefill_seconds_saved: float
    tiers: dict[str, TierActivity]

    @classmethod
    def between(cls, before: EngineStats, after: EngineStats, seconds: float) -> Activity:
        names = ("device", *after.tiers)
        return cls(
            seconds,
            sum(after.finished.values()) - sum(before.finished.values()),
            after.prompt_tokens - before.prompt_tokens,
            after.generation_tokens - before.generation_tokens,
            {n: after.hit_tokens.get(n, 0) - before.hit_tokens.get(n, 0) for n in names},
            after.prefill_seconds_saved - before.prefill_seconds_saved,
            {
                name: TierActivity.between(before.tiers.get(name, TierStats()), tier)
                for name, tier in after.tiers.items()
            },
        )

    @property
    def is_any(self) -> bool:
        return bool(self.ended_requests or self.generation_tokens) or any(
            tier.is_any for tier in self.tiers.values()
        )

    @property
    def hit_rates(self) -> dict[str, float]:
        """Share of the prompt tokens of the requests that ended, by the tier that had them."""
        return {name: n / max(1, self.prompt_tokens) for name, n in self.hit_tokens.items()}

    def __str__(self) -> str:
        hits = " ".join(f"{name} {100 * rate:.1f} %" for name, rate in self.hit_rates.items())
        whole = (
            f"last {self.seconds:.0f} s: {self.ended_requests} requests ended,"
            f" {self.prompt_tokens} prompt tokens, hits {hits},"
            f" {self.prefill_seconds_saved:.1f} s of prefill saved,"
            f" {self.generation_tokens} tokens generated"
        )
        return "; ".join([whole, *(f"{name}: {tier}" for name, tier in self.tiers.items())])

    def fields(self) -> dict[str, object]:
        """The same for a log that is read by machines."""
        return {
            "seconds": round(self.seconds, 3),
            "ended_requests": self.ended_requests,
            "prompt_tokens": self.prompt_tokens,
            "generation_tokens": self.generation_tokens,
            "hit_tokens": self.hit_tokens,
            "hit_rates": {name: round(rate, 4) for name, rate in self.hit_rates.items()},
            "prefill_seconds_saved": round(self.prefill_seconds_saved, 3),
            "tiers": {
                name: {field: getattr(tier, field) for field in TierActivity.__slots__}
                for name, tier in self.tiers.items()
            },
        }


class ActivityLog:
    """Compares two snapshots of the engine and logs what lies between them, if anything."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats
        self._before = stats()
        self._since = time.monotonic()

    def tick(self) -> None:
        """The end of an interval."""
        now, after = time.monotonic(), self._stats()
        activity = Activity.between(self._before, after, now - self._since)
        self._before, self._since = after, now
        if activity.is_any:
            logger.info("%s", activity, extra={"fields": activity.fields()})

    async def run(self, interval: float = INTERVAL_SECONDS) -> None:
        """Ticks until it is cancelled, which loses the interval begun."""
        while True:
            await asyncio.sleep(interval)
            self.tick()


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f}MiB"
