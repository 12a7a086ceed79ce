"""What something costs by its size, as measured lately on this machine.

Reading the weights dominates a pass over few rows, so one over 32 rows may cost hardly more than
one over a single row, or thirty times as much where every row is computed by itself: only
measuring tells. Medians keep the noise of a shared machine out, and what was measured long ago, or
once, is not believed for long.
"""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass, field
from statistics import median

# Until two sizes were measured: so many rows double the seconds of a pass over one.
_ROWS_THAT_DOUBLE = 150.0
_LEAST_THAT_DOUBLES, _MOST_THAT_DOUBLE = 0.5, 1000.0
_NUM_KEPT = 9  # measurements per size
_ENOUGH = 3
_FRESH = 400  # measurements of any size until those of one that did not occur again are old
_FRESH_OF_FEW = 100  # the same for fewer than `_ENOUGH`
# Upper ends of the sizes told apart; between them a straight line is good enough.
_SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)


@dataclass(slots=True)
class _Measured:
    """Measurements of about the same size."""

    sizes: deque[int] = field(default_factory=lambda: deque(maxlen=_NUM_KEPT))
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_KEPT))
    last_seen: int = 0

    @property
    def is_trusted(self) -> bool:
        return len(self.sizes) >= _ENOUGH


class StepCosts:
    """Seconds by size, of passes by their rows for example; `seconds` interpolates."""

    def __init__(self, first_guess: float = 0.03) -> None:
        """`first_guess` is in seconds, for the smallest size as long as nothing was measured."""
        self._first_guess = first_guess
        self._measured: dict[int, _Measured] = {}
        self._now = 0
        self._points: list[tuple[float, float]] = []  # size, seconds; both ascending
        self._doubling = _ROWS_THAT_DOUBLE  # beyond the points; outlives those it was learnt from

    def observe(self, size: int, seconds: float) -> None:
        """Something of `size` (rows, or drafts in a row) took `seconds`."""
        self._now += 1
        measured = self._measured.setdefault(bisect.bisect_left(_SIZES, size), _Measured())
        measured.sizes.append(size)
        measured.seconds.append(seconds)
        measured.last_seen = self._now
        self._measured = {key: m for key, m in self._measured.items() if self._is_fresh(m)}
        self._points = _ascending(
            [
                (median(m.sizes), median(m.seconds), len(m.sizes))
                for _, m in sorted(self._measured.items())
            ]
        )

        if len(self._points) > 1:
            (low, low_seconds), (high, high_seconds) = self._points[0], self._points[-1]
            per_size = max(1e-12, (high_seconds - low_seconds) / (high - low))
            doubling = max(0.0, low_seconds / per_size - low)
            self._doubling = min(max(doubling, _LEAST_THAT_DOUBLES), _MOST_THAT_DOUBLE)

    def _is_fresh(self, measured: _Measured) -> bool:
        lifetime = _FRESH if measured.is_trusted else _FRESH_OF_FEW
        return self._now - measured.last_seen < lifetime

    def knows_from(self, size: int) -> bool:
        """Whether `size` or less was measured lately, and often enough to compare with."""
        last = bisect.bisect_left(_SIZES, size)
        return any(m.is_trusted for key, m in self._measured.items() if key <= last)

    def seconds(self, size: float) -> float:
        """What something of `size` is expected to take; never falls with the size."""
        points = self._points
        if not points:
            return self._first_guess * self._shape(size)
        index = bisect.bisect_left(points, (size, 0.0))
        if index == 0 or index == len(points):
            nearest, seconds = points[min(index, len(points) - 1)]
            return seconds * self._shape(size) / self._shape(nearest)
        (low, low_seconds), (high, high_seconds) = points[index - 1 : index + 1]
        share = (size - low) / (high - low)
        return low_seconds + share * (high_seconds - low_seconds)

    def _shape(self, size: float) -> float:
        return 1.0 + size / self._doubling


def _ascending(points: list[tuple[float, float, int]]) -> list[tuple[float, float]]:
    """The nearest curve that never falls through (size, seconds, weight): pool adjacent violators.

    More never takes less time: where it seems to, both measurements are noise around one cost.
    """
    pools: list[tuple[list[float], float, float]] = []  # sizes of its points, mean seconds, weight
    for size, seconds, weight in points:
        members, mean, total = [size], seconds, float(weight)
        while pools and pools[-1][1] > mean:
            before, other, other_weight = pools.pop()
            members = before + members
            mean = (mean * total + other * other_weight) / (total + other_weight)
            total += other_weight
        pools.append((members, mean, total))
    return [(size, mean) for members, mean, _ in pools for size in members]
