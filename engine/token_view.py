"""A fixed stretch of a list that only grows, read without copying it."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import overload


class TokenView(Sequence[int]):
    """The first `length` tokens of an append-only list; slices are tuples.

        0                     length           len(tokens)
        |------- the view -------|--- appended later ---|

    What a view shows never changes, so it may be read from any thread while the list grows.
    """

    __slots__ = ("_length", "_tokens")

    def __init__(self, tokens: list[int], length: int | None = None) -> None:
        """Raises ValueError for a length beyond the list. None: all it holds now."""
        self._tokens = tokens
        self._length = len(tokens) if length is None else length
        if not 0 <= self._length <= len(tokens):
            raise ValueError(f"a view of {length} tokens of a list of {len(tokens)}")

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            if step > 0:
                return tuple(self._tokens[start:stop:step])
            return tuple(self._tokens[i] for i in range(start, stop, step))
        position = operator.index(index)
        if position < 0:
            position += self._length
        if not 0 <= position < self._length:
            raise IndexError(f"token {index} of {self._length}")
        return self._tokens[position]

    def __iter__(self) -> Iterator[int]:
        return islice(self._tokens, self._length)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"TokenView({list(self)!r})"
