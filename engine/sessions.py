"""Conversations: which blocks the last turn under a `prompt_cache_key` left behind.

    turn k        |-- prompt ---|-- answer --|          recorded when it ends
    turn k + 1    |-- common --|-- new prompt ...       the rest of turn k is superseded

A key lives in the space of a salt (a chain's root), so that no tenant meets another's. The record
of a conversation is the chain of its last turn, and aside the blocks of branches that it left, so
that a reset by key finds those, too. Keys group, they never enter a block's hash.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from offload.side_store import SideStore
from offload.tier import BlockHash

TABLE = "sessions"
# Blocks of superseded branches that a conversation remembers, the latest of them.
MAX_ASIDE_BLOCKS = 4096
HASH_BYTES = 32


@dataclass(frozen=True, slots=True)
class Session:
    """Block hashes: of the last turn, root first, and of branches that it left, oldest first."""

    chain: tuple[BlockHash, ...] = ()
    aside: tuple[BlockHash, ...] = ()

    @property
    def blocks(self) -> list[BlockHash]:
        return [*self.chain, *self.aside]


class Sessions:
    """All conversations, bounded by the store they are kept in. Engine loop only."""

    def __init__(self, store: SideStore) -> None:
        self._store = store

    def get(self, space: BlockHash, key: str) -> Session:
        """Empty for a key that is not known."""
        value = self._store.get(TABLE, space, _name(key))
        return Session() if value is None else _decode(value)

    def superseded(
        self, space: BlockHash, key: str, prompt: Sequence[BlockHash]
    ) -> tuple[BlockHash, ...]:
        """What a new turn with these prompt blocks leaves behind of the last one."""
        chain = self.get(space, key).chain
        return chain[num_common(chain, prompt) :]

    def record(self, space: BlockHash, key: str, chain: Sequence[BlockHash]) -> None:
        """A turn has ended and left these blocks. One that got no further than its beginning
        changes nothing: the longer chain is still what the next turn may continue."""
        old = self.get(space, key)
        if len(chain) == num_common(chain, old.chain):
            return
        left = old.chain[num_common(old.chain, chain) :]
        current = set(chain)
        aside = dict.fromkeys(block for block in (*old.aside, *left) if block not in current)
        self.put(space, key, Session(tuple(chain), tuple(aside)[-MAX_ASIDE_BLOCKS:]))

    def foresee(self, space: BlockHash, key: str, chain: Sequence[BlockHash]) -> None:
        """These blocks were computed ahead of a turn that nobody has asked for yet. Where they do
        not go on from the last turn they are aside: that turn's own stay what comes next."""
        old = self.get(space, key)
        common = num_common(chain, old.chain)
        if common == len(old.chain):
            self.record(space, key, chain)
        elif common < len(chain):
            aside = dict.fromkeys((*old.aside, *chain[common:]))
            self.put(space, key, Session(old.chain, tuple(aside)[-MAX_ASIDE_BLOCKS:]))

    def put(self, space: BlockHash, key: str, session: Session) -> None:
        """Replace what is known."""
        self._store.put(TABLE, space, _name(key), _encode(session))

    def forget(self, space: BlockHash, key: str) -> None:
        self._store.delete(TABLE, space, _name(key))

    def export(self, space: BlockHash) -> list[tuple[bytes, bytes]]:
        """All records of a space, for `restore` after the store has forgotten it."""
        return self._store.items(TABLE, space)

    def restore(self, space: BlockHash, records: Iterable[tuple[bytes, bytes]]) -> None:
        for name, value in records:
            self._store.put(TABLE, space, name, value)


def num_common(one: Sequence[object], other: Sequence[object]) -> int:
    """Length of the common prefix."""
    count = 0
    for ours, theirs in zip(one, other, strict=False):
        if ours != theirs:
            break
        count += 1
    return count


def _name(key: str) -> bytes:
    """Of fixed size, whatever a client chooses as its key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _encode(session: Session) -> bytes:
    return struct.pack("<I", len(session.chain)) + b"".join(session.blocks)


def _decode(value: bytes) -> Session:
    """Empty for a record that is not ours: it costs an ageing or a pin, never an answer."""
    if len(value) % HASH_BYTES != 4:
        return Session()
    (num_chain,) = struct.unpack_from("<I", value)
    blocks = tuple(_split(value[4:]))
    return Session(blocks[:num_chain], blocks[num_chain:])


def _split(value: bytes) -> Iterable[BlockHash]:
    for start in range(0, len(value), HASH_BYTES):
        yield BlockHash(value[start : start + HASH_BYTES])
