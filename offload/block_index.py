"""Which blocks a tier holds: states, pins and order of eviction. Planner only; no I/O, no locks.

    ABSENT --begin_save--> SAVING --publish--> PRESENT --begin_evict--> EVICTING --forget--> ABSENT
                              '----forget----> ABSENT  '---forget--> ABSENT  '--restore--> PRESENT

A PRESENT block is not evicted while it is pinned, which is for moments (a copy of it is read), or
kept, which is for as long as somebody wishes. An `Entry` that `forget` or `clear` took out is dead:
nobody keeps it any more, but its holders may still release their pins.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from offload.eviction import EvictionOrder
from offload.tier import TAG_BYTES, BlockHash, BlockKey, BlockState, Entry, Forget, FoundBlock


class BlockIndex:
    """An index in which `order`, empty and made for it, says what goes first."""

    def __init__(self, order: EvictionOrder | None = None) -> None:
        self._order = EvictionOrder() if order is None else order
        self._stored: dict[BlockKey, Entry] = {}  # PRESENT and EVICTING
        self._saving: dict[BlockKey, Entry] = {}
        self._kept: dict[BlockKey, Entry] = {}  # PRESENT, out of the order
        self._groups: set[int] = set()  # in which something was ever saved
        self._num_evicting = 0
        self.num_bytes = 0  # PRESENT and EVICTING: SAVING is charged by its reservation
        self.kept_bytes = 0
        self.num_pins = 0  # on dead entries too
        self._num_pinned = 0  # entries with a pin and not kept, dead ones included

    def __len__(self) -> int:
        return len(self._stored) - self._num_evicting

    @property
    def pinned_blocks(self) -> int:
        """Blocks pinned, kept or both; dead ones with a pin included."""
        return self._num_pinned + len(self._kept)

    @property
    def num_keeps(self) -> int:
        """How often PRESENT blocks are kept."""
        return sum(entry.keeps for entry in self._kept.values())

    def state(self, key: BlockKey) -> BlockState:
        entry = self._stored.get(key)
        if entry is not None:
            return entry.state
        return BlockState.SAVING if key in self._saving else BlockState.ABSENT

    def present(self) -> list[BlockKey]:
        """PRESENT, next to be evicted first, those kept last."""
        return [*(entry.key for entry in self._order), *self._kept]

    def stored(self) -> dict[BlockKey, Entry]:
        """A copy of what is PRESENT or EVICTING: whose bytes the index counts."""
        return self._stored.copy()

    def entries(self) -> Collection[Entry]:
        """PRESENT and EVICTING; a view, to be looked at before anything changes."""
        return self._stored.values()

    def children(self, parent_hash: BlockHash) -> list[BlockKey]:
        """PRESENT blocks whose parent's hash begins like this one."""
        tag = parent_hash[:TAG_BYTES]
        return [
            entry.key
            for entry in self._stored.values()
            if entry.parent_tag == tag and entry.state is BlockState.PRESENT
        ]

    def get(self, key: BlockKey) -> Entry:
        """The PRESENT entry; KeyError otherwise."""
        entry = self._stored[key]
        if entry.state is not BlockState.PRESENT:
            raise KeyError(key)
        return entry

    def find(self, key: BlockKey) -> Entry | None:
        """The PRESENT entry, if there is one. One lookup, so that any thread may ask."""
        entry = self._stored.get(key)
        return entry if entry is not None and entry.state is BlockState.PRESENT else None

    @property
    def busy(self) -> bool:
        """Whether something will change without a new request: a save, an eviction or a pin."""
        return bool(self._saving or self._num_evicting or self.num_pins)

    def owns(self, entry: Entry) -> bool:
        """Whether the entry is still the index's own, not one that a reset took out."""
        holder = self._saving if entry.state is BlockState.SAVING else self._stored
        return holder.get(entry.key) is entry

    def begin_save(self, entry: Entry, parent: BlockHash | None = None) -> None:
        """ABSENT -> SAVING. A block that was evicted lately, or continues a chain that was used
        again, counts as used again itself."""
        if self.state(entry.key) is not BlockState.ABSENT:
            raise ValueError(f"a save of a block that is {self.state(entry.key).value}")
        entry.reused |= self._order.recall(entry.key)
        if parent is not None and not entry.reused:
            # Of any group: one of windows stores only parts of a chain.
            before = (BlockKey(parent, group) for group in self._groups)
            entry.reused = any(self._is_reused(key) for key in before)
        self._groups.add(entry.key.group)
        entry.state = BlockState.SAVING
        self._saving[entry.key] = entry

    def _is_reused(self, key: BlockKey) -> bool:
        entry = self._stored.get(key) or self._saving.get(key)
        return entry is not None and entry.reused

    def publish(self, entry: Entry) -> None:
        """SAVING -> PRESENT, most recently used."""
        del self._saving[entry.key]
        entry.state = BlockState.PRESENT
        self._stored[entry.key] = entry
        self._order.add(entry)
        self.num_bytes += entry.num_bytes

    def adopt(self, found: Iterable[FoundBlock]) -> None:
        """ABSENT -> PRESENT for blocks found stored, oldest first. Those that are not ABSENT stay
        as they are."""
        saving, stored, adopted = self._saving, self._stored, []
        state = BlockState.PRESENT
        # A hundred thousand at startup: keep it flat.
        for key, root_tag, parent_tag, num_bytes, recency in found:
            if key not in stored and key not in saving:
                entry = Entry(key, num_bytes, None, None, recency, 0, state, root_tag, parent_tag)
                stored[key] = entry
                adopted.append(entry)
                self.num_bytes += num_bytes
        self._order.adopt(adopted)

    def evictable(self) -> Iterator[Entry]:
        """PRESENT entries neither pinned nor kept, next to go first."""
        return (entry for entry in self._order if not entry.pins)

    def begin_evict(self, entry: Entry) -> None:
        self._unkeep(entry)
        self._order.evict(entry)
        self._num_evicting += 1
        entry.state = BlockState.EVICTING

    def restore(self, entry: Entry) -> None:
        """EVICTING -> PRESENT: it could not be removed. Next to go again."""
        self._num_evicting -= 1
        entry.state = BlockState.PRESENT
        self._order.restore(entry)

    def forget(self, entry: Entry) -> None:
        """Any state -> ABSENT."""
        if entry.state is BlockState.SAVING:
            del self._saving[entry.key]
        else:
            if entry.state is BlockState.PRESENT:
                self._unkeep(entry)
                self._order.remove(entry)
            else:
                self._num_evicting -= 1
            del self._stored[entry.key]
            self.num_bytes -= entry.num_bytes
        entry.state = BlockState.ABSENT

    def clear(self) -> tuple[list[Entry], list[Entry]]:
        """Everything -> ABSENT; the entries that held a block, and those that were SAVING."""
        held = list(self._stored.values())
        saving = list(self._saving.values())
        for entry in list(self._kept.values()):
            self._unkeep(entry)
        for entry in (*held, *saving):
            entry.state = BlockState.ABSENT
        self._stored.clear()
        self._saving.clear()
        self._order.clear()
        self._num_evicting = 0
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
            for entry in (*self._stored.values(), *self._saving.values())
            if entry.state is not BlockState.EVICTING
            and (where is None or where.matches(entry.key, entry.root_tag))
        ]

    def pin(self, key: BlockKey) -> Entry:
        entry = self.get(key)
        self._num_pinned += not entry.pins and not entry.keeps
        entry.pins += 1
        self.num_pins += 1
        return entry

    def unpin(self, entry: Entry) -> None:
        if not entry.pins:
            raise ValueError("unpin without a pin")
        entry.pins -= 1
        self.num_pins -= 1
        self._num_pinned -= not entry.pins and not entry.keeps

    def keep(self, key: BlockKey, max_bytes: int) -> Entry | None:
        """Take a block out of the order of eviction, until it is let go as often. None if it is
        not PRESENT, or if more than `max_bytes` would be kept."""
        entry = self.find(key)
        if entry is None:
            return None
        if not entry.keeps:
            if self.kept_bytes + entry.num_bytes > max_bytes:
                return None
            self._num_pinned -= bool(entry.pins)
            self._order.remove(entry)
            entry.superseded = False
            self._kept[entry.key] = entry
            self.kept_bytes += entry.num_bytes
        entry.keeps += 1
        return entry

    def let_go(self, entry: Entry) -> None:
        """Undo a `keep`; nothing if the block has been lost since."""
        if entry.keeps > 1:
            entry.keeps -= 1
        else:
            self._unkeep(entry)

    def _unkeep(self, entry: Entry) -> None:
        if entry.keeps:
            entry.keeps = 0
            del self._kept[entry.key]
            self.kept_bytes -= entry.num_bytes
            self._num_pinned += bool(entry.pins)
            self._order.add(entry)

    def touch(self, key: BlockKey, now: float, again: bool = False) -> bool:
        """Most recently used now, `again` if not by the request that stored it; False if the
        block is not PRESENT."""
        entry = self.find(key)
        if entry is None:
            return False
        entry.recency = now
        if entry.keeps:
            entry.reused |= again
        else:
            self._order.use(entry, again)
        return True

    def age(self, key: BlockKey) -> None:
        """Superseded: goes before all others; nothing for a block kept or not PRESENT."""
        entry = self.find(key)
        if entry is not None and not entry.keeps:
            self._order.age(entry)

    def check(self) -> None:
        """AssertionError unless states are disjoint and the sums are right."""
        for key, entry in (*self._stored.items(), *self._saving.items()):
            assert entry.key == key, "an entry under another's key"
        assert all(entry.state is BlockState.SAVING for entry in self._saving.values())
        assert not self._stored.keys() & self._saving.keys(), "a block in two states"
        present = [entry for entry in self._stored.values() if entry.state is BlockState.PRESENT]
        evicting = len(self._stored) - len(present)
        assert evicting == self._num_evicting, "evictions do not add up"
        assert all(
            entry.state is BlockState.EVICTING
            for entry in self._stored.values()
            if entry.state is not BlockState.PRESENT
        ), "a stored block that is neither present nor being evicted"
        stored_bytes = sum(entry.num_bytes for entry in self._stored.values())
        assert self.num_bytes == stored_bytes, "bytes do not add up"
        keys = self.present()
        assert len(keys) == len(present), "a block twice or not at all in the order"
        assert set(keys) == {entry.key for entry in present}, "the order knows another block"
        assert all(bool(entry.keeps) == (entry.key in self._kept) for entry in present), "misfiled"
        kept_bytes = sum(entry.num_bytes for entry in self._kept.values())
        assert self.kept_bytes == kept_bytes, "kept bytes do not add up"
        pinned = sum(1 for entry in present if entry.pins and not entry.keeps)
        assert pinned <= self._num_pinned <= self.num_pins, "pinned blocks do not add up"
