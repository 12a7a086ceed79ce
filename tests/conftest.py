"""Models that several tests share. One of each per run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache directory of the engines under test: each kernel is built once.

    `make mutants` runs many processes and names one directory for all of them.
    """
    shared = os.environ.get("MUTANTS_CACHE")
    return Path(shared) if shared else tmp_path_factory.mktemp("cache")
