"""What a decoding pass costs by its number of rows, as measured lately on this machine.

Reading the weights dominates a pass over few rows, so one over 32 rows may cost hardly more than
one over a single row, or thirty times as much where every row is computed by itself: only
measuring tells. Medians keep the noise of a shared machine out.
"""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass, field
from statistics import median

# Until something is measured: so many rows double the seconds of a pass over one.
_ROWS_THAT_DOUBLE = 150.0
_FIRST_GUESS = 0.03  # seconds of a pass over one row
_NUM_KEPT = 9  # measurements per size
_ENOUGH = 3
_LIFETIME = 2000  # passes after which a size that did not occur again is forgotten
# Upper ends of the sizes told apart, in rows; between them a straight line is good enough.
_SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)


@dataclass(slots=True)
class _Size:
    """Measurements of passes of about the same number of rows."""

    rows: deque[int] = field(default_factory=lambda: deque(maxlen=_NUM_KEPT))
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_KEPT))
    last_seen: int = 0


class StepCosts:
    """Measured seconds per pass; `seconds` interpolates."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        self._num_passes = 0
        self._points: list[tuple[float, float]] = []  # rows, seconds; both ascending

    def observe(self, num_rows: int, seconds: float) -> None:
        """A pass over `num_rows` rows, each of which drew a token or verified a draft."""
        self._num_passes += 1
        size = self._sizes.setdefault(bisect.bisect_left(_SIZES, num_rows), _Size())
        size.rows.append(num_rows)
        size.seconds.append(seconds)
        size.last_seen = self._num_passes
        oldest = self._num_passes - _LIFETIME
        self._sizes = {key: kept for key, kept in self._sizes.items() if kept.last_seen > oldest}
        self._points = _ascending(
            [
                (median(size.rows), median(size.seconds), len(size.rows))
                for _, size in sorted(self._sizes.items())
            ]
        )

    def knows_from(self, num_rows: int) -> bool:
        """Whether passes of `num_rows` rows or fewer were measured often enough to compare with."""
        last = bisect.bisect_left(_SIZES, num_rows)
        measured = (len(size.rows) for key, size in self._sizes.items() if key <= last)
        return any(count >= _ENOUGH for count in measured)

    def seconds(self, num_rows: float) -> float:
        """What a pass over `num_rows` rows is expected to take; never falls with the rows."""
        points = self._points
        if not points:
            return _FIRST_GUESS * _shape(num_rows)
        index = bisect.bisect_left(points, (num_rows, 0.0))
        if index == 0 or index == len(points):
            rows, seconds = points[min(index, len(points) - 1)]
            return seconds * _shape(num_rows) / _shape(rows)
        (low, low_seconds), (high, high_seconds) = points[index - 1 : index + 1]
        share = (num_rows - low) / (high - low)
        return low_seconds + share * (high_seconds - low_seconds)


def _shape(num_rows: float) -> float:
    return 1.0 + num_rows / _ROWS_THAT_DOUBLE


def _ascending(points: list[tuple[float, float, int]]) -> list[tuple[float, float]]:
    """The nearest curve that never falls through (rows, seconds, weight): pool adjacent violators.

    More rows never take less time: where they seem to, both measurements are noise around one cost.
    """
    pools: list[tuple[list[float], float, float]] = []  # rows of its points, mean seconds, weight
    for rows, seconds, weight in points:
        members, mean, total = [rows], seconds, float(weight)
        while pools and pools[-1][1] > mean:
            before, other, other_weight = pools.pop()
            members = before + members
            mean = (mean * total + other * other_weight) / (total + other_weight)
            total += other_weight
        pools.append((members, mean, total))
    return [(rows, mean) for members, mean, _ in pools for rows in members]
