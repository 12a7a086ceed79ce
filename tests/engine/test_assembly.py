"""Tiers open while the model is tested, and a start that fails leaves none of them behind."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from engine import assembly
from engine.config import EngineConfig
from engine.errors import StartupError

MODEL: Any = type("Model", (), {"fingerprint": bytes(32), "block_bytes": 4096})


class Tier:
    closed = False

    def close(self) -> None:
        self.closed = True


class Start:
    """The two halves of a start; each waits until the other one is under way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tier = Tier()
        self.model_error: Exception | None = None
        self.tier_error: Exception | None = None
        self.phases: list[str] = []
        self._both = threading.Barrier(2)
        monkeypatch.setattr(assembly, "_open_tiers", self._open)
        monkeypatch.setattr(assembly, "_test", self._test)

    def run(self) -> tuple[float | None, list[Any]]:
        config = EngineConfig(model="", cache_dir=Path())
        return assembly._test_and_open_tiers(MODEL, config, lambda p, _: self.phases.append(p))

    def _open(self, config: EngineConfig, fingerprint: bytes, block_bytes: int) -> list[Tier]:
        assert (fingerprint, block_bytes) == (bytes(32), 4096)
        self._both.wait(20)
        if self.tier_error:
            raise self.tier_error
        return [self.tier]

    def _test(self, model: object, config: EngineConfig, progress: Any) -> float:
        self._both.wait(20)
        if self.model_error:
            raise self.model_error
        return 0.25


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    return Start(monkeypatch)


def no_thread_is_left() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name.startswith("tiers")]


def test_the_tiers_open_while_the_model_is_tested(start: Start) -> None:
    assert start.run() == (0.25, [start.tier])
    assert start.phases == ["opening KV tiers"]
    assert not start.tier.closed
    assert no_thread_is_left()


def test_a_model_that_fails_its_test_closes_the_tiers(start: Start) -> None:
    start.model_error = StartupError("its logits differ")
    with pytest.raises(StartupError, match=r"^its logits differ$"):
        start.run()
    assert start.tier.closed
    assert no_thread_is_left()


def test_a_tier_that_does_not_open_ends_the_start(start: Start) -> None:
    start.tier_error = StartupError("--disk-tier /x: no room")
    with pytest.raises(StartupError, match=r"^--disk-tier /x: no room$"):
        start.run()
    assert no_thread_is_left()


def test_of_two_failures_the_model_s_is_told(start: Start) -> None:
    start.tier_error = StartupError("--disk-tier /x: no room")
    start.model_error = StartupError("its logits differ")
    with pytest.raises(StartupError, match=r"^its logits differ$"):
        start.run()
    assert no_thread_is_left()
