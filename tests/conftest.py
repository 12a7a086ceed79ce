"""Models that several tests share. One of each per run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import assembly
from tests.offload.harness import FaultyTier
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FaultyTier]]:
    """The disk tiers of engines started in this test, each able to fail on demand."""
    tiers: list[FaultyTier] = []
    plain_open = assembly._open_tiers

    def open_faulty(*arguments: Any) -> list[Any]:
        opened: list[Any] = plain_open(*arguments)
        tiers.append(FaultyTier(opened[-1]))
        return [*opened[:-1], tiers[-1]]

    monkeypatch.setattr(assembly, "_open_tiers", open_faulty)
    yield tiers
    for tier in tiers:
        tier.release.set()


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache directory of the engines under test: each kernel is built once.

    `make mutants` runs many processes and names one directory for all of them.
    """
    shared = os.environ.get("MUTANTS_CACHE")
    return Path(shared) if shared else tmp_path_factory.mktemp("cache")
