"""What a client at fault is told: status, field and mend, in OpenAI's shape."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from api import errors
from api.errors import ApiError
from api.protocol import ChatBody, CompletionBody
from engine.config import EngineConfig
from engine.errors import (
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
)
from tests.api.live_server import SETTINGS, LiveServer

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def refused(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"prompt": None}, "prompt", "required"),
        ({"prompt": 5}, "prompt", "list of token ids"),
        ({"prompt": []}, "prompt", "list of token ids"),
        ({"prompt": {}}, "prompt", "list of token ids"),
        ({"prompt": ["a", 1]}, "prompt", "list of token ids"),
        ({"prompt": [1, True]}, "prompt", "list of token ids"),
        ({"prompt": [1.5]}, "prompt", "list of token ids"),
        ({"prompt": [-1]}, "prompt", "list of token ids"),
        ({"prompt": [[]]}, "prompt", "no tokens"),
        ({"prompt": ""}, "prompt", "no tokens"),
        ({"prompt": [384]}, "prompt", "384"),
        ({"prompt": [[1], [10**30]]}, "prompt", "list of token ids"),
        ({"max_tokens": "5"}, "max_tokens", "integer"),
        ({"max_tokens": 1.5}, "max_tokens", "integer"),
        ({"max_tokens": True}, "max_tokens", "integer"),
        ({"max_tokens": -1}, "max_tokens", "negative"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "negative"),
        ({"max_tokens": 10**30}, "max_tokens", "integer"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "exceed"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"temperature": -0.1}, "temperature", "[0, 100]"),
        ({"temperature": 1e300}, "temperature", "[0, 100]"),
        ({"top_p": 0}, "top_p", "(0, 1]"),
        ({"top_p": 1.1}, "top_p", "(0, 1]"),
        ({"top_k": -2}, "top_k", "-1"),
        ({"min_p": 2}, "min_p", "[0, 1]"),
        ({"repetition_penalty": 0}, "repetition_penalty", "(0, 100]"),
        ({"presence_penalty": 2.1}, "presence_penalty", "[-2, 2]"),
        ({"frequency_penalty": -2.1}, "frequency_penalty", "[-2, 2]"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 129}, "n", "less than or equal to 128"),
        ({"n": 100}, "n", "at most 24"),
        ({"seed": "x"}, "seed", "integer"),
        ({"seed": -(2**63)}, None, None),
        ({"stop": 5}, "stop", "string"),
        ({"stop": [5]}, "stop", "string"),
        ({"stop": ""}, "stop", "empty"),
        ({"stop": ["a"] * 17}, "stop", "16"),
        ({"stop_token_ids": [384]}, "stop_token_ids", "384"),
        ({"stop_token_ids": "x"}, "stop_token_ids", "token ids"),
        ({"logit_bias": {"384": 1}}, "logit_bias", "384"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "'x'"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "-100"),
        ({"logit_bias": {"1": "1"}}, "logit_bias", "numbers"),
        ({"logit_bias": [1]}, "logit_bias", "object"),
        ({"logprobs": 21}, "logprobs", "20"),
        ({"logprobs": True}, "logprobs", "integer"),
        ({"echo": "yes"}, "echo", "boolean"),
        ({"stream": 1}, "stream", "boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "'stream'"),
        ({"stream": True, "stream_options": 5}, "stream_options", "dictionary"),
        (
            {"stream": True, "stream_options": {"include_usage": 1}},
            "stream_options.include_usage",
            "boolean",
        ),
        ({"priority": "high"}, "priority", "integer"),
        ({"cache_salt": ""}, "cache_salt", "at least 1"),
        ({"model": 5}, "model", "string"),
        ({"best_of": 2}, "best_of", "not supported"),
        ({"suffix": "end"}, "suffix", "not supported"),
        ({"use_beam_search": True}, "use_beam_search", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"guided_regex": "a*"}, "guided_regex", "not supported"),
        ({"skip_special_tokens": False}, "skip_special_tokens", "not supported"),
    ],
)
def test_bad_completion_bodies(
    http: httpx.Client, fields: dict[str, Any], param: str | None, said: str | None
) -> None:
    response = http.post(COMPLETIONS, json={"prompt": "The", "max_tokens": 1, **fields})
    if param is None:
        assert response.status_code == 200, response.text
        return
    error = refused(response, 400)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert said is not None
    assert said in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        (
            {
                "messages": [
                    {"role": "system", "content": "x"},
                    {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
                ]
            },
            "messages[1].content[0].type",
        ),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"store": True}, "store"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
    ],
)
def test_bad_chat_bodies(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, **fields}
    assert refused(http.post(CHAT, json=body), 400)["param"] == param


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize", "/cache/reset"])
@pytest.mark.parametrize(
    "raw",
    [
        b"{",
        b"\xff{}",
        b'{"prompt": NaN}',
        b'{"temperature": 1e999}',
        b'{"prompt": "\\ud800"}',
        b'"prompt"',
        b"[]",
        b"null",
        b"[" * 5000,
    ],
)
def test_bodies_that_are_no_json_object(http: httpx.Client, path: str, raw: bytes) -> None:
    error = refused(http.post(path, content=raw), 400)
    assert (error["param"], error["code"]) == (None, "invalid_json")


def test_an_empty_body_is_no_request(http: httpx.Client) -> None:
    assert refused(http.post(COMPLETIONS), 400)["code"] == "invalid_json"


def test_unknown_models_and_paths(client: openai.OpenAI, http: httpx.Client) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        client.completions.create(model="gpt-9", prompt="x")
    assert raised.value.code == "model_not_found"
    assert raised.value.param == "model"
    assert "tiny, tiny-alias" in raised.value.message
    refused(http.get("/v1/models/gpt-9"), 404)
    refused(http.get("/nowhere"), 404)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", COMPLETIONS, "POST"), ("DELETE", "/cache/stats", "GET"), ("PUT", "/health", "GET")],
)
def test_a_wrong_method_is_told_the_right_one(
    http: httpx.Client, method: str, path: str, allowed: str
) -> None:
    response = http.request(method, path)
    assert response.headers["allow"] == allowed
    assert refused(response, 405) == {
        "message": f"{path} takes {allowed}, not {method}.",
        "type": "invalid_request_error",
        "param": None,
        "code": "method_not_allowed",
    }


SEEDS = (
    "Invalid value for 'seed': give an integer from -9223372036854775808 to 18446744073709551615."
)
SHAPES = (
    "; it must be a string, a list of strings, a list of token ids (integers from 0 up) or a list "
    "of such lists."
)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seed": -(2**63) - 1}, SEEDS),
        ({"seed": 2**64}, SEEDS),
        ({"seed": 1.5}, SEEDS),
        ({"seed": True}, SEEDS),
        ({"prompt": 5}, "'prompt' is 5" + SHAPES),
        ({"prompt": {}}, "'prompt' is an object" + SHAPES),
        ({"prompt": []}, "'prompt' is an empty list" + SHAPES),
        ({"prompt": ["a", None]}, "'prompt[1]' is null" + SHAPES),
        ({"prompt": ["a", {}]}, "'prompt[1]' is an object" + SHAPES),
        ({"prompt": ["a", "b", 7]}, "'prompt[2]' is 7 and 'prompt[0]' is a string" + SHAPES),
        ({"prompt": [7, "a"]}, "'prompt[1]' is a string and 'prompt[0]' is 7" + SHAPES),
        ({"prompt": [7, [7]]}, "'prompt[1]' is a list and 'prompt[0]' is 7" + SHAPES),
        ({"prompt": [7, 1, True]}, "'prompt[2]' is true" + SHAPES),
        ({"prompt": [7, -1]}, "'prompt[1]' is -1" + SHAPES),
        ({"prompt": [[7], [7, 8, 1.5]]}, "'prompt[1][2]' is 1.5" + SHAPES),
        ({"prompt": [[7], [None]]}, "'prompt[1][0]' is null" + SHAPES),
    ],
)
def test_what_does_not_fit_is_named(
    http: httpx.Client, fields: dict[str, Any], message: str
) -> None:
    error = refused(http.post(COMPLETIONS, json={"prompt": "The", **fields}), 400)
    (field,) = fields
    assert (error["message"], error["param"]) == (message, field)
    assert error["code"] == "invalid_value"


def test_an_empty_cache_key_is_no_name(http: httpx.Client) -> None:
    """A request without one; and a selector that names nothing."""
    for body in (CompletionBody, ChatBody):
        given = {"prompt": "x", "messages": [], "prompt_cache_key": ""}
        assert body.model_validate(given).prompt_cache_key is None
        assert body.model_validate(given | {"prompt_cache_key": " "}).prompt_cache_key == " "
    for path in ("/cache/pin", "/cache/unpin", "/cache/prefetch", "/cache/reset"):
        error = refused(http.post(path, json={"prompt_cache_key": ""}), 400)
        assert (error["message"], error["param"]) == (
            "Invalid value for 'prompt_cache_key': string should have at least 1 character.",
            "prompt_cache_key",
        )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [50] * 1025, "max_tokens": 0}, "prompt"),
        ({"prompt": [50] * 1024}, "prompt"),
        ({"prompt": [50] * 1000, "max_tokens": 25}, "max_tokens"),
        ({"prompt": [50] * 1000, "max_completion_tokens": 25}, "max_completion_tokens"),
        ({"prompt": [[50], [50] * 1000], "max_tokens": 25}, "max_tokens"),
    ],
)
def test_too_long_names_both_numbers(
    http: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    error = refused(http.post(COMPLETIONS, json=fields), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == param
    prompt = fields["prompt"]
    longest = prompt if isinstance(prompt[0], int) else max(prompt, key=len)
    assert str(len(longest)) in error["message"]
    assert "1024" in error["message"]


def test_a_chat_that_is_too_long_names_both_numbers(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "é" * 2000}]
    count = http.post("/tokenize", json={"messages": messages}).json()["count"]
    error = refused(http.post(CHAT, json={"messages": messages}), 400)
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    assert str(count) in error["message"]
    assert "1024" in error["message"]


@pytest.mark.parametrize("text", ["word and word " * 200_000, " " * 3_000_000])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_hopeless_text_is_refused_by_its_beginning(
    server: LiveServer, http: httpx.Client, path: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megabytes are not tokenised only to learn that they do not fit."""
    seen: list[int] = []
    tokenizer = server.engine.tokenizer
    plain_encode = tokenizer.encode

    def encode(part: str, add_special_tokens: bool = True) -> list[int]:
        seen.append(len(part))
        return plain_encode(part, add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode", encode)
    body = (
        {"prompt": text}
        if path == COMPLETIONS
        else {"messages": [{"role": "user", "content": text}]}
    )
    error = refused(http.post(path, json=body), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == ("prompt" if path == COMPLETIONS else "messages")
    assert "more than" in error["message"]
    assert "1024" in error["message"]
    assert seen == [8 * 1024]


def test_a_client_that_leaves_in_its_body_is_no_failure(server: LiveServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{"
        )
    gone = 'vllm:api_responses_total{engine="0",model_name="tiny",status="499"}'

    def counted() -> bool:
        with server.client() as http:
            return any(line.startswith(gone) for line in http.get("/metrics").text.splitlines())

    server.wait_until(counted)


def test_a_full_context_is_served(http: httpx.Client) -> None:
    fits = {"prompt": [50] * 1000, "max_tokens": 24, "ignore_eos": True}
    assert http.post(COMPLETIONS, json=fits).json()["usage"]["total_tokens"] == 1024
    whole = {"prompt": [50] * 1024, "max_tokens": 0}
    assert http.post(COMPLETIONS, json=whole).status_code == 200


def test_a_body_over_the_limit(engine_config: EngineConfig) -> None:
    settings = replace(SETTINGS, max_body_bytes=1000)
    with LiveServer(engine_config, settings) as server, server.client() as client:
        at_limit = json.dumps({"prompt": "x", "max_tokens": 0}).ljust(1000)
        assert client.post(COMPLETIONS, content=at_limit).status_code == 200
        over = refused(client.post(COMPLETIONS, content=at_limit + " "), 413)
        assert over["code"] == "request_too_large"
        assert "1000" in over["message"]
        chunked = client.post(COMPLETIONS, content=iter([b" " * 600] * 1000))
        refused(chunked, 413)
        assert client.post(COMPLETIONS, content=at_limit).status_code == 200


def test_a_request_over_the_time_limit_stops(engine_config: EngineConfig) -> None:
    body = {"prompt": "The", "max_tokens": 1000, "ignore_eos": True}
    settings = replace(SETTINGS, request_timeout=0.1)
    with LiveServer(engine_config, settings) as server, server.client() as client:
        plain = client.post(COMPLETIONS, json=body)
        assert refused(plain, 504)["code"] == "request_timeout"
        assert plain.headers["x-should-retry"] == "false"
        server.wait_idle()
        streamed = client.post(COMPLETIONS, json={**body, "stream": True})
        server.wait_idle()
        quick = client.post(COMPLETIONS, json={**body, "max_tokens": 1})
        assert quick.status_code == 200
    *chunks, last = streamed.text.removesuffix("\n\n").split("\n\n")
    assert chunks
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_timeout"


def test_unknown_fields_are_ignored_and_counted(http: httpx.Client) -> None:
    for _ in range(2):
        body = {"prompt": "The", "max_tokens": 0, "some_new_thing": 1}
        assert http.post(COMPLETIONS, json=body).status_code == 200
    counted = [line for line in http.get("/metrics").text.splitlines() if "some_new_thing" in line]
    assert counted == [
        'vllm:api_ignored_fields_total{engine="0",field="some_new_thing",model_name="tiny"} 2.0'
    ]


@pytest.mark.parametrize(
    ("raised", "status", "code", "param"),
    [
        (InvalidRequestError("no", "n", "c"), 400, "c", "n"),
        (QueueFullError("full", 2.5), 503, "queue_full", None),
        (EngineClosedError("closed"), 503, "draining", None),
        (EngineDeadError("dead"), 500, "internal_error", None),
        (ValueError("secret"), 500, "internal_error", None),
    ],
)
def test_what_the_engine_raises_has_a_status(
    raised: Exception, status: int, code: str, param: str | None
) -> None:
    told = errors.from_engine(raised)
    assert (told.status, told.code, told.param) == (status, code, param)
    assert "secret" not in told.message
    if isinstance(raised, QueueFullError):
        assert told.headers == {"retry-after": "3"}
    mine = ApiError(418, "tea", "t")
    assert errors.from_engine(mine) is mine
