"""`/tokenize`, `/detokenize`, `/tokenizer_info`."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.api.live_server import LiveServer


def test_tokenize_a_prompt(server: LiveServer, http: httpx.Client) -> None:
    text = "Numbers such as 456 🐝"
    for given, add in (({}, True), ({"add_special_tokens": False}, False)):
        body = http.post("/tokenize", json={"prompt": text, **given}).json()
        ids = server.engine.tokenizer.encode(text, add)
        assert body == {"tokens": ids, "count": len(ids), "max_model_len": 1024}


def test_tokenize_messages(server: LiveServer, http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    body = http.post("/tokenize", json={"messages": messages}).json()
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert body["tokens"] == server.engine.tokenizer.encode(text, False)


@pytest.mark.parametrize("text", ["", "The hive", "<|im_start|>user", "é漢🐝\n"])
def test_detokenize_gives_back_what_was_tokenized(http: httpx.Client, text: str) -> None:
    tokens = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
    back = http.post("/detokenize", json={"tokens": tokens["tokens"]}).json()
    assert back == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": ["x"]}, "prompt"),
        ("/tokenize", {"messages": "x"}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [384]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
def test_bad_bodies(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    response = http.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_what_a_remote_scorer_needs(server: LiveServer, http: httpx.Client) -> None:
    body = http.get("/tokenizer_info").json()
    tokenizer = server.engine.tokenizer
    assert body["tokenizer_class"] == tokenizer.class_name
    assert body["eos_token"] == "<|im_end|>"
    assert body["bos_token"] == "<|im_start|>"
    assert body["pad_token"] == "<|endoftext|>"
    assert body["chat_template"] == tokenizer.chat_template
    assert body["eos_token_id"] == 2
