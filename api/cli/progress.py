"""How a loading model is shown: a bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import threading
import time

from tqdm import tqdm

logger = logging.getLogger(__name__)

LOGGED_STEP = 25.0  # percent
QUICK = 2.0  # seconds; a phase shorter than this is told once


class LoadProgress:
    """A `ProgressFn` that any thread may call."""

    def __init__(self, on_terminal: bool | None = None) -> None:
        self._on_terminal = sys.stderr.isatty() if on_terminal is None else on_terminal
        self._lock = threading.Lock()
        self._bar: tqdm[None] | None = None
        self._phase: str | None = None
        self._logged = 0.0
        self._began = 0.0  # when the phase began, monotonic
        self._closed = False

    def __call__(self, phase: str, percent: float) -> None:
        with self._lock:
            if self._closed:
                return
            if self._on_terminal:
                self._draw(phase, percent)
            else:
                self._log(phase, percent)
            self._phase = phase

    def _draw(self, phase: str, percent: float) -> None:
        if self._bar is None:
            layout = "{desc:<24} {percentage:3.0f}% |{bar}| {elapsed}"
            self._bar = tqdm(
                desc=phase, total=100.0, bar_format=layout, leave=False, file=sys.stderr
            )
        elif phase != self._phase:
            self._bar.set_description_str(phase, refresh=False)
            self._bar.reset()
        self._bar.update(percent - self._bar.n)

    def _log(self, phase: str, percent: float) -> None:
        if phase != self._phase:
            self._logged = 0.0
            self._began = time.monotonic()
            logger.info("Loading: %s", phase)
        elif percent >= self._logged + LOGGED_STEP and time.monotonic() > self._began + QUICK:
            self._logged = percent - percent % LOGGED_STEP
            logger.info("Loading: %s, %.0f %%", phase, percent)

    def close(self) -> None:
        """Takes the bar off the terminal; later calls show nothing."""
        with self._lock:
            self._closed = True
            if self._bar is not None:
                self._bar.close()
