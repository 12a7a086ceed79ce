"""The server's life as its probes see it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from engine.config import EngineConfig
from engine.errors import StartupError
from tests.api.live_server import LiveServer

LONG = {"prompt": "The", "max_tokens": 1000, "ignore_eos": True}


def test_a_ready_server(http: httpx.Client) -> None:
    state = {"status": "ok", "phase": "ready", "percent": 100.0}
    for path in ("/health", "/ready"):
        response = http.get(path)
        assert (response.status_code, response.json()) == (200, state)
    assert http.get("/version").json() == {"version": "1.2.3"}


def test_while_it_loads_it_lives_but_takes_no_work(engine_config: EngineConfig) -> None:
    with LiveServer(engine_config, hold=True) as server, server.client() as client:
        server.wait_until(lambda: server.holder.phase == "waiting")
        health = client.get("/health")
        assert health.status_code == 200
        assert health.json() == {"status": "loading", "phase": "waiting", "percent": 12.5}
        assert client.get("/ready").status_code == 503
        assert client.get("/metrics").status_code == 200
        for method, path in (
            ("POST", "/v1/completions"),
            ("POST", "/v1/chat/completions"),
            ("GET", "/v1/models"),
            ("GET", "/v1/models/tiny"),
            ("POST", "/tokenize"),
            ("GET", "/cache/stats"),
        ):
            refused = client.request(
                method, path, json={"prompt": "x"} if method == "POST" else None
            )
            assert refused.status_code == 503, path
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "loading"
        server.release()
        server.wait_until(lambda: client.get("/ready").status_code == 200)
        assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200


def test_a_failed_load_stops_the_server_and_leaves_its_reason(
    engine_config: EngineConfig, tmp_path: Path
) -> None:
    server = LiveServer(replace(engine_config, model=str(tmp_path / "none")))
    with pytest.raises(StartupError), server:
        pass
    assert server.holder.status == "failed"
    assert server.holder.phase == "failed"


def test_a_server_stopped_while_it_loads_stops(engine_config: EngineConfig) -> None:
    with LiveServer(engine_config, hold=True) as server:
        server.wait_until(lambda: server.holder.phase == "waiting")
    assert server.holder.engine is None


def test_draining_ends_what_runs_and_refuses_what_comes(engine_config: EngineConfig) -> None:
    with LiveServer(engine_config) as server, server.client() as client:
        with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as running:
            lines = running.iter_lines()
            next(lines)
            server.holder.begin_drain()
            assert client.get("/health").json()["status"] == "draining"
            assert client.get("/health").status_code == 200
            assert client.get("/ready").status_code == 503
            refused = client.post("/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "draining"
            assert "retry-after" in refused.headers
            assert client.get("/v1/models").status_code == 200
            received = [line for line in lines if line]
        assert received[-1] == "data: [DONE]"


def test_a_stream_left_after_the_drain_ends_with_an_error(engine_config: EngineConfig) -> None:
    with LiveServer(engine_config) as server, server.client() as client:
        with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as running:
            lines = running.iter_lines()
            next(lines)
            server.on_loop(server.holder.close(0.05))
            received = [line for line in lines if line]
        last = json.loads(received[-1].removeprefix("data: "))
        assert last["error"]["code"] == "aborted"
        assert "data: [DONE]" not in received


def test_a_plain_request_left_after_the_drain_gets_503(engine_config: EngineConfig) -> None:
    with (
        LiveServer(engine_config) as server,
        server.client() as client,
        ThreadPoolExecutor(1) as other,
    ):
        answer = other.submit(client.post, "/v1/completions", json=LONG)
        server.wait_until(lambda: server.num_running == 1)
        server.on_loop(server.holder.close(0.05))
        refused = answer.result()
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "aborted"
        assert "retry-after" in refused.headers
