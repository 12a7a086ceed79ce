"""Tiers over a temporary directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offload.cpu_tier import CpuTier
from offload.disk_tier import DiskTier
from tests.offload.harness import BLOCK_BYTES, FINGERPRINT


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def open_disk(store: Path) -> Iterator[Callable[..., DiskTier]]:
    """Open the store; every tier opened is closed at the end of the test."""
    tiers: list[DiskTier] = []

    def open_(
        capacity: int = 64 << 20,
        fingerprint: bytes = FINGERPRINT,
        path: Path = store,
        side_bytes: int = 0,
    ) -> DiskTier:
        tier = DiskTier.open(
            path,
            fingerprint=fingerprint,
            block_bytes=BLOCK_BYTES,
            capacity_bytes=capacity,
            side_bytes=side_bytes,
        )
        tiers.append(tier)
        return tier

    yield open_
    for tier in tiers:
        tier.close()


@pytest.fixture
def cpu() -> CpuTier:
    return CpuTier(8 * BLOCK_BYTES, block_bytes=BLOCK_BYTES)
