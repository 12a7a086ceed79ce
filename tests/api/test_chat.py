"""`POST /v1/chat/completions`, plain; what streaming adds is in `test_answering`."""

from __future__ import annotations

import httpx
import openai
import pytest

from tests.api.live_server import LiveServer

MESSAGES = [{"role": "user", "content": "What does the store keep?"}]
TEXT = "<|im_start|>user\nWhat does the store keep?<|im_end|>\n<|im_start|>assistant\n"


def test_the_answer_has_openais_shape(http: httpx.Client) -> None:
    body = http.post(
        "/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 3, "ignore_eos": True}
    ).json()
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"]) == ("chat.completion", "tiny")
    assert "prompt_token_ids" not in body
    (choice,) = body["choices"]
    assert choice.keys() == {"index", "message", "logprobs", "finish_reason", "stop_reason"}
    assert choice["message"].keys() == {"role", "content", "refusal"}
    assert (choice["message"]["role"], choice["message"]["refusal"]) == ("assistant", None)
    assert choice["logprobs"] is None
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 3


def test_the_template_makes_the_prompt(server: LiveServer, http: httpx.Client) -> None:
    body = http.post(
        "/v1/chat/completions",
        json={"messages": MESSAGES, "max_tokens": 2, "seed": 4, "return_token_ids": True},
    ).json()
    ids = server.engine.tokenizer.encode(TEXT, add_special_tokens=False)
    assert body["prompt_token_ids"] == ids
    assert "prompt_token_ids" not in body["choices"][0]
    asked = {"prompt": ids, "max_tokens": 2, "seed": 4, "return_token_ids": True}
    same = http.post("/v1/completions", json=asked).json()
    assert body["choices"][0]["token_ids"] == same["choices"][0]["token_ids"]
    assert body["choices"][0]["message"]["content"] == same["choices"][0]["text"]


@pytest.mark.parametrize(
    "content",
    [
        "one\ntwo",
        [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
    ],
)
def test_content_may_come_in_parts(http: httpx.Client, content: object) -> None:
    asked = {"max_tokens": 1, "return_token_ids": True}
    made = [
        http.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": text}], **asked},
        ).json()["prompt_token_ids"]
        for text in ("one\ntwo", content)
    ]
    assert made[0] == made[1]


def test_a_developer_is_a_system_to_a_template_that_does_not_know_it(http: httpx.Client) -> None:
    prompts = [
        http.post(
            "/tokenize", json={"messages": [{"role": role, "content": "Be brief."}, *MESSAGES]}
        ).json()["tokens"]
        for role in ("developer", "system")
    ]
    assert prompts[0] == prompts[1]


def test_both_names_of_the_length_work_and_the_newer_wins(client: openai.OpenAI) -> None:
    for lengths, expected in (
        ({"max_tokens": 2}, 2),
        ({"max_completion_tokens": 3}, 3),
        ({"max_tokens": 2, "max_completion_tokens": 4}, 4),
    ):
        made = client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,  # type: ignore[arg-type]
            extra_body={"ignore_eos": True, **lengths},
        )
        assert made.usage is not None
        assert made.usage.completion_tokens == expected


def test_without_a_length_the_answer_may_fill_the_context(http: httpx.Client) -> None:
    content = "x" * 950
    body = http.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": content}], "ignore_eos": True},
    ).json()
    assert body["usage"]["total_tokens"] == 1024
    assert body["choices"][0]["finish_reason"] == "length"


def test_logprobs_have_bytes_and_alternatives(server: LiveServer, http: httpx.Client) -> None:
    body = http.post(
        "/v1/chat/completions",
        json={
            "messages": MESSAGES,
            "max_tokens": 4,
            "seed": 2,
            "ignore_eos": True,
            "logprobs": True,
            "top_logprobs": 3,
            "return_token_ids": True,
        },
    ).json()
    (choice,) = body["choices"]
    assert choice["logprobs"]["refusal"] is None
    entries = choice["logprobs"]["content"]
    tokenizer = server.engine.tokenizer
    for token_id, entry in zip(choice["token_ids"], entries, strict=True):
        assert entry["token"] == tokenizer.token_text(token_id)
        assert bytes(entry["bytes"]) == tokenizer.token_bytes(token_id)
        assert entry["logprob"] < 0
        assert len(entry["top_logprobs"]) == 3
        values = [other["logprob"] for other in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        assert values[0] >= entry["logprob"]


def test_logprobs_without_alternatives(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,  # type: ignore[arg-type]
        max_tokens=2,
        logprobs=True,
        extra_body={"ignore_eos": True},
    )
    logprobs = made.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.top_logprobs for entry in logprobs.content] == [[], []]


def test_a_seed_counts_up_over_n(http: httpx.Client) -> None:
    asked = {"messages": MESSAGES, "max_tokens": 5, "ignore_eos": True, "return_token_ids": True}
    three = http.post("/v1/chat/completions", json={**asked, "n": 3, "seed": 2**64 - 2}).json()
    seeds = (2**64 - 2, 2**64 - 1, 0)  # the next after the largest is the first
    alone = [
        http.post("/v1/chat/completions", json={**asked, "seed": seed}).json() for seed in seeds
    ]
    assert [c["index"] for c in three["choices"]] == [0, 1, 2]
    for choice, single in zip(three["choices"], alone, strict=True):
        assert choice["token_ids"] == single["choices"][0]["token_ids"]
    assert three["usage"]["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"]
    assert three["usage"]["completion_tokens"] == 15


def test_values_that_ask_for_nothing_pass(http: httpx.Client) -> None:
    response = http.post(
        "/v1/chat/completions",
        json={
            "messages": MESSAGES,
            "max_tokens": 1,
            "tools": [],
            "tool_choice": "auto",
            "functions": None,
            "response_format": {"type": "text"},
            "modalities": ["text"],
            "best_of": 1,
            "store": False,
            "parallel_tool_calls": False,
            "user": "me",
            "reasoning_effort": "low",
            "metadata": {},
            "service_tier": "auto",
        },
    )
    assert response.status_code == 200, response.text
