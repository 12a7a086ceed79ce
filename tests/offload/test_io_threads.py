"""Urgency, the thread kept free, and errors that cost no thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from offload.io_threads import IoThreads, Job, Urgency


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def ignore(job: Job) -> None: ...


def test_loads_go_first_and_the_rest_by_age() -> None:
    threads = IoThreads("test", 1, lambda: None)
    gate = threading.Event()
    order: list[str] = []
    threads.submit(gate.wait, Urgency.SAVE, ignore)
    for name, urgency in [("survey", 3), ("save 1", 2), ("save 2", 2), ("load", 0), ("reset", 1)]:
        threads.submit(lambda name=name: order.append(name), Urgency(urgency), ignore)
    gate.set()
    wait_for(lambda: len(order) == 5)
    assert order == ["load", "reset", "save 1", "save 2", "survey"]
    assert threads.close(5)


def test_saves_leave_a_thread_to_loads() -> None:
    threads = IoThreads("test", 3, lambda: None)
    gate = threading.Event()
    for _ in range(5):
        threads.submit(gate.wait, Urgency.SAVE, ignore)
    wait_for(lambda: threads.saves_stalled(0.01))
    assert not threads.stalled(0.01)
    loaded = threading.Event()
    threads.submit(loaded.set, Urgency.LOAD, ignore)
    assert loaded.wait(5)
    threads.submit(gate.wait, Urgency.LOAD, ignore)
    wait_for(lambda: threads.stalled(0.01))
    assert not threads.stalled(1000)
    gate.set()
    wait_for(lambda: len(threads.take_finished()) or not threads.busy)
    assert threads.close(5)


def test_outcomes_come_with_an_error_or_a_result() -> None:
    woken = threading.Event()
    threads = IoThreads("test", 1, woken.set)
    gate = threading.Event()
    jobs = [
        threads.submit(gate.wait, Urgency.LOAD, ignore),
        threads.submit(lambda: 1 // 0, Urgency.LOAD, ignore),
        threads.submit(lambda: "skipped", Urgency.LOAD, ignore),
        threads.submit(lambda: "done", Urgency.LOAD, ignore),
    ]
    jobs[2].cancelled = True
    gate.set()
    wait_for(lambda: all(job.finished for job in jobs))
    wait_for(lambda: len(threads._finished) == 4)
    assert threads.take_finished() == jobs
    assert threads.take_finished() == []
    assert isinstance(jobs[1].error, ZeroDivisionError)
    assert (jobs[2].result, jobs[2].error) == (None, None)
    assert jobs[3].result == "done"
    assert woken.is_set()
    assert threads.close(5)


def test_close_does_not_wait_for_a_hung_call() -> None:
    def closed_loop() -> None:
        raise RuntimeError("Event loop is closed")

    threads = IoThreads("test", 1, closed_loop)
    gate = threading.Event()
    never = threads.submit(gate.wait, Urgency.SAVE, ignore)
    dropped = threads.submit(gate.wait, Urgency.SAVE, ignore)
    wait_for(lambda: never.started is not None)
    started = time.monotonic()
    assert not threads.close(0.05)
    assert time.monotonic() - started < 2
    assert all(thread.daemon for thread in threads._threads)
    gate.set()
    wait_for(lambda: never.finished)
    assert dropped.started is None
    assert threads.close(5)
