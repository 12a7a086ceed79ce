"""What finished requests left behind, kept apart by salt and bounded over all of them.

The requests stand in the order in which they finished; whatever was not used again in the meantime
goes first. For a request that made use of an older one contains what it used, and so brought it to
the front when it finished itself.
"""

from __future__ import annotations

from array import array
from collections import deque

from engine.suffix_index import SuffixIndex


class FinishedTokens:
    """One index per salt, `max_tokens` positions in all; a salt without any has none."""

    def __init__(self, max_tokens: int, gram: int) -> None:
        """`gram` is the shortest match, in tokens."""
        self._max_tokens = max_tokens
        self._gram = gram
        self._by_salt: dict[str | None, SuffixIndex] = {}
        self._requests: deque[tuple[str | None, int]] = deque()  # oldest first: salt, positions
        self._num_tokens = 0

    def __len__(self) -> int:
        """Positions in use over all salts: each request costs its tokens and one more."""
        return self._num_tokens

    @property
    def salts(self) -> set[str | None]:
        """The salts of which something is known."""
        return set(self._by_salt)

    def of(self, salt: str | None) -> SuffixIndex | None:
        """Where to look for what requests of `salt` left; None and "" are two salts."""
        return self._by_salt.get(salt)

    def remember(self, salt: str | None, tokens: array[int]) -> None:
        """Keep the tokens of a finished request (the end of them, if all are too many)."""
        tokens = tokens[-(self._max_tokens - 1) :]
        if len(tokens) <= self._gram:  # nothing could be found that has a continuation
            return
        index = self._by_salt.get(salt)
        if index is None:
            index = self._by_salt[salt] = SuffixIndex(self._gram)
        index.begin()
        index.extend(tokens)
        self._requests.append((salt, len(tokens) + 1))
        self._num_tokens += len(tokens) + 1
        while self._num_tokens > self._max_tokens:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        salt, count = self._requests.popleft()
        self._num_tokens -= count
        index = self._by_salt[salt]
        index.forget_oldest(count)
        if not len(index):
            del self._by_salt[salt]
