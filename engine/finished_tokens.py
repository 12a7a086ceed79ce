"""What finished requests left behind, kept apart by salt and bounded over all of them.

The requests stand in the order in which they finished, and the oldest go first. That is also the
order of last use: a request that was drafted from older ones contains what it took from them, and
so has brought it to the front when it finishes itself. A request that goes on from the last one of
its salt, as a chat does turn by turn, takes its place.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass

from engine.suffix_index import SuffixIndex

_SHARE = 8  # no request leaves more than this part of all that may be kept


@dataclass(slots=True)
class _Salt:
    index: SuffixIndex
    newest: int  # the number of its newest request, a key of `_requests`


class FinishedTokens:
    """One index per salt, `max_tokens` positions in all; a salt without any has none."""

    def __init__(self, max_tokens: int, gram: int) -> None:
        """`gram` is the shortest match, in tokens."""
        self._max_tokens = max_tokens
        self._gram = gram
        self._salts: dict[str | None, _Salt] = {}
        # By number, oldest first: salt, and positions in the index of the salt.
        self._requests: OrderedDict[int, tuple[str | None, int]] = OrderedDict()
        self._num_remembered = 0
        self._num_positions = 0

    def __len__(self) -> int:
        """Positions in use over all salts: each request costs its tokens and one more."""
        return self._num_positions

    @property
    def salts(self) -> set[str | None]:
        """The salts of which something is known."""
        return set(self._salts)

    def of(self, salt: str | None) -> SuffixIndex | None:
        """Where to look for what requests of `salt` left; None and "" are two salts."""
        known = self._salts.get(salt)
        return known.index if known else None

    def remember(self, salt: str | None, tokens: array[int]) -> None:
        """Keep the tokens of a finished request; of a long one its end, an eighth of the bound."""
        most = self._max_tokens // _SHARE - 1
        if min(len(tokens), most) <= self._gram:  # no match in it would have a continuation
            return
        tokens = tokens[-most:]
        known = self._salts.get(salt)
        if known is None:
            known = self._salts[salt] = _Salt(SuffixIndex(self._gram), newest=-1)
        num_known = self._num_continued(known, tokens)
        if num_known:
            _, num_replaced = self._requests.pop(known.newest)
            self._num_positions -= num_replaced
        else:
            known.index.begin()
        known.index.extend(tokens[num_known:])
        known.newest = self._num_remembered
        self._num_remembered += 1
        self._requests[known.newest] = (salt, len(tokens) + 1)
        self._num_positions += len(tokens) + 1
        while self._num_positions > self._max_tokens:
            self._forget_oldest()

    def _num_continued(self, known: _Salt, tokens: array[int]) -> int:
        """How many of these tokens are the newest request of the salt; 0 unless all of it is."""
        if known.newest < 0:
            return 0
        count = self._requests[known.newest][1] - 1
        return count if known.index.last(count) == tokens[:count] else 0

    def _forget_oldest(self) -> None:
        _, (salt, count) = self._requests.popitem(last=False)
        self._num_positions -= count
        index = self._salts[salt].index
        index.forget_oldest(count)
        if not len(index):
            del self._salts[salt]
