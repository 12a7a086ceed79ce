"""Daemon threads for one tier's blocking work.

Jobs run in order of urgency, then age. Reads may use every thread, everything else leaves one
free, so that no pile of slow writes keeps a load waiting. The threads only call and report: a job's
outcome is taken by the planner with `take_finished`. Daemon threads, because one stuck in a dead
disk's system call can be neither interrupted nor joined and must not keep the process alive.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any


class Urgency(IntEnum):
    """Which job goes first."""

    LOAD = 0
    RESET = 1
    SAVE = 2
    UPKEEP = 3


@dataclass(slots=True, eq=False)
class Job:
    """One blocking call, and after it what came of it. Seconds are of the monotonic clock."""

    run: Callable[[], Any]
    urgency: Urgency
    done: Callable[[Job], None]  # called by the planner
    started: float | None = None
    seconds: float = 0.0
    finished: bool = False  # `result` and `error` are final
    result: Any = None
    error: Exception | None = None
    cancelled: bool = False  # set by the planner; a job not yet started is then skipped
    order: int = field(default=0)


class IoThreads:
    """A few threads, started with the first job. `wake` is called from them after each job."""

    def __init__(self, name: str, count: int, wake: Callable[[], None]) -> None:
        if count < 1:
            raise ValueError("no I/O thread")
        self._name = name
        self._count = count
        self._wake = wake
        self._condition = threading.Condition()
        self._queue: list[tuple[int, int, Job]] = []
        self._running: set[Job] = set()
        self._finished: deque[Job] = deque()
        self._threads: list[threading.Thread] = []
        self._num_submitted = 0
        self._closed = False

    def submit(self, run: Callable[[], Any], urgency: Urgency, done: Callable[[Job], None]) -> Job:
        """Queue a call. Its outcome comes with `take_finished`, also if it raises."""
        job = Job(run, urgency, done)
        with self._condition:
            self._num_submitted += 1
            job.order = self._num_submitted
            heapq.heappush(self._queue, (urgency, job.order, job))
            if len(self._threads) < self._count:
                self._start_thread()
            self._condition.notify()
        return job

    def _start_thread(self) -> None:
        number = len(self._threads)
        thread = threading.Thread(target=self._work, name=f"{self._name}-{number}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def take_finished(self) -> list[Job]:
        """Jobs that ended since the last call, in that order."""
        jobs = []
        while self._finished:
            jobs.append(self._finished.popleft())
        return jobs

    @property
    def busy(self) -> bool:
        """Whether a job is queued, running, or ended and not yet taken."""
        with self._condition:
            return bool(self._queue or self._running or self._finished)

    def stalled(self, seconds: float) -> bool:
        """Whether every thread has been in one call for `seconds`: nothing will be served."""
        return self._num_stuck(seconds) >= self._count

    def saves_stalled(self, seconds: float) -> bool:
        """Whether the threads that may save have been in one call for `seconds`."""
        return self._num_stuck(seconds) >= self._num_savers

    @property
    def _num_savers(self) -> int:
        return max(1, self._count - 1)

    def _num_stuck(self, seconds: float) -> int:
        limit = time.monotonic() - seconds
        with self._condition:
            return sum(1 for job in self._running if (job.started or limit + 1) <= limit)

    def close(self, timeout: float) -> bool:
        """Drop what has not started, let what runs finish for `timeout` seconds; whether it did.

        Blocks for that long.
        """
        with self._condition:
            self._closed = True
            self._queue.clear()
            self._condition.notify_all()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while True:
            with self._condition:
                while not self._closed and not self._may_start():
                    self._condition.wait()
                if self._closed:
                    return
                job = heapq.heappop(self._queue)[2]
                job.started = time.monotonic()
                self._running.add(job)
            if not job.cancelled:
                try:
                    job.result = job.run()
                except Exception as error:  # whatever it is, it is the planner's to judge
                    job.error = error
            job.seconds = time.monotonic() - job.started
            job.finished = True
            with self._condition:
                self._running.discard(job)
                self._finished.append(job)
                self._condition.notify()
                if self._closed:
                    return
            with suppress(RuntimeError):  # the event loop behind it may close first
                self._wake()

    def _may_start(self) -> bool:
        if not self._queue:
            return False
        if self._queue[0][0] == Urgency.LOAD:
            return True
        others = sum(1 for job in self._running if job.urgency is not Urgency.LOAD)
        return others < self._num_savers
