"""What loading from a tier really costs, measured as it happens."""

from __future__ import annotations

_WEIGHT = 0.2  # of a new measurement in the moving averages
_LONG_BURST = 64  # blocks after which a burst is measured though it has not ended


class TransferRate:
    """Moving averages of one load's own time and of a block's share of a burst.

    A burst begins with a load that has no other beside it and ends when none is left; its blocks
    share the tier, so its duration over their number is what one more block adds.
    """

    def __init__(self) -> None:
        self._latency: float | None = None
        self._per_block: float | None = None
        self._num_outstanding = 0
        self._num_in_burst = 0
        self._burst_started = 0.0

    def begin(self, now: float) -> None:
        """A load is asked for."""
        if not self._num_outstanding:
            self._burst_started = now
            self._num_in_burst = 0
        self._num_outstanding += 1

    def end(self, now: float, seconds: float | None) -> None:
        """A load has ended: `seconds` of service of its own, None if it failed."""
        self._num_outstanding -= 1
        if seconds is not None:
            self._num_in_burst += 1
            self._latency = _average(self._latency, seconds)
        over = not self._num_outstanding or self._num_in_burst >= _LONG_BURST
        if over and self._num_in_burst:
            share = (now - self._burst_started) / self._num_in_burst
            self._per_block = _average(self._per_block, share)
            self._burst_started = now
            self._num_in_burst = 0

    def measured(self, seconds: float, num_blocks: int) -> None:
        """A whole burst measured by somebody else."""
        share = seconds / num_blocks
        self._latency = _average(self._latency, share)
        self._per_block = _average(self._per_block, share)

    def estimate(self, num_blocks: int) -> float | None:
        """Seconds to load that many blocks; None while nothing has been measured."""
        if self._latency is None or self._per_block is None:
            return None
        return self._latency + max(0, num_blocks - 1) * self._per_block


def _average(average: float | None, value: float) -> float:
    return value if average is None else average + _WEIGHT * (value - average)
