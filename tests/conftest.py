"""Models that several tests share. One of each per run."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from engine.kernels import load_kernels
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache directory of the engines under test: each kernel is built once.

    The processes of one run share it, and `make mutants` names one for all of its own.
    """
    shared = os.environ.get("MUTANTS_CACHE")
    base = tmp_path_factory.getbasetemp()
    cache = Path(shared) if shared else base / "cache"
    if not shared and "PYTEST_XDIST_WORKER" in os.environ:
        cache = base.parent / "cache"
    cache.mkdir(exist_ok=True)
    with (cache / "building").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        load_kernels(cache)
    return cache
