"""Keys, request ids, and who may touch the cache."""

from __future__ import annotations

import re
import socket
from dataclasses import replace

import httpx
import pytest

from engine.config import EngineConfig
from tests.api.live_server import SETTINGS, LiveServer

OPEN = ("/health", "/ready", "/metrics")
GUARDED = ("/v1/models", "/models", "/version", "/tokenizer_info", "/v1/models/tiny", "/nowhere")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def statuses(client: httpx.Client, paths: tuple[str, ...], key: str | None) -> set[int]:
    headers = {} if key is None else bearer(key)
    return {client.get(path, headers=headers).status_code for path in paths}


def test_any_api_key_opens_the_api(engine_config: EngineConfig) -> None:
    settings = replace(SETTINGS, api_keys=("first", "sécond"))
    with LiveServer(engine_config, settings) as server, server.client() as client:
        assert statuses(client, OPEN, None) == {200}
        for key in (None, "firs", "firstt", "First"):
            assert statuses(client, (*GUARDED, "/cache/stats"), key) == {401}
        for key in (b"Bearer first", b"bearer first", "Bearer sécond".encode()):
            for path in ("/v1/models", "/cache/stats"):
                assert client.get(path, headers={b"authorization": key}).status_code == 200
        for header in ("first", "Bearer", "Basic first"):
            assert client.get("/v1/models", headers={"authorization": header}).status_code == 401
        refused = client.post("/v1/completions", json={"prompt": "x"})
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert refused.headers["www-authenticate"] == "Bearer"
        with server.openai(api_key="first") as known:
            assert known.models.list().data[0].id == "tiny"


def test_the_admin_key_guards_the_cache_alone(engine_config: EngineConfig) -> None:
    settings = replace(SETTINGS, api_keys=("user",), admin_key="admin")
    with LiveServer(engine_config, settings) as server, server.client() as client:
        assert statuses(client, ("/cache/stats",), "admin") == {200}
        assert statuses(client, ("/cache/stats",), "user") == {401}
        assert statuses(client, ("/v1/models",), "user") == {200}
        assert statuses(client, ("/v1/models",), "admin") == {401}


def test_without_keys_only_loopback_may_touch_the_cache(engine_config: EngineConfig) -> None:
    with LiveServer(engine_config, host="0.0.0.0") as server, server.client() as client:
        assert client.get("/cache/stats").status_code == 200
        outside = _own_address()
        if outside is not None:
            for method, path in (("GET", "/cache/stats"), ("POST", "/cache/reset")):
                url = f"http://{outside}:{server.port}{path}"
                refused = httpx.request(method, url)
                assert refused.status_code == 403
                assert refused.json()["error"]["type"] == "permission_error"
            assert httpx.get(f"http://{outside}:{server.port}/v1/models").status_code == 200


def _own_address() -> str | None:
    """An address of this machine that is not loopback, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: it only picks the interface
        except OSError:
            return None
        address: str = probe.getsockname()[0]
    return None if address.startswith("127.") else address


def test_a_web_page_may_not_touch_the_cache_through_the_users_browser(http: httpx.Client) -> None:
    refused = http.post("/cache/reset", headers={"origin": "https://evil.example"})
    assert refused.status_code == 403


def test_request_ids_come_back(http: httpx.Client) -> None:
    for path in ("/health", "/v1/models", "/nowhere", "/cache/stats"):
        given = http.get(path, headers={"x-request-id": "abc-123_x.y:z"})
        assert given.headers.get_list("x-request-id") == ["abc-123_x.y:z"]


@pytest.mark.parametrize("given", [None, "", "a b", "x" * 129, "é", 'quote"'])
def test_request_ids_that_are_not_sane_are_replaced(http: httpx.Client, given: str | None) -> None:
    headers = {} if given is None else {b"x-request-id": given.encode()}
    made = [http.get("/health", headers=headers).headers["x-request-id"] for _ in range(2)]
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in made)
    assert made[0] != made[1]


def test_two_requests_may_share_a_request_id(server: LiveServer) -> None:
    headers = {"x-request-id": "same"}
    body = {"prompt": "The", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with (
        server.client(headers=headers) as client,
        client.stream("POST", "/v1/completions", json=body) as first,
    ):
        assert first.status_code == 200
        second = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        assert second.status_code == 200
    server.wait_idle()
