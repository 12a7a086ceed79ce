"""Whether loading stored blocks pays: measured load cost against measured prefill speed.

    |-- on the device --|-- recomputed --|-- loaded meanwhile --|
    0               num_device         start                num_held

`start` at `num_device` loads everything, at `num_held` nothing. In between both go on at once: the
tiers fill the back while the passes fill the front, and what takes longer decides.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from engine.config import LoadPolicy
from engine.prefix_match import DEVICE, BlockHit, PrefixHit
from offload.manager import OffloadManager

# A load is skipped only where it costs this much more than recomputing: both figures are noisy,
# and a skipped load keeps the estimate from ever being corrected.
SKIP_FACTOR = 1.1
# A mix costs passes that the others wait for, so it has to win clearly against loading alone.
MIX_FACTOR = 0.7
# Passes with fewer rows of prompts than this tell about overhead, not about prefill speed.
MIN_MEASURED_ROWS = 64
EWMA_WEIGHT = 0.3


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """`start`: first block to load. `patience`: seconds of waiting for loads alone after which
    computing what is missing would have been cheaper."""

    start: int
    patience: float = math.inf


class LoadChooser:
    """Plans loads; what is unmeasured counts as cheap."""

    def __init__(self, policy: LoadPolicy, block_size: int, offload: OffloadManager) -> None:
        self._policy = policy
        self._block_size = block_size
        self._offload = offload
        self._prefill_tokens_per_second: float | None = None

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """Rows of prompts per second of passes under the load of late; None while unmeasured."""
        return self._prefill_tokens_per_second

    def prefill_seconds(self, num_tokens: int) -> float:
        """What computing them would take at the measured speed; 0 while it is unmeasured."""
        speed = self._prefill_tokens_per_second
        return 0.0 if speed is None else num_tokens / speed

    def observe_pass(self, num_prompt_rows: int, seconds: float) -> None:
        """A pass computed so many rows of prompts, whatever else it carried."""
        if num_prompt_rows < MIN_MEASURED_ROWS or seconds <= 0.0:
            return
        speed, known = num_prompt_rows / seconds, self._prefill_tokens_per_second
        self._prefill_tokens_per_second = (
            speed if known is None else known + EWMA_WEIGHT * (speed - known)
        )

    def plan(self, hit: PrefixHit, num_competing: int) -> LoadPlan:
        """How to use a hit while `num_competing` other prompts are being computed."""
        loads = [block for block in hit.ahead if block.source != DEVICE]
        if self._policy == "always" or not loads:
            return LoadPlan(hit.num_device)
        if self._policy == "never":
            return LoadPlan(hit.num_held)
        if self._prefill_tokens_per_second is None:
            return LoadPlan(hit.num_device)
        per_block = self._block_size * (1 + num_competing) / self._prefill_tokens_per_second
        recompute_all = per_block * (hit.num_held - hit.num_device)
        load_all = self._load_seconds(loads)
        start, cost = self._best_mix(hit, loads, per_block)
        if load_all > SKIP_FACTOR * recompute_all:
            if cost * SKIP_FACTOR >= recompute_all:
                return LoadPlan(hit.num_held)
        elif cost > MIX_FACTOR * load_all:
            start = hit.num_device
        return LoadPlan(start, per_block * (hit.num_held - start))

    def _best_mix(
        self, hit: PrefixHit, loads: Sequence[BlockHit], per_block: float
    ) -> tuple[int, float]:
        """Where loading should begin, and what both sides then cost: recomputing grows with
        `start` and loading shrinks, so the best is where they cross."""
        low, high = hit.num_device, hit.num_held
        while low < high:
            middle = (low + high) // 2
            rest = self._load_seconds([block for block in loads if block.index >= middle])
            if per_block * (middle - hit.num_device) < rest:
                low = middle + 1
            else:
                high = middle
        rest = self._load_seconds([block for block in loads if block.index >= low])
        return low, max(per_block * (low - hit.num_device), rest)

    def _load_seconds(self, loads: Sequence[BlockHit]) -> float:
        """Tiers are read one after the other at worst."""
        by_tier = Counter(block.source for block in loads)
        return sum(
            self._offload.estimated_load_seconds(tier, num_blocks) or 0.0
            for tier, num_blocks in by_tier.items()
        )
