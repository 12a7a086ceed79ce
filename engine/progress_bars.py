"""transformers reports progress by drawing bars on stderr; this turns them into numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def percentages(report: Callable[[float], None]) -> Iterator[None]:
    """Inside, bars that transformers would draw call `report` with percentages, never falling."""
    from transformers.utils import logging

    highest = 0.0

    def forward_only(percent: float) -> None:
        nonlocal highest
        if percent > highest:
            highest = percent
            report(percent)

    def bar(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bar:
        return Bar(forward_only, *args, **kwargs)

    previous = logging.set_tqdm_hook(bar)
    try:
        yield
    finally:
        logging.set_tqdm_hook(previous)


class Bar:
    """What transformers uses of a tqdm bar; calls `report` with percentages."""

    def __init__(
        self, report: Callable[[float], None], iterable: Any = None, **options: Any
    ) -> None:
        self._report = report
        self._iterable = iterable
        self._done = 0
        total = options.get("total")
        if total is None and hasattr(iterable, "__len__"):
            total = len(iterable)
        self._total = total

    def __iter__(self) -> Iterator[Any]:
        for item in self._iterable:
            yield item
            self.update()

    def update(self, count: int = 1) -> None:
        self._done += count
        if self._total:
            self._report(100 * self._done / self._total)

    def close(self) -> None:
        return

    def set_postfix(self, *_: Any, **__: Any) -> None:
        return

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        return
