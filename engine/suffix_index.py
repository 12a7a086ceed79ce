"""Token sequences, indexed so that the longest match of a suffix is found in some microseconds.

Hash chains, as deflate has them. A position stands for the `gram` tokens that end there:

    heads   hash of a gram -> the newest position with that hash
    links   position       -> the next older one with the same hash

Hashes are only hints: each candidate is compared with the suffix itself, backwards. The sequences
stand one behind another, a separator in front of each, so that no match reaches across:

    | -1 t t t t | -1 t t | -1 t t t ...        positions never shift; the oldest sequences can go
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

LONGEST_MATCH = 64  # tokens: a match is not followed further back, nor a longer one looked for
MAX_CANDIDATES = 64  # compared per search; bounds the time where everything looks alike

_SEPARATOR = -1
_FIRST_BITS = 8
_FEW_TOKENS = 64  # one by one: numpy takes as long for as many
_MAX_BITS = 16  # no larger table, lest refilling it stop the caller for more than 2 or 3 ms
_BITS_PER_GROWTH = 2
_MULTIPLIER = 0x9E3779B1  # 2**32 / golden ratio: spreads the ids of neighbouring tokens
_KEY_MASK = 0xFFFFFFFF


class SuffixIndex:
    """Sequences of token ids, with a search for what matches the end of a text in them.

    Adding a token takes O(1), a search O(`MAX_CANDIDATES` + `LONGEST_MATCH`). Positions count the
    separators too. At most 80 bytes per token, but 2 KiB in all are the least.
    """

    def __init__(self, gram: int) -> None:
        """Matches of fewer than `gram` tokens are not found."""
        self._gram = gram
        # In a key of 32 bits a token is shifted out once `gram` others have come.
        self._shift = -(-32 // gram)
        self._tokens = array("i")
        self._links = array("q")
        self._bits = _FIRST_BITS
        self._heads = array("q", [-1]) * (1 << self._bits)
        self._base = 0  # position of _tokens[0]
        self._oldest = 0  # older positions are forgotten, be they still in the arrays or not

    def __len__(self) -> int:
        """Positions that are remembered, separators included."""
        return self.end - self._oldest

    @property
    def end(self) -> int:
        """The position that the next token will have."""
        return self._base + len(self._tokens)

    def begin(self) -> None:
        """From here on a new sequence: nothing matches across."""
        self._tokens.append(_SEPARATOR)
        self._links.append(-1)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append to the sequence that was begun last."""
        start = len(self._tokens)
        self._tokens.extend(tokens)
        if len(self._tokens) > 1 << self._bits and self._bits < _MAX_BITS:
            self._grow_table()
        else:
            self._link(start)

    def forget_oldest(self, count: int) -> None:
        """Drop the oldest `count` positions; they should be whole sequences."""
        self._oldest += count
        num_dead = self._oldest - self._base
        if 2 * num_dead > len(self._tokens):  # seldom enough that moving the rest costs O(1) each
            del self._tokens[:num_dead]
            del self._links[:num_dead]
            self._base = self._oldest

    def last(self, count: int) -> array[int]:
        """The last `count` tokens of the newest sequence, or all of it if it has fewer."""
        tail = self._tokens[-count:]
        while _SEPARATOR in tail:
            del tail[: tail.index(_SEPARATOR) + 1]
        return tail

    def following(self, position: int, count: int) -> list[int]:
        """At most `count` tokens from `position` on, up to the end of their sequence."""
        if position < self._oldest:
            return []
        start = position - self._base
        tokens = self._tokens[start : start + count].tolist()
        return tokens[: tokens.index(_SEPARATOR)] if _SEPARATOR in tokens else tokens

    def agreement(self, position: int, suffix: array[int]) -> int:
        """How many tokens right before `position` equal the end of `suffix`."""
        if not self._oldest <= position <= self.end:
            return 0
        tokens, length, i = self._tokens, 0, position - self._base - 1
        most = min(len(suffix), i + 1)
        while length < most and tokens[i - length] == suffix[-1 - length]:
            length += 1
        return length

    def longest(self, suffix: array[int], more_than: int = 0) -> tuple[int, int]:
        """Where the longest match of `suffix` goes on, and its length: `len(suffix)` at most.

        Of equal ones the most recent. (-1, 0) if none has more than `more_than` tokens. What ends
        a sequence is no match, as nothing follows: so a text can be searched for its own end.
        """
        if len(suffix) < self._gram:
            return -1, 0
        key = self._key(suffix[-self._gram :])
        position = self._heads[(key * _MULTIPLIER & _KEY_MASK) >> (32 - self._bits)]
        if position == self.end - 1 >= self._oldest:
            position = self._links[-1]
        tokens, links, base, oldest = self._tokens, self._links, self._base, self._oldest
        length, found = max(more_than, self._gram - 1), -1
        most = len(suffix)
        if length >= most:
            return -1, 0
        wanted, tail = suffix[-1 - length], suffix[most - length :]
        for _ in range(MAX_CANDIDATES):
            if position < oldest:
                break
            i = position - base
            # The token that makes it longer than the best comes first: most candidates end here.
            if (
                i >= length
                and tokens[i - length] == wanted
                and tokens[i - length + 1 : i + 1] == tail
                and tokens[i + 1] != _SEPARATOR
            ):
                length += 1
                while length < most and length <= i and tokens[i - length] == suffix[-1 - length]:
                    length += 1
                found = position + 1
                if length == most:
                    break
                wanted, tail = suffix[-1 - length], suffix[most - length :]
            position = links[i]
        return (found, length) if found >= 0 else (-1, 0)

    def _key(self, tokens: Sequence[int]) -> int:
        key = 0
        for token in tokens:
            key = (key << self._shift ^ token) & _KEY_MASK
        return key

    def _link(self, start: int) -> None:
        """Put the positions from index `start` on into the chains; each is put there once."""
        if len(self._tokens) - start > _FEW_TOKENS:
            return self._link_many(start)
        tokens, heads, append = self._tokens, self._heads, self._links.append
        shift, drop = self._shift, 32 - self._bits
        position = self._base + start
        key = self._key(tokens[max(0, start - self._gram + 1) : start])
        for token in tokens[start:]:
            key = (key << shift ^ token) & _KEY_MASK
            slot = (key * _MULTIPLIER & _KEY_MASK) >> drop
            append(heads[slot])
            heads[slot] = position
            position += 1

    def _link_many(self, start: int) -> None:
        """What `_link` does, a whole prompt at a time: ten times as fast."""
        before = min(start, self._gram - 1)
        tokens = np.array(self._tokens[start - before :], np.uint32)
        keys = tokens.copy()
        for age in range(1, self._gram):
            keys[age:] ^= tokens[: len(tokens) - age] << np.uint32(self._shift * age)
        keys = keys[before:] * np.uint32(_MULTIPLIER)
        slots = (keys >> np.uint32(32 - self._bits)).astype(np.uint16)
        # Sorted stably by slot, each position has its older neighbour in front of it.
        order = np.argsort(slots, kind="stable")
        slots = slots[order]
        positions = order + (self._base + start)
        is_first = np.concatenate(([True], slots[1:] != slots[:-1]))
        is_last = np.concatenate((is_first[1:], [True]))
        heads = np.frombuffer(self._heads, np.int64)
        older = np.concatenate(([-1], positions[:-1]))
        older[is_first] = heads[slots[is_first]]
        heads[slots[is_last]] = positions[is_last]
        links = np.empty_like(older)
        links[order] = older
        self._links.frombytes(links.tobytes())

    def _grow_table(self) -> None:
        """A larger table, with everything in it that is remembered."""
        while self._bits < _MAX_BITS and len(self._tokens) > 1 << self._bits:
            self._bits += _BITS_PER_GROWTH
        self._heads = array("q", [-1]) * (1 << self._bits)
        del self._links[:]
        self._link(0)
