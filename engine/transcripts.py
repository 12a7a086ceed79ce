"""What conversations were really made of: from their text to the token ids that were generated.

A chat client sends text back. Tokenised again it departs from the ids that were generated, sooner
or later, and every KV block behind that point is missed. So each prompt is remembered with what
followed it, under its spelling (see `engine.spelling`):

    (length, hash) of a prompt's spelling  ->  its ids, and the ids of each answer to it

    new prompt   |--- stored prompt ---|-- one of its answers --|-- tokenised now --|

An entry holds the ids since the entry that it goes on from, so that a conversation costs its length
once, not once a turn. Nothing is taken on trust: the ids must spell the text that they stand for,
else the entry is dropped and the text tokenised as ever. Spaces (a salt each) share nothing.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from engine.spelling import Speller
from offload.side_store import SideStore

if TYPE_CHECKING:
    from engine.tokenizer import Tokenizer

TABLE = "transcripts"
MAX_ANSWERS = 128  # kept for one prompt, the newest
_TAIL_BYTES = 3
_KEY = struct.Struct(f"<I{_TAIL_BYTES}s16s")  # length, last bytes, hash of a spelling
_MAX_DEPTH = 10_000  # turns
_FEW_TAILS = 32  # so many are each looked for in a spelling; more, and each of its positions is


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt as it was tokenised: what `record` needs once it has been answered.

    |------------ num_inherited -----------|------ own ------|
    ids of the entry it goes on from, whole
    """

    space: bytes
    key: bytes
    token_ids: Sequence[int]
    parent: bytes  # key of that entry; b"" for none
    num_inherited: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Reading:
    """A prompt's ids; `num_known` of them were not made by the tokenizer just now."""

    token_ids: list[int]
    num_known: int = 0
    turn: Turn | None = None  # None: not to be recorded


@dataclass(slots=True)
class TranscriptStats:
    """Counters of lookups and gauges of what is held."""

    hits: int = 0
    misses: int = 0
    reused_tokens: int = 0
    dropped: int = 0  # entries whose ids did not spell their text
    entries: int = 0
    bytes: int = 0
    pending: int = 0  # records on their way to the file


class _Match(NamedTuple):
    """Where a new prompt's known part ends."""

    key: bytes
    token_ids: list[int]
    num_prompt_ids: int
    end: int


@dataclass(slots=True)
class _Entry:
    """One stored prompt: ids since its parent's, and the answers to it."""

    parent: bytes
    own_ids: tuple[int, ...]
    answers: list[tuple[int, ...]] = field(default_factory=list)


class Transcripts:
    """The map of one model, in a side store. Any thread may call it; locks are held briefly."""

    def __init__(
        self, tokenizer: Tokenizer, store: SideStore, *, vocab_size: int, enabled: bool = True
    ) -> None:
        """`vocab_size` is the model's. Not `enabled`, the map reads as the tokenizer does and
        records nothing, but still forgets."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._store = store
        self._enabled = enabled
        self._speller = Speller(tokenizer)
        self._code = _Code(vocab_size)
        self._lock = threading.Lock()
        self._epoch = 0
        self._stats = TranscriptStats()
        self._index = _Index()  # changed under the lock
        # What made way in the store, and may still be listed above: the store tells it from inside
        # its own lock.
        self._evicted: deque[tuple[bytes, bytes]] = deque()
        store.on_evicted(TABLE, lambda space, key: self._evicted.append((space, key)))
        for space in store.spaces(TABLE):
            for key, _ in store.items(TABLE, space):
                self._index.add(space, key)

    # --- prompts ----------------------------------------------------------------------------

    def encode(self, space: bytes, marked: str) -> Reading:
        """Ids of a conversation rendered by `Tokenizer.render_marked`, known ones where they are
        known. Counted as a lookup."""
        reading = self.read(space, marked)
        if self._enabled:
            with self._lock:
                self._stats.hits += reading.num_known > 0
                self._stats.misses += reading.num_known == 0
                self._stats.reused_tokens += reading.num_known
        return reading

    def read(self, space: bytes, marked: str) -> Reading:
        """The same, not counted."""
        if not self._enabled:
            return Reading(self._tokenizer.encode_marked(marked))
        epoch = self._epoch
        spelling = self._speller.of_text(marked)
        match = self._find(space, spelling)
        if match is None:
            token_ids = self._tokenizer.encode_marked(marked)
            parent, num_inherited, num_known = b"", 0, 0
        else:
            num_known = len(match.token_ids)
            rest = self._speller.encode(spelling[match.end :], match.token_ids[-1])
            token_ids = match.token_ids + rest
            parent, num_inherited = match.key, match.num_prompt_ids
        if not token_ids or self._speller.of_ids(token_ids) != spelling:
            # Not to be kept: nobody could prove later what these ids stand for. Nor to be used, if
            # any were remembered: then the text is tokenised as ever.
            return Reading(token_ids if match is None else self._tokenizer.encode_marked(marked))
        key = _key_of(spelling)
        if key == parent:  # the same prompt again
            parent, num_inherited = b"", 0
        turn = Turn(space, key, token_ids, parent, num_inherited, epoch)
        return Reading(token_ids, num_known, turn)

    def _find(self, space: bytes, spelling: bytes) -> _Match | None:
        """The longest stored prompt that `spelling` begins with, and its best answer."""
        for key in reversed(self._candidates(space, spelling)):
            (length, _, _) = _KEY.unpack(key)
            known = self._resolve(space, key)
            if known is None:
                continue
            prompt_ids, answers = known
            end, token_ids = length, prompt_ids
            for answer in answers:
                count, answer_end = self._speller.match(answer, spelling, length, prompt_ids[-1])
                if answer_end > end:
                    end, token_ids = answer_end, [*prompt_ids, *answer[:count]]
            in_vocabulary = max(token_ids) < self._vocab_size
            if in_vocabulary and self._speller.of_ids(token_ids) == spelling[:end]:
                return _Match(key, token_ids, len(prompt_ids), end)
            self._drop(space, key)
        return None

    def _candidates(self, space: bytes, spelling: bytes) -> list[bytes]:
        """Keys of the beginnings of `spelling` that are stored, shortest first."""
        if self._evicted:
            with self._lock:
                self._unlist_evicted()
        found, hasher, start = [], _hasher(), 0
        for length, keys in self._index.beginnings(space, spelling):
            hasher.update(spelling[start:length])
            start = length
            key = _KEY.pack(length, _tail(spelling, length), hasher.digest())
            if key in keys:
                found.append(key)
        return found

    def _resolve(self, space: bytes, key: bytes) -> tuple[list[int], list[tuple[int, ...]]] | None:
        """Prompt ids and answers of an entry; None if it, or one that it goes on from, is gone.

        The entries are used from the last to the first, so that a conversation is evicted from its
        end.
        """
        parts: list[tuple[int, ...]] = []
        answers: list[tuple[int, ...]] | None = None
        where = key
        while where and len(parts) < _MAX_DEPTH:
            value = self._store.get(TABLE, space, where)
            entry = None if value is None else self._code.decode(value)
            if entry is None:
                break
            answers = entry.answers if answers is None else answers
            parts.append(entry.own_ids)
            where = entry.parent
        prompt_ids = [token_id for part in reversed(parts) for token_id in part]
        if where or not prompt_ids:
            self._drop(space, key)
            return None
        return prompt_ids, answers or []

    def _drop(self, space: bytes, key: bytes) -> None:
        with self._lock:
            self._stats.dropped += 1
            self._store.delete(TABLE, space, key)
            self._evicted.append((space, key))
            self._unlist_evicted()

    # --- answers ----------------------------------------------------------------------------

    def record(self, turn: Turn, output_ids: Sequence[int]) -> None:
        """Remember what was generated after a prompt, the token that ended it included.

        Nothing that a `forget` or `clear` has overtaken is recorded.
        """
        if not self._enabled or not output_ids:
            return
        with self._lock:
            if turn.epoch != self._epoch:
                return
            value = self._store.get(TABLE, turn.space, turn.key)
            entry = None if value is None else self._code.decode(value)
            if entry is None:
                entry = self._new_entry(turn)
            answer = tuple(output_ids)
            entry.answers = [known for known in entry.answers if known != answer]
            entry.answers = [*entry.answers, answer][-MAX_ANSWERS:]
            self._store.put(TABLE, turn.space, turn.key, self._code.encode(entry))
            self._unlist_evicted()  # of this key, too, if it had gone
            self._index.add(turn.space, turn.key)

    def _new_entry(self, turn: Turn) -> _Entry:
        if turn.parent and self._store.get(TABLE, turn.space, turn.parent) is not None:
            return _Entry(turn.parent, tuple(turn.token_ids[turn.num_inherited :]))
        return _Entry(b"", tuple(turn.token_ids))

    # --- forgetting and sight ---------------------------------------------------------------

    def forget(self, space: bytes) -> int:
        """Forget a tenant, with all that the side store has of it: records removed. Durable once
        the store has been flushed."""
        with self._lock:
            self._epoch += 1
            self._index.forget(space)
            return self._store.delete_space(space)

    def clear(self) -> int:
        """Forget everybody, with all that is in the side store: records removed."""
        with self._lock:
            self._epoch += 1
            self._index.clear()
            return self._store.clear()

    def stats(self) -> TranscriptStats:
        """A copy; bytes and pending are those of the whole side store."""
        with self._lock:
            self._unlist_evicted()
            counted, stored = self._stats, self._store.stats()
            return TranscriptStats(
                counted.hits,
                counted.misses,
                counted.reused_tokens,
                counted.dropped,
                self._index.num_keys,
                stored.bytes,
                stored.pending,
            )

    def _unlist_evicted(self) -> None:
        while self._evicted:
            self._index.discard(*self._evicted.popleft())


class _Index:
    """Which prompts are stored, by what a new one shows of them without a hash: how it ends at
    some length. Prompts end as the template ends them, so that few places of a text are a match.

    One changes it at a time. Who reads it needs no lock: each step is one operation of a
    dictionary, and a change that comes between two of them makes a miss or is found out later. So
    a thread that has to wait for a processor never keeps the event loop from a lock.
    """

    def __init__(self) -> None:
        self.num_keys = 0
        self._spaces: dict[bytes, dict[bytes, dict[int, set[bytes]]]] = {}

    def add(self, space: bytes, key: bytes) -> None:
        """Nothing for a key that is none of ours."""
        if len(key) != _KEY.size:
            return
        length, tail, _ = _KEY.unpack(key)
        by_length = self._spaces.setdefault(space, {}).setdefault(tail, {})
        keys = by_length.setdefault(length, set())
        self.num_keys += key not in keys
        keys.add(key)

    def discard(self, space: bytes, key: bytes) -> None:
        """Nothing for a key that is not there."""
        if len(key) != _KEY.size:
            return
        length, tail, _ = _KEY.unpack(key)
        by_tail = self._spaces.get(space, {})
        by_length = by_tail.get(tail, {})
        keys = by_length.get(length, set())
        if key not in keys:
            return
        keys.remove(key)
        self.num_keys -= 1
        if not keys:
            del by_length[length]
        if not by_length:
            del by_tail[tail]
        if not by_tail:
            del self._spaces[space]

    def forget(self, space: bytes) -> None:
        by_tail = self._spaces.pop(space, {})
        self.num_keys -= sum(len(keys) for by in by_tail.values() for keys in by.values())

    def clear(self) -> None:
        self._spaces.clear()
        self.num_keys = 0

    def beginnings(self, space: bytes, spelling: bytes) -> list[tuple[int, set[bytes]]]:
        """Lengths at which `spelling` ends like stored prompts of that length, shortest first,
        and the keys of these."""
        by_tail = self._spaces.get(space, {})
        found = []
        for length in _ends(spelling, list(by_tail)):
            keys = by_tail.get(_tail(spelling, length), {}).get(length)
            if keys is not None:
                found.append((length, keys))
        return found


class _Code:
    """Entries as bytes.

    | length of parent (1) | parent | number of lists (4) | each: number of ids (4), ids (2 or 4) |
    """

    def __init__(self, vocab_size: int) -> None:
        self._letter, self._width = ("H", 2) if vocab_size <= 1 << 16 else ("I", 4)

    def encode(self, entry: _Entry) -> bytes:
        lists = [entry.own_ids, *entry.answers]
        parts = [bytes([len(entry.parent)]), entry.parent, struct.pack("<I", len(lists))]
        for ids in lists:
            parts.append(struct.pack(f"<I{len(ids)}{self._letter}", len(ids), *ids))
        return b"".join(parts)

    def decode(self, value: bytes) -> _Entry | None:
        """None for bytes that are no entry."""
        try:
            start = 1 + value[0]
            parent = value[1:start]
            (num_lists,) = struct.unpack_from("<I", value, start)
            start += 4
            lists = []
            for _ in range(num_lists):
                (count,) = struct.unpack_from("<I", value, start)
                lists.append(struct.unpack_from(f"<{count}{self._letter}", value, start + 4))
                start += 4 + count * self._width
            return _Entry(parent, lists[0], lists[1:])
        except (struct.error, IndexError):
            return None


def _hasher() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=16)


def _key_of(spelling: bytes) -> bytes:
    hasher = _hasher()
    hasher.update(spelling)
    length = len(spelling)
    return _KEY.pack(length, _tail(spelling, length), hasher.digest())


def _tail(spelling: bytes, length: int) -> bytes:
    return spelling[max(0, length - _TAIL_BYTES) : length].ljust(_TAIL_BYTES, b"\0")


def _ends(spelling: bytes, tails: Collection[bytes]) -> list[int]:
    """Lengths at which `spelling` ends with one of `tails`, ascending."""
    lengths = [
        n for n in range(1, min(_TAIL_BYTES, len(spelling) + 1)) if _tail(spelling, n) in tails
    ]
    if len(tails) > _FEW_TAILS:
        known = frozenset(tails)
        every = range(_TAIL_BYTES, len(spelling) + 1)
        return lengths + [n for n in every if spelling[n - _TAIL_BYTES : n] in known]
    found = []
    for tail in tails:
        start = spelling.find(tail)
        while start >= 0:
            found.append(start + _TAIL_BYTES)
            start = spelling.find(tail, start + 1)
    return lengths + sorted(found)
