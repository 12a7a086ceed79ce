"""`/cache/*`, seen through what the next request finds."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest

from engine.config import EngineConfig
from offload.tier import OffloadError
from tests.api.live_server import LiveServer

PROMPT = {"prompt": list(range(100, 121)), "max_tokens": 1, "temperature": 0}


def cached_tokens(http: httpx.Client, salt: str | None = None) -> dict[str, int]:
    usage = http.post("/v1/completions", json={**PROMPT, "cache_salt": salt}).json()["usage"]
    by_tier: dict[str, int] = usage["prompt_tokens_details"]["cached_tokens_by_tier"]
    return by_tier


def test_stats_have_the_contracts_shape(server: LiveServer, http: httpx.Client) -> None:
    cached_tokens(http)
    body = http.get("/cache/stats").json()
    assert body.keys() == {"block_size", "fingerprint", "tiers"}
    assert body["block_size"] == 4
    assert body["fingerprint"] == server.engine.fingerprint
    assert body["tiers"].keys() >= {"device", "cpu"}
    for tier in body["tiers"].values():
        assert tier.keys() == {
            *("blocks", "bytes", "capacity_bytes", "pinned_blocks", "pending_saves"),
            *("hit_tokens", "saved_blocks", "evicted_blocks", "failed_blocks"),
        }
    assert body["tiers"]["device"]["blocks"] >= 5


def test_reset_forgets_everything(http: httpx.Client) -> None:
    cached_tokens(http)
    assert cached_tokens(http) == {"device": 20, "cpu": 0, "disk": 0}
    dropped = http.post("/cache/reset").json()["dropped"]
    assert dropped["device"] >= 5
    assert cached_tokens(http) == {"device": 0, "cpu": 0, "disk": 0}
    assert cached_tokens(http) == {"device": 20, "cpu": 0, "disk": 0}


def test_a_reset_that_is_not_durable_says_so(
    server: LiveServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def reset(tiers: object, **where: object) -> dict[str, int]:
        raise OffloadError("tier disk is empty, but a restart may find its old blocks: EIO")

    monkeypatch.setattr(server.engine, "cache_reset", reset)
    response = http.post("/cache/reset")
    assert response.status_code == 500
    assert "a restart may find its old blocks" in response.json()["error"]["message"]


def test_flush_then_reset_of_one_tier_leaves_the_other(engine_config: EngineConfig) -> None:
    with LiveServer(replace(engine_config)) as server, server.client() as http:
        cached_tokens(http)
        flushed = http.post("/cache/flush").json()
        assert flushed["failed"] == {"cpu": 0}
        assert http.get("/cache/stats").json()["tiers"]["cpu"]["blocks"] == 5
        assert http.post("/cache/reset", json={"tiers": ["device"]}).json() == {
            "dropped": {"device": 5}
        }
        assert cached_tokens(http) == {"device": 0, "cpu": 20, "disk": 0}


def test_a_tier_that_is_not_there_holds_nothing(http: httpx.Client) -> None:
    body = http.post("/cache/reset", json={"tiers": ["disk"]}).json()
    assert body == {"dropped": {"disk": 0}}
    cached_tokens(http)
    assert http.post("/cache/reset", json={"tiers": []}).json() == {"dropped": {}}
    assert cached_tokens(http)["device"] == 20


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tiers": ["tape"]}, "tiers[0]"),
        ({"tiers": "cpu"}, "tiers"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": 1}, "cache_salt"),
        ({"prompt_cache_key": ""}, "prompt_cache_key"),
        ({"cache_salt": None}, "cache_salt"),
        ({"prompt_cache_key": None, "tiers": ["cpu"]}, "prompt_cache_key"),
        ({"prompt_cache_keys": "k"}, "prompt_cache_keys"),
    ],
)
def test_bad_resets_are_refused_by_name(
    http: httpx.Client, body: dict[str, object], param: str
) -> None:
    response = http.post("/cache/reset", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_a_tenant_whose_name_was_lost_is_not_everybody(http: httpx.Client) -> None:
    cached_tokens(http)
    assert http.post("/cache/reset", json={"cache_salt": None}).status_code == 400
    assert cached_tokens(http)["device"] == 20


def test_a_tier_named_twice_is_dropped_and_counted_once(http: httpx.Client) -> None:
    cached_tokens(http)
    body = http.post("/cache/reset", json={"tiers": ["device", "device"]}).json()
    assert body == {"dropped": {"device": 5}}


def test_a_misspelt_field_drops_nothing(http: httpx.Client) -> None:
    """Without `tiers` everything goes, so a typing error must not read as 'without'."""
    cached_tokens(http)
    response = http.post("/cache/reset", json={"tier": ["device"]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tier"
    assert "'tiers'" in response.json()["error"]["message"]
    assert cached_tokens(http)["device"] == 20


def test_a_salt_separates(http: httpx.Client) -> None:
    cached_tokens(http, "one")
    assert cached_tokens(http, "one")["device"] == 20
    assert cached_tokens(http, "two")["device"] == 0
