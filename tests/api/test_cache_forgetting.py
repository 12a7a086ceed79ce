"""`/cache/reset` of one tenant or one conversation: all tiers, every run, nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.block_hash import root_hash
from engine.config import EngineConfig
from engine.sessions import TABLE
from offload.tier import BlockHash, OffloadError
from tests.api.live_server import LiveServer

PROMPT = list(range(100, 121))  # five whole blocks and a token


@contextmanager
def serving(config: EngineConfig) -> Iterator[tuple[LiveServer, httpx.Client]]:
    with LiveServer(config) as live, live.client() as http:
        yield live, http


@pytest.fixture
def config(engine_config: EngineConfig, tmp_path: Path) -> EngineConfig:
    return replace(engine_config, disk_tier=tmp_path / "store")


def space(live: LiveServer, salt: str | None) -> BlockHash:
    return root_hash(bytes.fromhex(live.engine.fingerprint), salt)


def post(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def cached(http: httpx.Client, prompt: list[int] = PROMPT, **fields: Any) -> int:
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
    details = post(http, "/v1/completions", **body)["usage"]["prompt_tokens_details"]
    tokens: int = details["cached_tokens"]
    return tokens


def would_hit(http: httpx.Client, prompt: list[int] = PROMPT, **fields: Any) -> int:
    tokens: int = post(http, "/cache/explain", prompt=prompt, **fields)["would_hit_tokens"]
    return tokens


def test_a_salt_is_forgotten_with_what_earlier_runs_stored(config: EngineConfig) -> None:
    with serving(config) as (_, http):
        for salt in (None, "gone", "kept"):
            assert cached(http, cache_salt=salt, prompt_cache_key="k") == 0
        post(http, "/cache/flush")
    with serving(config) as (live, http):
        cached(http, [*PROMPT, *PROMPT], cache_salt="gone")  # five blocks more, of this run
        post(http, "/cache/flush")
        dropped = post(http, "/cache/reset", cache_salt="gone")["dropped"]
        assert dropped == {"device": 10, "cpu": 10, "disk": 10}
        assert would_hit(http, cache_salt="gone") == 0
        assert would_hit(http, cache_salt="kept") == would_hit(http) == 20
        reasons = {
            block["reason"].split(" at ")[0]
            for block in post(http, "/cache/explain", prompt=PROMPT, cache_salt="gone")["blocks"]
        }
        assert reasons == {"reset in device"}
        sessions = live.engine._core._sessions
        spaces = [space(live, salt) for salt in (None, "gone", "kept")]
        assert [len(sessions.get(one, "k").chain) for one in spaces] == [5, 0, 5]
    with serving(config) as (_, http):  # as durable as it was stored
        assert cached(http, cache_salt="gone") == 0
        assert cached(http, cache_salt="kept") == cached(http) == 20


def test_a_conversation_is_forgotten_with_the_branches_it_left(config: EngineConfig) -> None:
    left, last, other = ([*PROMPT[:8], *[n] * 12, 3] for n in (50, 60, 70))
    with serving(config) as (_, http):
        cached(http, left, prompt_cache_key="k")
        cached(http, last, prompt_cache_key="k")
        cached(http, other, prompt_cache_key="l")
        cached(http, last, cache_salt="s", prompt_cache_key="k")
        post(http, "/cache/flush")
    with serving(config) as (_, http):
        dropped = post(http, "/cache/reset", prompt_cache_key="k")["dropped"]
        assert dropped == {"device": 0, "cpu": 0, "disk": 8}  # two in common, three of each branch
        for prompt in (left, last, other):
            assert would_hit(http, prompt) == 0  # the last has lost the beginning that it shared
        cached(http, PROMPT[:9])  # which comes back as soon as somebody computes it
        assert [would_hit(http, prompt) for prompt in (left, last, other)] == [8, 8, 20]
        assert would_hit(http, last, cache_salt="s") == 20
        assert post(http, "/cache/pin", prompt_cache_key="k")["blocks"] == 0
        assert post(http, "/cache/pin", prompt_cache_key="l")["blocks"] == 5  # known as before
        assert post(http, "/cache/reset", prompt_cache_key="k")["dropped"] == {
            "device": 0,
            "cpu": 0,
            "disk": 0,
        }


def test_a_reset_that_was_not_durable_can_be_tried_again(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(config) as (live, http):
        cached(http, prompt_cache_key="k")
        post(http, "/cache/flush")
        offload = live.engine._core.offload
        plain = offload.reset

        async def failing(*args: object) -> dict[str, int]:
            raise OffloadError("EIO")

        monkeypatch.setattr(offload, "reset", failing)
        assert http.post("/cache/reset", json={"prompt_cache_key": "k"}).status_code == 500
        monkeypatch.setattr(offload, "reset", plain)
        dropped = post(http, "/cache/reset", prompt_cache_key="k")["dropped"]
        assert dropped == {"device": 0, "cpu": 5, "disk": 5}


def test_a_key_is_looked_up_under_the_salt(config: EngineConfig) -> None:
    with serving(replace(config, disk_tier=None)) as (_, http):
        cached(http, prompt_cache_key="k")
        cached(http, prompt_cache_key="k", cache_salt="s")
        post(http, "/cache/flush")
        dropped = post(http, "/cache/reset", prompt_cache_key="k", cache_salt="s")["dropped"]
        assert dropped == {"device": 5, "cpu": 5}
        assert would_hit(http, cache_salt="s") == 0
        assert would_hit(http) == 20


def test_one_tier_of_one_salt(config: EngineConfig) -> None:
    with serving(config) as (live, http):
        cached(http, cache_salt="s", prompt_cache_key="k")
        cached(http, prompt_cache_key="k")
        post(http, "/cache/flush")
        dropped = post(http, "/cache/reset", cache_salt="s", tiers=["device", "cpu"])["dropped"]
        assert dropped == {"device": 5, "cpu": 5}
        tiers = [
            post(http, "/cache/explain", prompt=PROMPT, cache_salt=salt)["blocks"][0]["tiers"]
            for salt in ("s", None)
        ]
        assert tiers == [["disk"], ["device", "cpu", "disk"]]
        # Not all is gone, so what a later reset has to find is still known.
        assert post(http, "/cache/pin", cache_salt="s", prompt_cache_key="k")["blocks"] == 5
        assert live.engine._parts.side.items(TABLE, space(live, "s"))


def test_pinned_blocks_are_forgotten_too(config: EngineConfig) -> None:
    with serving(config) as (_, http):
        cached(http, cache_salt="s", prompt_cache_key="k")
        post(http, "/cache/flush")
        assert post(http, "/cache/pin", cache_salt="s", prompt_cache_key="k")["blocks"] == 5
        dropped = post(http, "/cache/reset", cache_salt="s")["dropped"]
        assert dropped == {"device": 5, "cpu": 5, "disk": 5}
        assert post(http, "/cache/unpin", cache_salt="s", prompt_cache_key="k")["blocks"] == 0
        assert cached(http, cache_salt="s") == 0


@pytest.mark.parametrize("selector", [{"cache_salt": "s"}, {"prompt_cache_key": "k"}])
def test_a_running_request_goes_on_and_leaves_nothing_of_before(
    config: EngineConfig, selector: dict[str, str]
) -> None:
    fields = {"cache_salt": "s", "prompt_cache_key": "k"}
    with serving(replace(config, disk_tier=None)) as (live, http):
        body = {"prompt": PROMPT, "max_tokens": 600, "ignore_eos": True, "stream": True, **fields}
        with http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)  # the prompt is computed
            post(http, "/cache/reset", **{"cache_salt": "s", **selector})
            rest = list(lines)
        assert rest[-2] == "data: [DONE]"
        live.wait_idle()
        post(http, "/cache/flush")
        assert cached(http, cache_salt="s") == 0
        assert cached(http, cache_salt="s") == 20
