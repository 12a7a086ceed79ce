"""Which leading blocks of a request are held, and where: the longest usable prefix.

    |-- on the device --|-- held by the device, by loads in flight or by tiers --|-- to compute --|
    0               num_device                                              num_held

A prefix of n blocks is usable when every group holds what `required_blocks` names for it: all of
it for full attention, the last window of it for a sliding one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.block_chain import hash_at
from engine.block_pool import BlockPool
from engine.kv_groups import KVGroup, required_blocks
from engine.kv_loads import KVLoads
from engine.outputs import CachedTokens
from engine.request import Request
from offload.manager import OffloadManager
from offload.tier import BlockKey

DEVICE = "device"
_NEAREST_FIRST = (DEVICE, "cpu", "disk")


@dataclass(frozen=True, slots=True)
class BlockHit:
    """A block that need not be computed. `block_id` is None while no device block holds it."""

    index: int  # in the sequence
    key: BlockKey
    source: str  # nearest tier that holds it
    block_id: int | None


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What is held of a request. Counts are blocks."""

    num_device: int = 0  # usable at once
    num_held: int = 0  # usable when every load has come, at least `num_device`
    num_shared: int = 0  # as far as some group holds the chain: others share it up to there
    device: tuple[BlockHit, ...] = ()  # what computing from `num_device` on reads
    ahead: tuple[BlockHit, ...] = ()  # what computing from `num_held` on reads besides, by index
    sources: tuple[str, ...] = ()  # per block, the tier that its reuse had to wait for


class PrefixMatcher:
    """Looks a request's chain up; no side effects but its hashes."""

    def __init__(
        self,
        groups: Sequence[KVGroup],
        block_size: int,
        pool: BlockPool,
        loads: KVLoads,
        offload: OffloadManager,
    ) -> None:
        self._groups = groups
        self._block_size = block_size
        self._pool = pool
        self._loads = loads
        self._offload = offload

    def match(self, request: Request) -> PrefixHit:
        """The longest held prefix that leaves at least one known token to compute.

        A request that wants its prompt's logprobs matches nothing: they need every position.
        """
        if request.wants_prompt_logprobs and request.num_output_tokens == 0:
            return PrefixHit()
        limit = (request.num_tokens - 1) // self._block_size
        found: dict[tuple[int, int], BlockHit | None] = {}

        def find(group: KVGroup, index: int) -> BlockHit | None:
            place = (group.index, index)
            if place not in found:
                found[place] = self._find(request, group, index)
            return found[place]

        def on_device(group: KVGroup, index: int) -> bool:
            hit = find(group, index)
            return hit is not None and hit.source == DEVICE

        num_shared, num_held = self._longest(limit, lambda g, i: find(g, i) is not None)
        _, num_device = self._longest(num_held, on_device)
        device = self._required(num_device, find)
        taken = {(hit.key.group, hit.index) for hit in device}
        ahead = [
            hit
            for hit in self._required(num_held, find)
            if (hit.key.group, hit.index) not in taken and hit.index >= num_device
        ]
        return PrefixHit(
            num_device=num_device,
            num_held=num_held,
            num_shared=num_shared,
            device=tuple(device),
            ahead=tuple(ahead),
            sources=_sources(num_device, num_held, ahead),
        )

    def _longest(self, limit: int, held: Callable[[KVGroup, int], bool]) -> tuple[int, int]:
        """Blocks up to which every full group holds the chain, and the longest usable prefix."""
        num_blocks = limit
        for group in self._groups:
            if group.window is None:
                missing = (i for i in range(num_blocks) if not held(group, i))
                num_blocks = next(missing, num_blocks)
        num_shared = num_blocks
        while num_blocks:
            # A longer prefix than up to the first missing block would require that block too.
            gap = min(
                (
                    index
                    for group in self._groups
                    if group.window is not None
                    for index in self._blocks(group, num_blocks)
                    if not held(group, index)
                ),
                default=None,
            )
            if gap is None:
                break
            num_blocks = gap
        return num_shared, num_blocks

    def _required(
        self, num_blocks: int, find: Callable[[KVGroup, int], BlockHit | None]
    ) -> list[BlockHit]:
        hits = [
            hit
            for group in self._groups
            for index in self._blocks(group, num_blocks)
            if (hit := find(group, index)) is not None
        ]
        return sorted(hits, key=lambda hit: hit.index)

    def _blocks(self, group: KVGroup, num_blocks: int) -> range:
        return required_blocks(group, num_blocks * self._block_size, self._block_size)

    def _find(self, request: Request, group: KVGroup, index: int) -> BlockHit | None:
        key = BlockKey(hash_at(request, index, self._block_size), group.index)
        block_id = self._pool.lookup(key)
        if block_id is not None:
            return BlockHit(index, key, DEVICE, block_id)
        load = self._loads.find(key)
        if load is not None:
            return BlockHit(index, key, load.tier, load.block_id)
        tier = self._offload.lookup(key)
        return None if tier is None else BlockHit(index, key, tier, None)


def _sources(num_device: int, num_held: int, ahead: Sequence[BlockHit]) -> tuple[str, ...]:
    """A block waits for the farthest tier of its groups. One that no group needs any more came
    with the next that some group does."""
    farthest: dict[int, str] = {}
    for hit in ahead:
        known = farthest.get(hit.index, DEVICE)
        farthest[hit.index] = max(known, hit.source, key=_NEAREST_FIRST.index)
    sources: list[str] = []
    source = DEVICE
    for index in reversed(range(num_device, num_held)):
        source = farthest.get(index, source)
        sources.append(source)
    return (DEVICE,) * num_device + tuple(reversed(sources))


def count_by_tier(sources: Sequence[str], block_size: int) -> CachedTokens:
    """Cached tokens of blocks that came from `sources`."""
    counts = {name: sources.count(name) * block_size for name in _NEAREST_FIRST}
    return CachedTokens(**counts)
