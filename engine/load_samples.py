"""Which loaded blocks will be computed anew to see whether they are what they claim.

Drawn when a load is published, one draw each from one seeded sequence, so that the same loads give
the same sample. What is drawn is remembered until the engine has nothing else to do.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from engine.request import Request
from offload.tier import BlockHash, BlockKey

# Blocks that wait for their audit. More come and go unaudited, and are counted.
MAX_WAITING = 1024


@dataclass(frozen=True, slots=True, eq=False)
class LoadSample:
    """A loaded block with what computing it anew takes."""

    key: BlockKey
    index: int  # in its sequence
    root_hash: BlockHash
    token_ids: Sequence[int]  # at least up to the block's end
    block_id: int  # of the device; another one is no longer what was loaded
    tier: str  # that it was loaded from
    block_size: int  # tokens
    is_prefix: bool = False  # not drawn: a block behind it was found bad


class LoadSamples:
    """The draw, and those drawn, lowest index first: a prefix comes before what depends on it."""

    def __init__(self, fraction: float, seed: int | None, block_size: int) -> None:
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(f"a share of the loads is from 0 to 1, not {fraction}")
        self._fraction = fraction
        self._random = random.Random(seed)
        self._block_size = block_size
        self._waiting: dict[BlockKey, LoadSample] = {}
        self.num_dropped = 0  # drawn, and more than may wait

    def __len__(self) -> int:
        return len(self._waiting)

    def draw(self, request: Request, index: int, key: BlockKey, block_id: int, tier: str) -> None:
        """Block `index` of `request` has been loaded from `tier` and published."""
        if self._random.random() >= self._fraction:
            return
        if len(self._waiting) >= MAX_WAITING:
            self.num_dropped += 1
            return
        end = (index + 1) * self._block_size
        # Prompts do not change: all blocks of one share it.
        in_prompt = end <= request.num_prompt_tokens
        tokens = request.prompt_token_ids if in_prompt else tuple(request.token_ids[:end])
        self.put(
            [LoadSample(key, index, request.root_hash, tokens, block_id, tier, self._block_size)]
        )

    def put(self, samples: Sequence[LoadSample]) -> None:
        """Back, or without a draw; one that waits already is replaced."""
        self._waiting.update((sample.key, sample) for sample in samples)

    def take(self) -> list[LoadSample]:
        """The next blocks to audit: of one position, one per KV group at most."""
        if not self._waiting:
            return []
        first = min(self._waiting.values(), key=lambda sample: sample.index)
        same = [key for key in self._waiting if key.block_hash == first.key.block_hash]
        return [self._waiting.pop(key) for key in same]

    def clear(self) -> None:
        """What waits was forgotten."""
        self._waiting.clear()
