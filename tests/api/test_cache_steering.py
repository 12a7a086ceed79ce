"""`/cache/pin`, `/unpin` and `/prefetch`, seen through what tiers hold and requests find."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from engine.config import EngineConfig
from engine.sampling_params import SamplingParams
from tests.api.live_server import LiveServer

SENTENCE = "The store keeps what the model has read. "


@pytest.fixture(scope="module")
def disk_server(
    engine_config: EngineConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    config = replace(engine_config, disk_tier=tmp_path_factory.mktemp("kv") / "store")
    with LiveServer(config) as live:
        yield live


@pytest.fixture
def http(disk_server: LiveServer) -> Iterator[httpx.Client]:
    with disk_server.client() as client:
        yield client


@pytest.fixture(scope="module")
def bare_server(engine_config: EngineConfig) -> Iterator[LiveServer]:
    """No tier below the device."""
    with LiveServer(replace(engine_config, cpu_tier=0)) as live:
        yield live


def post(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def complete(http: httpx.Client, prompt: list[int], **fields: Any) -> dict[str, int]:
    """One token more; the cached tokens by tier."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
    usage = post(http, "/v1/completions", **body)["usage"]
    by_tier: dict[str, int] = usage["prompt_tokens_details"]["cached_tokens_by_tier"]
    return by_tier


def pinned(http: httpx.Client) -> dict[str, int]:
    tiers = http.get("/cache/stats").json()["tiers"]
    return {name: tiers[name]["pinned_blocks"] for name in ("cpu", "disk")}


def store_all(http: httpx.Client) -> None:
    assert sum(post(http, "/cache/flush")["failed"].values()) == 0


_numbers = iter(range(3, 300))


@pytest.fixture
def prompt() -> list[int]:
    """Five whole blocks and a token that no other test has."""
    number = next(_numbers)
    return [number, *range(3, 23)]


def test_a_prompt_is_pinned_in_every_tier_until_it_is_unpinned(
    http: httpx.Client, prompt: list[int]
) -> None:
    complete(http, prompt)
    store_all(http)
    answer = post(http, "/cache/pin", prompt=prompt)
    assert answer["blocks"] == 5
    assert answer["bytes"] > 5 * 3072  # in both tiers
    assert pinned(http) == {"cpu": 5, "disk": 5}
    assert post(http, "/cache/unpin", prompt=prompt) == answer
    assert pinned(http) == {"cpu": 0, "disk": 0}
    assert post(http, "/cache/unpin", prompt=prompt) == {"blocks": 0, "bytes": 0}


def test_a_conversation_is_pinned_as_its_last_turn_left_it(
    http: httpx.Client, prompt: list[int]
) -> None:
    complete(http, prompt, prompt_cache_key="k", max_tokens=12, ignore_eos=True)
    store_all(http)
    assert post(http, "/cache/pin", prompt_cache_key="k")["blocks"] == 8  # 21 + 12 - 1 tokens
    complete(http, [*prompt, *[7] * 20], prompt_cache_key="k")
    store_all(http)
    assert post(http, "/cache/pin", prompt_cache_key="k")["blocks"] == 10
    assert pinned(http) == {"cpu": 10, "disk": 10}  # the second pin took the first one's place
    assert post(http, "/cache/pin", prompt_cache_key="unheard of")["blocks"] == 0
    assert post(http, "/cache/pin", prompt_cache_key="k", cache_salt="s")["blocks"] == 0
    assert post(http, "/cache/unpin", prompt_cache_key="k")["blocks"] == 10


def test_a_turn_that_was_not_computed_leaves_nothing(
    disk_server: LiveServer, http: httpx.Client, prompt: list[int]
) -> None:
    """Its blocks have names all the same, and others may have stored them."""
    complete(http, prompt)
    store_all(http)

    async def submit_and_leave() -> None:
        stream = disk_server.engine.submit(
            prompt, SamplingParams(max_tokens=4), request_id="left", prompt_cache_key="left"
        )
        await stream.aclose()

    disk_server.on_loop(submit_and_leave())
    disk_server.wait_idle()
    assert post(http, "/cache/pin", prompt_cache_key="left")["blocks"] == 0


def test_a_chat_is_pinned_by_its_messages(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": SENTENCE}]
    body = {"messages": messages, "max_tokens": 1, "cache_salt": "chat"}
    usage = post(http, "/v1/chat/completions", **body)["usage"]
    store_all(http)
    whole = usage["prompt_tokens"] // 4
    pin = post(http, "/cache/pin", messages=messages, cache_salt="chat")
    assert pin["blocks"] == whole
    assert post(http, "/cache/unpin", messages=messages)["blocks"] == 0  # of another salt
    assert post(http, "/cache/unpin", messages=messages, cache_salt="chat") == pin


@pytest.mark.parametrize(("given", "seconds"), [({}, 3600.0), ({"ttl_seconds": 90}, 90.0)])
def test_a_pin_ends_by_itself(
    disk_server: LiveServer,
    http: httpx.Client,
    prompt: list[int],
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, Any],
    seconds: float,
) -> None:
    ends: list[float] = []
    offload = disk_server.engine._core.offload
    monkeypatch.setattr(offload, "pin", lambda name, keys, until: (ends.append(until), (0, 0))[1])
    before = time.time()
    post(http, "/cache/pin", prompt=prompt, **given)
    [end] = ends
    assert before + seconds <= end <= time.time() + seconds


def test_a_pin_that_has_lapsed_is_gone(http: httpx.Client, prompt: list[int]) -> None:
    complete(http, prompt)
    store_all(http)
    assert post(http, "/cache/pin", prompt=prompt, ttl_seconds=1e-6)["blocks"] == 5
    assert pinned(http) == {"cpu": 0, "disk": 0}
    assert post(http, "/cache/unpin", prompt=prompt)["blocks"] == 0


@pytest.mark.parametrize("selector", ["prompt", "prompt_cache_key"])
@pytest.mark.parametrize("salt", [None, "s"])
def test_a_prefetch_makes_disk_hits_device_hits(
    http: httpx.Client, prompt: list[int], selector: str, salt: str | None
) -> None:
    key = f"{selector} {salt}"
    complete(http, prompt, cache_salt=salt, prompt_cache_key=key)
    store_all(http)
    post(http, "/cache/reset", tiers=["device", "cpu"])
    named = {"prompt": prompt} if selector == "prompt" else {"prompt_cache_key": key}
    other = post(http, "/cache/prefetch", **named, cache_salt="nobody's")
    assert other == {"blocks": 0, "bytes": 0}
    assert post(http, "/cache/prefetch", **named, cache_salt=salt) == {
        "blocks": 5,
        "bytes": 5 * 3072,
    }
    assert pinned(http) == {"cpu": 0, "disk": 0}
    assert complete(http, prompt, cache_salt=salt) == {"device": 20, "cpu": 0, "disk": 0}
    assert post(http, "/cache/prefetch", **named, cache_salt=salt)["blocks"] == 0


def test_a_prefetch_with_a_ttl_pins(http: httpx.Client, prompt: list[int]) -> None:
    complete(http, prompt)
    store_all(http)
    post(http, "/cache/reset", tiers=["device", "cpu"])
    assert post(http, "/cache/prefetch", prompt=prompt, ttl_seconds=60)["blocks"] == 5
    assert pinned(http) == {"cpu": 5, "disk": 5}
    assert post(http, "/cache/unpin", prompt=prompt)["blocks"] == 5


@pytest.mark.parametrize("path", ["/cache/pin", "/cache/unpin", "/cache/prefetch"])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt_cache_key"),
        ({"cache_salt": "s"}, "prompt_cache_key"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "messages"),
        ({"prompt_cache_key": "k", "prompt": "a"}, "prompt"),
        ({"prompt_cache_key": ""}, "prompt_cache_key"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": 1}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"messages": "a"}, "messages"),
        ({"prompt": "a", "salt": "s"}, "salt"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
    ],
)
def test_what_does_not_name_one_conversation_is_refused(
    http: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    response = http.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["/cache/pin", "/cache/prefetch"])
@pytest.mark.parametrize("ttl", [0, -1, "60", 1e12])
def test_a_ttl_that_is_none_is_refused(http: httpx.Client, path: str, ttl: Any) -> None:
    response = http.post(path, json={"prompt": "a", "ttl_seconds": ttl})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "ttl_seconds"


@pytest.mark.parametrize("path", ["/cache/pin", "/cache/unpin", "/cache/prefetch"])
def test_without_a_tier_it_says_what_to_configure(bare_server: LiveServer, path: str) -> None:
    with bare_server.client() as http:
        response = http.post(path, json={"prompt": "a"})
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert "--cpu-tier" in message
    assert "--disk-tier" in message


def test_a_branch_that_was_left_is_evicted_first(engine_config: EngineConfig) -> None:
    """A pool that holds both branches and little else: the next stranger costs the old one."""
    config = replace(engine_config, kv_blocks=24, max_model_len=64, cpu_tier=0)
    common, old, new = list(range(3, 11)), [50] * 16, [60] * 16
    with LiveServer(config) as live, live.client() as http:
        complete(http, [70] * 33)  # eight blocks that are older than both branches
        complete(http, [*common, *old, 4], prompt_cache_key="k")
        complete(http, [*common, *new, 4], prompt_cache_key="k")
        complete(http, [80] * 37)  # ten blocks, and six are free
        assert complete(http, [*common, *new, 4])["device"] == 24
        assert complete(http, [70] * 33)["device"] == 32
        assert complete(http, [*common, *old, 4])["device"] == 8
