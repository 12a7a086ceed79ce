"""The log line a minute."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from api.activity import Activity, ActivityLog
from api.cli.logs import JsonFormatter, TextFormatter
from engine.stats import EngineStats
from offload.tier import TierStats

MIB = 1 << 20


def snapshot(times: int, pending: int = 0) -> EngineStats:
    """Of an engine that did the same thing so many times."""
    return EngineStats(
        finished={"stop": times, "length": times},
        prompt_tokens=400 * times,
        generation_tokens=50 * times,
        hit_tokens={"device": 200 * times, "cpu": 50 * times},
        prefill_seconds_saved=1.25 * times,
        tiers={
            "cpu": TierStats(
                saved_blocks=7 * times,
                promoted_blocks=3 * times,
                store_bytes=4 * MIB * times,
                loaded_blocks=2 * times,
                load_bytes=2 * MIB * times,
                pending_saves=pending,
                skipped={"put off, then lost": times},
            )
        },
    )


def test_the_line_tells_what_lies_between_two_snapshots() -> None:
    activity = Activity.between(snapshot(2), snapshot(3, pending=5), seconds=60.0)
    assert str(activity) == (
        "last 60 s: 2 requests ended, 400 prompt tokens, hits device 50.0 % cpu 12.5 %,"
        " 1.2 s of prefill saved, 50 tokens generated;"
        " cpu: saved 4 blocks (4.0MiB), loaded 2 (2.0MiB), promoted 3, put off 5, lost 1"
    )
    assert activity.fields() == {
        "seconds": 60.0,
        "ended_requests": 2,
        "prompt_tokens": 400,
        "generation_tokens": 50,
        "hit_tokens": {"device": 200, "cpu": 50},
        "hit_rates": {"device": 0.5, "cpu": 0.125},
        "prefill_seconds_saved": 1.25,
        "tiers": {
            "cpu": {
                "saved_blocks": 4,
                "saved_bytes": 4 * MIB,
                "loaded_blocks": 2,
                "loaded_bytes": 2 * MIB,
                "promoted_blocks": 3,
                "put_off": 5,
                "lost": 1,
            }
        },
    }


def test_one_line_an_interval_and_none_when_idle(caplog: pytest.LogCaptureFixture) -> None:
    now = snapshot(1)
    log = ActivityLog(lambda: now)
    with caplog.at_level(logging.INFO, "api.activity"):
        log.tick()
        assert caplog.records == []  # nothing since it began
        now = snapshot(2)
        log.tick()
        log.tick()
        now = snapshot(2, pending=9)  # a save that still waits is no event
        log.tick()
    [record] = caplog.records
    assert "2 requests ended" in record.getMessage()


@pytest.mark.parametrize("what", ["saved_blocks", "loaded_blocks"])
def test_what_a_tier_does_after_the_last_answer_is_told(
    caplog: pytest.LogCaptureFixture, what: str
) -> None:
    now = snapshot(1)
    log = ActivityLog(lambda: now)
    now = snapshot(1)
    setattr(now.tiers["cpu"], what, 99)
    with caplog.at_level(logging.INFO, "api.activity"):
        log.tick()
    assert len(caplog.records) == 1


def test_both_log_formats_carry_the_figures(caplog: pytest.LogCaptureFixture) -> None:
    now = snapshot(0)
    log = ActivityLog(lambda: now)
    now = snapshot(1)
    with caplog.at_level(logging.INFO, "api.activity"):
        log.tick()
    [record] = caplog.records
    assert "saved 4 blocks (4.0MiB)" in TextFormatter().format(record)
    entry = json.loads(JsonFormatter().format(record))
    assert entry["message"] == record.getMessage()
    assert entry["fields"]["tiers"]["cpu"]["saved_blocks"] == 4


async def test_it_ticks_until_it_is_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    numbers = iter(range(1000))
    log = ActivityLog(lambda: snapshot(next(numbers)))
    with caplog.at_level(logging.INFO, "api.activity"):
        task = asyncio.create_task(log.run(interval=0.0))
        while len(caplog.records) < 3:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert all("2 requests ended" in record.getMessage() for record in caplog.records)
