"""Whether loading stored blocks pays: measured load cost against measured prefill speed."""

from __future__ import annotations

from collections import Counter

from engine.config import LoadPolicy
from engine.kv_cache_manager import DEVICE, BlockHit
from engine.request import Request
from offload.manager import OffloadManager

# A load is skipped only where it costs this much more than recomputing: both figures are noisy,
# and a skipped load keeps the estimate from ever being corrected.
SKIP_FACTOR = 1.1
# Passes shorter than this tell about overhead, not about prefill speed.
MIN_MEASURED_ROWS = 64
EWMA_WEIGHT = 0.3


class LoadChooser:
    """`choose(request, hits)`: how many leading hits to use. Unmeasured counts as cheap."""

    def __init__(self, policy: LoadPolicy, block_size: int, offload: OffloadManager) -> None:
        self._policy = policy
        self._block_size = block_size
        self._offload = offload
        self._prefill_tokens_per_second: float | None = None

    def prefill_seconds(self, num_tokens: int) -> float:
        """What computing them would take at the measured speed; 0 while it is unmeasured."""
        speed = self._prefill_tokens_per_second
        return 0.0 if speed is None else num_tokens / speed

    def observe_pass(self, num_rows: int, seconds: float) -> None:
        if num_rows < MIN_MEASURED_ROWS or seconds <= 0.0:
            return
        speed, known = num_rows / seconds, self._prefill_tokens_per_second
        self._prefill_tokens_per_second = (
            speed if known is None else known + EWMA_WEIGHT * (speed - known)
        )

    def choose(self, request: Request, hits: list[BlockHit]) -> int:
        """The hit is cut at its first block that is not on the device, or not at all."""
        on_device = next((i for i, hit in enumerate(hits) if hit.source != DEVICE), len(hits))
        if self._policy == "always" or on_device == len(hits):
            return len(hits)
        if self._policy == "never" or self._costs_more(hits[on_device:]):
            return on_device
        return len(hits)

    def _costs_more(self, hits: list[BlockHit]) -> bool:
        if self._prefill_tokens_per_second is None:
            return False
        blocks_by_tier = Counter(hit.source for hit in hits if hit.source != DEVICE)
        load_seconds = 0.0
        for tier, num_blocks in blocks_by_tier.items():
            load_seconds += self._offload.estimated_load_seconds(tier, num_blocks) or 0.0
        recompute_seconds = len(hits) * self._block_size / self._prefill_tokens_per_second
        return load_seconds > SKIP_FACTOR * recompute_seconds
