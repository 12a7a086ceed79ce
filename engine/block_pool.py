"""The device's KV blocks: who references each, which hold a known prefix, what goes first.

Every block is in exactly one of three sets:

    referenced   in some live block table (or being loaded); never handed out
    cached       nobody references it, the prefix map knows its content; evicted last
    free         nobody references it, its content means nothing

Cached blocks are warm or cold: a cold one is still found, but nobody is expected to look for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from offload.tier import BlockHash, BlockKey, Forget


class BlockPool:
    """Reference counts, the prefix map and LRU eviction. Owned by the engine loop.

    `on_evict(key)` is called when a cached block's content is about to be given up, `on_reset(key)`
    instead of it when a reset takes it out of the prefix map.
    """

    def __init__(
        self,
        num_blocks: int,
        on_evict: Callable[[BlockKey], None],
        on_reset: Callable[[BlockKey], None] | None = None,
    ) -> None:
        if num_blocks < 1:
            raise ValueError("a block pool needs at least one block")
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._on_reset = on_reset or on_evict
        self.num_registered = 0  # blocks ever entered into the prefix map
        self.num_evicted = 0
        self._ref_counts = [0] * num_blocks
        self._keys: list[BlockKey | None] = [None] * num_blocks
        self._roots: list[BlockHash | None] = [None] * num_blocks  # of the chains of `_keys`
        self._cached: dict[BlockKey, int] = {}
        # Unreferenced blocks, each kind before the next, within a kind the next victim first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._cold: OrderedDict[int, None] = OrderedDict()
        self._warm: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now, evicting cached ones."""
        return len(self._free) + len(self._cold) + len(self._warm)

    @property
    def num_cached(self) -> int:
        """Blocks the prefix map knows, referenced or not."""
        return len(self._cached)

    def lookup(self, key: BlockKey) -> int | None:
        return self._cached.get(key)

    def known(self) -> list[BlockKey]:
        """Every key in the prefix map."""
        return list(self._cached)

    def is_cold(self, block_id: int) -> bool:
        return block_id in self._cold

    def is_unreferenced(self, block_id: int) -> bool:
        return self._ref_counts[block_id] == 0

    def allocate(self) -> int:
        """A private block, referenced once. Raises IndexError when every block is referenced."""
        queue = self._free or self._cold or self._warm
        if not queue:
            raise IndexError("every KV block is referenced")
        block_id, _ = queue.popitem(last=False)
        self.num_evicted += self._forget(block_id, self._on_evict)
        self._ref_counts[block_id] = 1
        return block_id

    def reference(self, block_id: int) -> None:
        if self._ref_counts[block_id] == 0:
            del self._queue_of(block_id)[block_id]
        self._ref_counts[block_id] += 1

    def release(self, block_id: int, *, cold: bool = False) -> None:
        """Drop one reference; released last is evicted last, so release tails first. A cold block
        keeps its place in the prefix map but goes before everything that may be asked for."""
        count = self._ref_counts[block_id]
        if count < 1:
            raise AssertionError(f"KV block {block_id} released more often than referenced")
        self._ref_counts[block_id] = count - 1
        if count == 1:
            if self._keys[block_id] is None:
                self._free[block_id] = None
                self._free.move_to_end(block_id, last=False)  # still in the processor's cache
            else:
                (self._cold if cold else self._warm)[block_id] = None

    def demote(self, block_id: int) -> None:
        """Nobody is expected to look for a cached block any more; nothing if it is referenced."""
        if block_id in self._warm:
            del self._warm[block_id]
            self._cold[block_id] = None

    def _queue_of(self, block_id: int) -> OrderedDict[int, None]:
        for queue in (self._warm, self._cold):
            if block_id in queue:
                return queue
        return self._free

    def register(self, key: BlockKey, block_id: int, root: BlockHash) -> bool:
        """Make a referenced block's content findable; False if the prefix map has the key. `root`
        is that of its chain: by it a whole salt is forgotten."""
        if self._ref_counts[block_id] < 1:
            raise AssertionError(f"KV block {block_id} registered while nobody references it")
        if key in self._cached:
            return False
        self._cached[key] = block_id
        self._keys[block_id] = key
        self._roots[block_id] = root
        self.num_registered += 1
        return True

    def reset(self, where: Forget | None = None) -> int:
        """Empty the prefix map, or take the blocks of `where` out of it; referenced blocks stay
        with their owners. Returns how many keys it lost."""
        gone = [
            block_id
            for key, block_id in self._cached.items()
            if where is None or key in where.keys or self._roots[block_id] in where.roots
        ]
        for block_id in gone:
            self.forget(block_id)
        return len(gone)

    def forget(self, block_id: int) -> bool:
        """Take a block out of the prefix map, whoever references it; False if it is not in it."""
        queue = self._queue_of(block_id) if self._ref_counts[block_id] == 0 else None
        if not self._forget(block_id, self._on_reset):
            return False
        if queue is not None:
            del queue[block_id]
            self._free[block_id] = None
        return True

    def _forget(self, block_id: int, tell: Callable[[BlockKey], None]) -> bool:
        key = self._keys[block_id]
        if key is None:
            return False
        self._keys[block_id] = self._roots[block_id] = None
        del self._cached[key]
        tell(key)
        return True

    def check(self) -> None:
        """Conservation: each block in exactly one set, the map and its inverse agree."""
        for block_id, count in enumerate(self._ref_counts):
            assert count >= 0, f"block {block_id} has {count} references"
            places = sum(block_id in queue for queue in (self._free, self._cold, self._warm))
            assert places == (count == 0), f"block {block_id} misfiled"
            is_free = block_id in self._free
            assert count or is_free == (self._keys[block_id] is None), f"block {block_id} misfiled"
        for key, block_id in self._cached.items():
            assert self._keys[block_id] == key, f"block {block_id} lost its key"
        assert sum(key is not None for key in self._keys) == len(self._cached)

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]
