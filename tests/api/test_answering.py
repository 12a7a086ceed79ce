"""Plain and streamed answers are one answer; a client that leaves stops its generation."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.api.live_server import LiveServer

MESSAGES = [{"role": "user", "content": "Where do the bees go?"}]


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream that ended well."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def joined(chunks: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """The choices of a plain answer, put together from a stream's chunks."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for piece in chunk["choices"]:
            whole = choices.setdefault(piece["index"], {"index": piece["index"], "logprobs": None})
            assert whole.get("finish_reason") is None, "nothing comes after the finish reason"
            message = piece[key] if key == "delta" else {"text": piece["text"]}
            for name, text in message.items():
                whole[name] = whole.get(name, "") + text
            for name in ("finish_reason", "stop_reason", "prompt_token_ids"):
                if name in piece:
                    assert name != "prompt_token_ids" or name not in whole
                    whole[name] = piece[name]
            if "token_ids" in piece:
                whole.setdefault("token_ids", []).extend(piece["token_ids"])
            if piece["logprobs"] is not None:
                lists = whole["logprobs"] or {}
                for name, values in piece["logprobs"].items():
                    lists[name] = None if values is None else [*lists.get(name, []), *values]
                whole["logprobs"] = lists
    return [choices[index] for index in sorted(choices)]


def both_ways(http: httpx.Client, path: str, body: dict[str, Any]) -> tuple[Any, Any]:
    plain = http.post(path, json=body)
    assert plain.status_code == 200, plain.text
    options = {"stream": True, "stream_options": {"include_usage": True}}
    return plain.json(), events(http.post(path, json={**body, **options}))


PROMPTS = st.text(
    st.sampled_from("The bees überwintern 123 é 漢字 🐝👩‍🚀"), min_size=1, max_size=24
)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    prompt=PROMPTS,
    seed=st.integers(0, 1000),
    max_tokens=st.integers(0, 20),
    n=st.integers(1, 3),
    echo=st.booleans(),
    logprobs=st.none() | st.integers(0, 3),
    stop=st.lists(st.sampled_from([" ", "e", "th", "\ufffd", "\ufffd\ufffd", "st"]), max_size=3),
)
def test_a_streamed_completion_joins_to_the_plain_one(
    http: httpx.Client, prompt: str, stop: list[str], **asked: Any
) -> None:
    body = {"prompt": prompt, "stop": stop, "return_token_ids": True, "cache_salt": "same", **asked}
    http.post("/v1/completions", json={**body, "n": 1, "max_tokens": 0, "echo": False})  # warm
    plain, chunks = both_ways(http, "/v1/completions", body)
    assert joined(chunks, "text") == plain["choices"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == plain["usage"]


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    content=PROMPTS,
    seed=st.integers(0, 1000),
    max_tokens=st.integers(1, 20),
    n=st.integers(1, 3),
    logprobs=st.booleans(),
    stop=st.lists(st.sampled_from([" ", "e", "th", "\ufffd"]), max_size=2),
)
def test_a_streamed_chat_joins_to_the_plain_one(
    http: httpx.Client, content: str, stop: list[str], **asked: Any
) -> None:
    body = {"messages": [{"role": "user", "content": content}], "stop": stop, **asked}
    body |= {"return_token_ids": True, "cache_salt": "same"}
    http.post("/v1/chat/completions", json={**body, "n": 1, "max_tokens": 1})  # warm
    plain, chunks = both_ways(http, "/v1/chat/completions", body)
    expected = [
        {
            **{name: choice[name] for name in ("index", "logprobs", "finish_reason")},
            **{name: choice[name] for name in ("token_ids", "stop_reason")},
            **{name: choice["message"][name] for name in ("role", "content")},
            "prompt_token_ids": plain["prompt_token_ids"],
        }
        for choice in plain["choices"]
    ]
    assert joined(chunks, "delta") == expected
    assert chunks[-1]["usage"] == plain["usage"]


def test_a_chat_stream_is_role_then_text_then_one_finish_then_usage(http: httpx.Client) -> None:
    body = {"messages": MESSAGES, "max_tokens": 12, "n": 2, "seed": 1, "ignore_eos": True}
    _, chunks = both_ways(http, "/v1/chat/completions", body)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    *pieces, usage = chunks
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 24
    assert {chunk["usage"] for chunk in pieces} == {None}
    for index in (0, 1):
        own = [c for chunk in pieces for c in chunk["choices"] if c["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert own[0]["logprobs"] is None
        for piece in own[1:-1]:
            assert piece["delta"].keys() == {"content"}
            assert piece["delta"]["content"]
        assert [piece["finish_reason"] for piece in own] == [None] * (len(own) - 1) + ["length"]


def test_no_chunk_of_a_completion_is_empty_but_the_last(http: httpx.Client) -> None:
    body = {"prompt": "The", "max_tokens": 20, "seed": 9, "ignore_eos": True, "stop": ["zq"]}
    _, chunks = both_ways(http, "/v1/completions", body)
    *texts, _ = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
    assert texts
    assert all(texts)


def test_usage_so_far_comes_with_every_chunk_when_asked(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"prompt": "The", "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
    chunks = events(
        http.post("/v1/completions", json={**asked, "stream": True, "stream_options": options})
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert counts[0] == len(chunks[0]["choices"][0]["token_ids"])


def test_no_usage_unless_asked(http: httpx.Client) -> None:
    body = {"prompt": "The", "max_tokens": 3, "stream": True, "ignore_eos": True}
    chunks = events(http.post("/v1/completions", json=body))
    assert all("usage" not in chunk for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_openais_client_streams(server: LiveServer) -> None:
    async with server.async_openai() as client:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,  # type: ignore[arg-type]
            max_tokens=8,
            seed=3,
            stream=True,
        )
        streamed = ""
        async for chunk in stream:
            streamed += chunk.choices[0].delta.content or ""
        plain = await client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,  # type: ignore[arg-type]
            max_tokens=8,
            seed=3,
        )
    assert streamed == plain.choices[0].message.content


LONG = {"prompt": "The", "max_tokens": 1000, "ignore_eos": True}


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_left_alone_stops(server: LiveServer, n: int) -> None:
    before = server.engine.stats().finished.get("abort", 0)
    num_streams = 2 * server.config.max_num_seqs // n
    for _ in range(num_streams):
        with (
            server.client() as client,
            client.stream("POST", "/v1/completions", json={**LONG, "n": n, "stream": True}) as got,
        ):
            assert next(got.iter_lines()).startswith("data: {")
    server.wait_idle()
    assert server.engine.stats().finished["abort"] == before + num_streams * n
    assert server.openai().completions.create(model="tiny", prompt="x", max_tokens=1).choices


@pytest.mark.parametrize("n", [1, 3])
def test_a_plain_request_left_alone_stops(server: LiveServer, n: int) -> None:
    body = json.dumps({**LONG, "n": n}).encode()
    before = server.engine.stats().finished.get("abort", 0)
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s"
            % (len(body), body)
        )
        server.wait_until(lambda: server.num_running == n)
    server.wait_idle()
    assert server.engine.stats().finished["abort"] == before + n


def test_streams_closed_while_they_wait_leave_the_queue(small_server: LiveServer) -> None:
    clients = [small_server.client() for _ in range(4)]
    streams = [
        client.stream("POST", "/v1/completions", json={**LONG, "stream": True})
        for client in clients
    ]
    for stream in streams:
        assert stream.__enter__().status_code == 200
    small_server.wait_until(lambda: (small_server.num_running, small_server.num_waiting) == (2, 2))
    for stream, client in zip(streams, clients, strict=True):
        stream.__exit__(None, None, None)
        client.close()
    small_server.wait_idle()
    probe = small_server.openai().completions.create(model="tiny", prompt="x", max_tokens=2)
    assert probe.usage is not None


def test_overload_is_an_answer_or_503_with_retry_after(small_server: LiveServer) -> None:
    held = [small_server.client() for _ in range(4)]
    streams = [
        client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) for client in held
    ]
    for stream in streams:
        stream.__enter__()
    small_server.wait_until(lambda: small_server.num_running + small_server.num_waiting == 4)
    with small_server.client() as client:
        for asked in ({}, {"stream": True}, {"n": 4}):
            refused = client.post("/v1/completions", json={**LONG, **asked})
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "queue_full"
        assert client.get("/ready").status_code == 200
    for stream, client in zip(streams, held, strict=True):
        stream.__exit__(None, None, None)
        client.close()
    small_server.wait_idle()
    with small_server.openai() as probe:
        assert probe.completions.create(model="tiny", prompt="x", max_tokens=1, n=4).choices[3]


def test_more_sequences_than_could_ever_wait_is_the_clients_fault(
    small_server: LiveServer,
) -> None:
    with small_server.openai() as client, pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model="tiny", prompt=["x"] * 5, max_tokens=1)
    assert "5 sequences" in raised.value.message
    assert "at most 4" in raised.value.message
