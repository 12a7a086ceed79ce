"""The order in which a tier's blocks go: an adaptive replacement cache (ARC) that knows chains.

    superseded   a branch that its conversation has left: these go first
    once         stored, and no later request has asked for them; least recently used first
    again        a later request has; least recently used first
    ghosts       keys of blocks evicted lately, one list for each of the two

`once` gives up blocks while it is longer than a target, `again` below it. A block that comes back
while its ghost is remembered says which list was too short, and moves the target (Megiddo and
Modha, FAST 2003). So long prompts that nobody repeats push out each other, not the chats, and where
nothing of the kind happens the order is that of plain recency.

Two rules differ from the paper, because blocks form chains. A touch says only how recent a block
is: its own request touches all that it stored. It counts as use *again* when a later request finds
it. And what continues a chain that was used again belongs to it from the start: the newest turn of
a chat is asked for next, though nobody has yet.

After a restart everything is in `once`, by recency: nothing else is recorded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from offload.tier import BlockKey, Entry


class EvictionOrder:
    """Unpinned PRESENT blocks of one tier, the next to go first. Planner only.

    Iterating gives the order in which they would go if nothing else happened.
    """

    def __init__(self) -> None:
        self._superseded: OrderedDict[BlockKey, Entry] = OrderedDict()
        self._once: OrderedDict[BlockKey, Entry] = OrderedDict()
        self._again: OrderedDict[BlockKey, Entry] = OrderedDict()
        self._once_ghosts: OrderedDict[BlockKey, None] = OrderedDict()
        self._again_ghosts: OrderedDict[BlockKey, None] = OrderedDict()
        self._target = 0.0  # blocks that `once` may keep

    def __len__(self) -> int:
        return len(self._superseded) + len(self._once) + len(self._again)

    def __iter__(self) -> Iterator[Entry]:
        yield from self._superseded.values()
        once, again = iter(self._once.values()), iter(self._again.values())
        num_once, num_again = len(self._once), len(self._again)
        while num_once or num_again:
            if num_once and (num_once > self._target or not num_again):
                num_once -= 1
                yield next(once)
            else:
                num_again -= 1
                yield next(again)

    def recall(self, key: BlockKey) -> bool:
        """Whether the block about to be stored was evicted lately; the target learns from it."""
        if key in self._once_ghosts:
            weight = len(self._again_ghosts) / len(self._once_ghosts)
            self._target = min(float(len(self)), self._target + max(1.0, weight))
            del self._once_ghosts[key]
            return True
        if key in self._again_ghosts:
            weight = len(self._once_ghosts) / len(self._again_ghosts)
            self._target = max(0.0, self._target - max(1.0, weight))
            del self._again_ghosts[key]
            return True
        return False

    def add(self, entry: Entry) -> None:
        """A block is there, most recently used."""
        self._list(entry)[entry.key] = entry

    def adopt(self, entries: Iterable[Entry]) -> None:
        """Blocks found stored, least recently used first."""
        once = self._once
        for entry in entries:
            once[entry.key] = entry

    def use(self, entry: Entry, again: bool) -> None:
        """Most recently used now; `again` if by another request than the one that stored it."""
        if not entry.superseded and entry.reused >= again:
            self._list(entry).move_to_end(entry.key)
            return
        self.remove(entry)
        entry.superseded = False
        entry.reused = entry.reused or again
        self.add(entry)

    def age(self, entry: Entry) -> None:
        """Superseded: goes before all that are not."""
        self.remove(entry)
        entry.superseded = True
        self.add(entry)

    def remove(self, entry: Entry) -> None:
        """Not to be evicted any more: gone, or kept."""
        del self._list(entry)[entry.key]

    def evict(self, entry: Entry) -> None:
        """Gone for want of room, and remembered: it may be asked for yet."""
        capacity = len(self)
        self.remove(entry)
        if entry.superseded:
            return
        ghosts = self._again_ghosts if entry.reused else self._once_ghosts
        ghosts[entry.key] = None
        while self._once_ghosts and len(self._once) + len(self._once_ghosts) > capacity:
            self._once_ghosts.popitem(last=False)
        while len(self._once_ghosts) + len(self._again_ghosts) > capacity:
            (self._again_ghosts or self._once_ghosts).popitem(last=False)

    def restore(self, entry: Entry) -> None:
        """It could not be removed: there again, and next to go."""
        ghosts = self._again_ghosts if entry.reused else self._once_ghosts
        ghosts.pop(entry.key, None)
        self.add(entry)
        self._list(entry).move_to_end(entry.key, last=False)

    def clear(self) -> None:
        """Nothing is stored, and nothing is remembered."""
        self._superseded.clear()
        self._once.clear()
        self._again.clear()
        self._once_ghosts.clear()
        self._again_ghosts.clear()
        self._target = 0.0

    def _list(self, entry: Entry) -> OrderedDict[BlockKey, Entry]:
        if entry.superseded:
            return self._superseded
        return self._again if entry.reused else self._once
