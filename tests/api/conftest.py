"""A real server with a real engine on a tiny random model, and clients for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest

from engine.config import EngineConfig
from tests.api.live_server import LiveServer
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "llama", family="llama", seed=0)


@pytest.fixture(scope="session")
def engine_config(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """Small blocks and a pool that a test can fill; every server gets a copy."""
    return EngineConfig(
        model=str(tiny_model),
        cache_dir=tmp_path_factory.mktemp("cache"),
        device="cpu",
        dtype="float32",
        threads=1,
        max_model_len=1024,
        block_size=4,
        kv_memory=None,
        kv_blocks=512,
        max_num_seqs=8,
        max_queue=16,
        cpu_tier=1 << 20,
        speculative="off",
    )


@pytest.fixture(scope="session")
def server(engine_config: EngineConfig) -> Iterator[LiveServer]:
    """The server that most tests share."""
    with LiveServer(engine_config) as live:
        yield live


@pytest.fixture(scope="session")
def small_server(engine_config: EngineConfig) -> Iterator[LiveServer]:
    """Two seats and a queue of two."""
    with LiveServer(replace(engine_config, max_num_seqs=2, max_queue=2)) as live:
        yield live


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with server.openai() as made:
        yield made
