"""Which blocks a tier holds: states, pins and recency. Planner only; no I/O, no locks.

    ABSENT --begin_save--> SAVING --publish--> PRESENT --begin_evict--> EVICTING --forget--> ABSENT
                              '----forget----> ABSENT  '---forget--> ABSENT  '--restore--> PRESENT

An `Entry` that `forget` or `clear` took out is dead: its holders may still release their pins.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator

from offload.tier import TAG_BYTES, BlockHash, BlockKey, BlockState, Entry, Forget, FoundBlock


class BlockIndex:
    """LRU index; the first PRESENT entry is the next to go."""

    def __init__(self) -> None:
        self._present: OrderedDict[BlockKey, Entry] = OrderedDict()
        self._saving: dict[BlockKey, Entry] = {}
        self._evicting: dict[BlockKey, Entry] = {}
        # PRESENT and EVICTING again, because a plain dict copies a hundred times faster.
        self._stored: dict[BlockKey, Entry] = {}
        self.num_bytes = 0  # PRESENT and EVICTING: SAVING is charged by its reservation
        self.pinned_blocks = 0  # with at least one pin, dead ones included
        self.num_pins = 0

    def __len__(self) -> int:
        return len(self._present)

    def state(self, key: BlockKey) -> BlockState:
        if key in self._present:
            return BlockState.PRESENT
        if key in self._saving:
            return BlockState.SAVING
        return BlockState.EVICTING if key in self._evicting else BlockState.ABSENT

    def present(self) -> list[BlockKey]:
        """PRESENT, least recently used first."""
        return list(self._present)

    def stored(self) -> dict[BlockKey, Entry]:
        """A copy of what is PRESENT or EVICTING: whose bytes the index counts."""
        return self._stored.copy()

    def entries(self) -> Collection[Entry]:
        """PRESENT and EVICTING; a view, to be looked at before anything changes."""
        return self._stored.values()

    def children(self, parent_hash: BlockHash) -> list[BlockKey]:
        """PRESENT blocks whose parent's hash begins like this one."""
        tag = parent_hash[:TAG_BYTES]
        return [entry.key for entry in self._present.values() if entry.parent_tag == tag]

    def get(self, key: BlockKey) -> Entry:
        """The PRESENT entry; KeyError otherwise."""
        return self._present[key]

    def find(self, key: BlockKey) -> Entry | None:
        """The PRESENT entry, if there is one. One lookup, so that any thread may ask."""
        return self._present.get(key)

    @property
    def busy(self) -> bool:
        """Whether something will change without a new request: a save, an eviction or a pin."""
        return bool(self._saving or self._evicting or self.pinned_blocks)

    def owns(self, entry: Entry) -> bool:
        """Whether the entry is still the index's own, not one that a reset took out."""
        holder = {
            BlockState.PRESENT: self._present,
            BlockState.SAVING: self._saving,
            BlockState.EVICTING: self._evicting,
        }.get(entry.state)
        return holder is not None and holder.get(entry.key) is entry

    def begin_save(self, entry: Entry) -> None:
        if self.state(entry.key) is not BlockState.ABSENT:
            raise ValueError(f"a save of a block that is {self.state(entry.key).value}")
        entry.state = BlockState.SAVING
        self._saving[entry.key] = entry

    def publish(self, entry: Entry) -> None:
        """SAVING -> PRESENT, most recently used."""
        del self._saving[entry.key]
        entry.state = BlockState.PRESENT
        self._present[entry.key] = self._stored[entry.key] = entry
        self.num_bytes += entry.num_bytes

    def adopt(self, found: Iterable[FoundBlock]) -> None:
        """ABSENT -> PRESENT for blocks found stored, oldest first. Those that are not ABSENT stay
        as they are."""
        present, saving, stored = self._present, self._saving, self._stored
        state = BlockState.PRESENT
        # A hundred thousand at startup: keep it flat.
        for key, root_tag, parent_tag, num_bytes, recency in found:
            if key not in stored and key not in saving:
                entry = Entry(key, num_bytes, None, None, recency, 0, state, root_tag, parent_tag)
                present[key] = stored[key] = entry
                self.num_bytes += num_bytes

    def evictable(self) -> Iterator[Entry]:
        """Unpinned PRESENT entries, least recently used first."""
        return (entry for entry in self._present.values() if not entry.pins)

    def begin_evict(self, entry: Entry) -> None:
        del self._present[entry.key]
        entry.state = BlockState.EVICTING
        self._evicting[entry.key] = entry

    def restore(self, entry: Entry) -> None:
        """EVICTING -> PRESENT: it could not be removed. Next to go again."""
        del self._evicting[entry.key]
        entry.state = BlockState.PRESENT
        self._present[entry.key] = entry
        self._present.move_to_end(entry.key, last=False)

    def forget(self, entry: Entry) -> None:
        """Any state -> ABSENT."""
        if entry.state is BlockState.SAVING:
            del self._saving[entry.key]
        else:
            holder = self._present if entry.state is BlockState.PRESENT else self._evicting
            del holder[entry.key], self._stored[entry.key]
            self.num_bytes -= entry.num_bytes
        entry.state = BlockState.ABSENT

    def clear(self) -> tuple[list[Entry], list[Entry]]:
        """Everything -> ABSENT; the entries that held a block, and those that were SAVING."""
        held = [*self._present.values(), *self._evicting.values()]
        saving = list(self._saving.values())
        for entry in (*held, *saving):
            entry.state = BlockState.ABSENT
        self._present.clear()
        self._saving.clear()
        self._evicting.clear()
        self._stored.clear()
        self.num_bytes = 0
        return held, saving

    def drop(self, where: Forget) -> tuple[list[Entry], list[Entry]]:
        """The same for some chains only."""

        def some(entries: Iterable[Entry]) -> list[Entry]:
            return [entry for entry in entries if where.matches(entry.key, entry.root_tag)]

        held, saving = some(self._stored.values()), some(self._saving.values())
        for entry in (*held, *saving):
            self.forget(entry)
        return held, saving

    def held(self, where: Forget | None) -> list[BlockKey]:
        """PRESENT and SAVING, all or some chains' only."""
        return [
            entry.key
            for entry in (*self._present.values(), *self._saving.values())
            if where is None or where.matches(entry.key, entry.root_tag)
        ]

    def pin(self, key: BlockKey) -> Entry:
        entry = self._present[key]
        entry.pins += 1
        self.num_pins += 1
        self.pinned_blocks += entry.pins == 1
        return entry

    def unpin(self, entry: Entry) -> None:
        if not entry.pins:
            raise ValueError("unpin without a pin")
        entry.pins -= 1
        self.num_pins -= 1
        self.pinned_blocks -= entry.pins == 0

    def touch(self, key: BlockKey, now: float) -> bool:
        """Most recently used now; False if the block is not PRESENT."""
        entry = self._present.get(key)
        if entry is None:
            return False
        entry.recency = now
        self._present.move_to_end(key)
        return True

    def check(self) -> None:
        """AssertionError unless states are disjoint and the sums are right."""
        for holder, state in (
            (self._present, BlockState.PRESENT),
            (self._saving, BlockState.SAVING),
            (self._evicting, BlockState.EVICTING),
        ):
            for key, entry in holder.items():
                assert entry.key == key, "an entry under another's key"
                assert entry.state is state, f"a block {entry.state.value} among the {state.value}"
        held = [*self._present.values(), *self._evicting.values()]
        assert self.num_bytes == sum(entry.num_bytes for entry in held), "bytes do not add up"
        assert self._stored == {**self._present, **self._evicting}, "a block counted nowhere"
        assert len(self._stored) == len(held), "a block in two states"
        assert not self._stored.keys() & self._saving.keys(), "a block in two states"
