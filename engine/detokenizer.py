"""Text out of tokens, as early as it is safe to show it.

Two things hold text back: a character whose bytes are not complete yet (the `TokenStream` sees to
that) and an end of the text that may turn out to be the beginning of a stop string. So no part of
a stop string is ever shown, and what only looked like one comes out later.

The text is scanned character by character, whatever the tokens it came in. The first character
that completes a stop string ends the text; of several completed by it the longest counts. Hence
the stop that is found, and the text before it, do not depend on how the text was tokenised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class TokenStream(Protocol):
    """Decodes one sequence incrementally; the joined results are the decoded sequence."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class StopMatcher:
    """One stop string against a text that comes in characters (Knuth, Morris and Pratt).

    `num_matched` is the length of the longest end of the text that is a beginning of `stop`.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._fallback = [0]  # [i]: longest proper beginning of stop[:i + 1] that also ends it
        length = 0
        for character in stop[1:]:
            while length and character != stop[length]:
                length = self._fallback[length - 1]
            length += character == stop[length]
            self._fallback.append(length)

    def advance(self, character: str) -> bool:
        """Whether `character` completes the stop string."""
        if self.num_matched == len(self.stop):
            self.num_matched = self._fallback[-1]
        while self.num_matched and character != self.stop[self.num_matched]:
            self.num_matched = self._fallback[self.num_matched - 1]
        self.num_matched += character == self.stop[self.num_matched]
        return self.num_matched == len(self.stop)

    @property
    def num_held(self) -> int:
        """Characters at the end of the text that may still grow into the stop string."""
        complete = self.num_matched == len(self.stop)
        return self._fallback[-1] if complete else self.num_matched


class Detokenizer:
    """The text of one request's output.

    A stop string counts only if the token that completes it is at least the `min_tokens`-th; one
    completed earlier is ordinary text. Stop strings hold at least one character each.
    """

    def __init__(self, stream: TokenStream, stop: Sequence[str], min_tokens: int) -> None:
        self._stream = stream
        self._matchers = [StopMatcher(text) for text in dict.fromkeys(stop)]
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""
        self._stopped = False

    def push(self, token_id: int) -> tuple[str, str | None]:
        """Text that may be shown now, and the stop string that ended the text, if one did.

        The text never includes any of the stop string. Raises RuntimeError after a stop.
        """
        if self._stopped:
            raise RuntimeError("a token was pushed after the text had ended at a stop string")
        self._num_tokens += 1
        return self._scan(self._stream.push(token_id), self._num_tokens >= self._min_tokens)

    def flush(self) -> str:
        """The rest that was held back, at the end of an output that no stop string ended.

        An incomplete character comes out as U+FFFD; should that complete a stop string, the text
        is cut there as ever. After a stop there is no rest.
        """
        if self._stopped:
            return ""
        text, stop = self._scan(self._stream.flush(), self._num_tokens >= self._min_tokens)
        if stop is None:
            text += self._held
        self._held = ""
        return text

    def _scan(self, new: str, may_stop: bool) -> tuple[str, str | None]:
        if not self._matchers:
            return new, None
        text = self._held + new
        for num_seen, character in enumerate(new, start=len(self._held) + 1):
            completed = [m.stop for m in self._matchers if m.advance(character)]
            if completed and may_stop:
                self._stopped = True
                stop = max(completed, key=len)
                return text[: num_seen - len(stop)], stop
        num_held = max(matcher.num_held for matcher in self._matchers)
        num_shown = len(text) - num_held
        self._held = text[num_shown:]
        return text[:num_shown], None
