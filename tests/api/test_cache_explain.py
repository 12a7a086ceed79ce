"""`POST /cache/explain` takes the body of a request and says what that request then does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers

from api.gate import is_admin
from engine.config import EngineConfig
from tests.api.live_server import SETTINGS, LiveServer

SENTENCE = "When the winter comes the bees overwinter in the hive. "


def explain(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/cache/explain", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def ask(http: httpx.Client, **body: Any) -> dict[str, Any]:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    usage: dict[str, Any] = http.post(path, json={"max_tokens": 2, **body}).json()["usage"]
    return usage


def test_it_foretells_a_completion_and_a_chat(server: LiveServer, http: httpx.Client) -> None:
    chat = [{"role": "user", "content": SENTENCE}]
    for salt in ("explain", "explain too"):
        for body in (
            {"prompt": SENTENCE},
            {"prompt": SENTENCE + SENTENCE},
            {"prompt": SENTENCE, "add_special_tokens": False},
            {"messages": chat},
            {"messages": [*chat, {"role": "assistant", "content": "Yes."}, *chat]},
            {"messages": chat, "stream": True, "temperature": 0.5, "unheard_of": 1},
        ):
            for _ in range(2):
                server.wait_idle()
                foretold = explain(http, **body, cache_salt=salt)
                found = ask(http, **{**body, "stream": False}, cache_salt=salt)
                assert foretold["prompt_tokens"] == found["prompt_tokens"]
                cached = found["prompt_tokens_details"]["cached_tokens"]
                assert foretold["would_hit_tokens"] == cached
                assert len(foretold["blocks"]) == found["prompt_tokens"] // 4
            assert cached > 0


def test_it_runs_nothing(server: LiveServer, http: httpx.Client) -> None:
    prompt = list(range(200, 221))
    before = server.engine.stats()
    assert explain(http, prompt=prompt)["would_hit_tokens"] == 0
    after = server.engine.stats()
    assert after.prompt_tokens == before.prompt_tokens
    assert explain(http, prompt=prompt)["would_hit_tokens"] == 0
    blocks = explain(http, prompt=prompt)["blocks"]
    assert [block["index"] for block in blocks] == [0, 1, 2, 3, 4]
    assert blocks[0].keys() == {"index", "hash", "tiers", "reason"}
    assert {block["reason"] for block in blocks} == {"never stored"}
    assert len({block["hash"] for block in blocks}) == 5


def test_echo_computes_its_whole_prompt(http: httpx.Client) -> None:
    prompt = list(range(230, 251))
    ask(http, prompt=prompt)
    assert explain(http, prompt=prompt)["would_hit_tokens"] == 20
    echo = {"prompt": prompt, "echo": True}
    cached = ask(http, **echo)["prompt_tokens_details"]["cached_tokens"]
    assert explain(http, **echo)["would_hit_tokens"] == cached == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
        ({"prompt": [9] * 1025, "max_tokens": 0}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, "tools"),
        ({"prompt": "a", "model": "another"}, "model"),
    ],
)
def test_what_a_request_would_be_refused_for_is_refused(
    http: httpx.Client, body: dict[str, Any], param: str
) -> None:
    response = http.post("/cache/explain", json=body)
    assert response.status_code == (404 if param == "model" else 400)
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("body", [{}, {"prompt": None, "model": "tiny"}])
def test_a_question_about_nothing_is_told_what_is_missing(
    http: httpx.Client, body: dict[str, Any]
) -> None:
    error = http.post("/cache/explain", json=body).json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "missing_field")
    assert error["message"] == (
        "Give the body of the request to explain: one with 'prompt' or with 'messages'."
    )


def test_only_the_admin_key_is_told_of_other_salts(
    engine_config: EngineConfig, server: LiveServer, http: httpx.Client
) -> None:
    prompt = list(range(260, 281))
    question = {"prompt": prompt, "cache_salt": "mine"}
    ask(http, prompt=prompt, cache_salt="theirs")
    assert {b["reason"] for b in explain(http, **question)["blocks"]} == {"never stored"}
    settings = replace(SETTINGS, admin_key="root", api_keys=("user",))
    with LiveServer(engine_config, settings) as guarded:
        with guarded.client(headers={"authorization": "Bearer user"}) as user:
            ask(user, prompt=prompt, cache_salt="theirs")
            assert user.post("/cache/explain", json=question).status_code == 401
        with guarded.client(headers={"authorization": "Bearer root"}) as admin:
            reasons = {b["reason"] for b in explain(admin, **question)["blocks"]}
    assert reasons == {"stored under another cache_salt"}


@pytest.mark.parametrize(
    ("admin_key", "given", "expected"),
    [
        ("root", "Bearer root", True),
        ("root", "Bearer user", False),
        ("root", "", False),
        (None, "", False),
        (None, "Bearer ", False),
        (None, "Bearer user", False),
    ],
)
def test_who_is_an_administrator(admin_key: str | None, given: str, expected: bool) -> None:
    settings = replace(SETTINGS, admin_key=admin_key, api_keys=("user",))
    assert is_admin(settings, Headers({"authorization": given})) is expected
