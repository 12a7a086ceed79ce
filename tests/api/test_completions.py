"""`POST /v1/completions`, plain; what streaming adds is in `test_answering`."""

from __future__ import annotations

import httpx
import openai
import pytest

from tests.api.live_server import LiveServer

IDS = list(range(40, 60))


def test_the_answer_has_openais_shape(server: LiveServer, http: httpx.Client) -> None:
    response = http.post(
        "/v1/completions", json={"prompt": IDS, "max_tokens": 3, "ignore_eos": True, "seed": 1}
    )
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {
        *("id", "object", "created", "model", "system_fingerprint", "choices", "usage"),
    }
    assert body["id"].startswith("cmpl-")
    assert (body["object"], body["model"]) == ("text_completion", "tiny")
    assert body["system_fingerprint"] == server.engine.fingerprint[:16]
    (choice,) = body["choices"]
    assert choice.keys() == {"index", "text", "logprobs", "finish_reason", "stop_reason"}
    assert (choice["index"], choice["logprobs"], choice["stop_reason"]) == (0, None, None)
    assert choice["finish_reason"] == "length"


def test_usage_counts_tokens_and_what_was_cached(http: httpx.Client) -> None:
    body = {"prompt": list(range(60, 82)), "max_tokens": 3, "ignore_eos": True, "cache_salt": "u"}
    cold, warm = (http.post("/v1/completions", json=body).json()["usage"] for _ in range(2))
    details = {"reasoning_tokens": 0, "audio_tokens": 0}
    details |= {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert cold == {
        "prompt_tokens": 22,
        "completion_tokens": 3,
        "total_tokens": 25,
        "prompt_tokens_details": {
            "cached_tokens": 0,
            "cached_tokens_by_tier": {"device": 0, "cpu": 0, "disk": 0},
            "recomputed_by_choice": 0,
            "cache_write_tokens": 20,  # five blocks of four
            "audio_tokens": 0,
        },
        "completion_tokens_details": details,
    }
    assert warm["prompt_tokens_details"] == {
        "cached_tokens": 20,
        "cached_tokens_by_tier": {"device": 20, "cpu": 0, "disk": 0},
        "recomputed_by_choice": 0,
        "cache_write_tokens": 0,
        "audio_tokens": 0,
    }


def test_max_tokens_is_16_unless_told(client: openai.OpenAI) -> None:
    made = client.completions.create(model="tiny", prompt="The", extra_body={"ignore_eos": True})
    assert made.usage is not None
    assert made.usage.completion_tokens == 16


def test_the_default_length_gives_way_to_the_end_of_the_context(client: openai.OpenAI) -> None:
    made = client.completions.create(
        model="tiny", prompt=[50] * 1020, extra_body={"ignore_eos": True}
    )
    assert made.usage is not None
    assert made.usage.total_tokens == 1024


def test_no_tokens_asked_for_is_a_prefill(client: openai.OpenAI) -> None:
    made = client.completions.create(model="tiny", prompt="The store", max_tokens=0)
    (choice,) = made.choices
    assert (choice.text, choice.finish_reason) == ("", "length")
    assert made.usage is not None
    assert made.usage.completion_tokens == 0


def test_text_and_its_token_ids_are_the_same_prompt(server: LiveServer, http: httpx.Client) -> None:
    text = "The bees overwinter in the hive."
    ids = server.engine.tokenizer.encode(text)
    asked = {"max_tokens": 6, "temperature": 0, "return_token_ids": True}
    made = [
        http.post("/v1/completions", json={"prompt": prompt, **asked}).json()["choices"][0]
        for prompt in (text, ids)
    ]
    assert made[0] == made[1]
    assert made[0]["prompt_token_ids"] == ids
    assert len(made[0]["token_ids"]) <= 6


@pytest.mark.parametrize("prompts", [["The store", "A block is"], [[40, 41, 42], [50, 51]]])
def test_prompts_times_n_are_answered_in_order(http: httpx.Client, prompts: list[object]) -> None:
    asked = {"max_tokens": 4, "seed": 7, "n": 2, "return_token_ids": True, "ignore_eos": True}
    body = http.post("/v1/completions", json={"prompt": prompts, **asked}).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    alone = [
        http.post("/v1/completions", json={"prompt": p, **asked, "n": 1, "seed": seed}).json()
        for p in prompts
        for seed in (7, 8)
    ]
    for choice, single in zip(body["choices"], alone, strict=True):
        assert choice | {"index": 0} == single["choices"][0]
    # A prompt counts once however many choices it has.
    assert body["usage"]["completion_tokens"] == 16
    assert body["usage"]["prompt_tokens"] == sum(
        single["usage"]["prompt_tokens"] for single in alone[::2]
    )


def test_logprobs_have_the_drawn_token_and_the_likeliest(
    server: LiveServer, http: httpx.Client
) -> None:
    asked = {"prompt": IDS, "max_tokens": 5, "seed": 3, "ignore_eos": True, "logprobs": 2}
    body = http.post("/v1/completions", json={**asked, "return_token_ids": True}).json()
    (choice,) = body["choices"]
    logprobs = choice["logprobs"]
    assert logprobs.keys() == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    token_text = server.engine.tokenizer.token_text
    assert logprobs["tokens"] == [token_text(token) for token in choice["token_ids"]]
    offsets = [sum(map(len, logprobs["tokens"][:i])) for i in range(5)]
    assert logprobs["text_offset"] == offsets
    for text, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert logprob < 0
        assert text in top
        assert top[text] >= logprob
        assert 1 <= len(top) <= 3
        assert max(top.values()) == next(iter(top.values()))


def test_echo_scores_the_prompt(server: LiveServer, http: httpx.Client) -> None:
    """What lm-eval asks for: every prompt token scored, the first null, then one more."""
    ids = server.engine.tokenizer.encode("A hash names the block.")
    asked = {"max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
    body = http.post("/v1/completions", json={"prompt": [ids], **asked}).json()
    (choice,) = body["choices"]
    logprobs = choice["logprobs"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert len(logprobs[name]) == len(ids) + 1
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert choice["text"].startswith("A hash names the block.")
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    # The same tokens, one by one, as an answer: the greedy ones score what the echo says.
    scored = http.post(
        "/v1/completions",
        json={"prompt": ids[:-1], "max_tokens": 1, "logprobs": 20, "temperature": 0},
    ).json()["choices"][0]["logprobs"]
    top = logprobs["top_logprobs"][len(ids) - 1]
    assert max(top.values()) == pytest.approx(scored["token_logprobs"][0], abs=1e-3)


def test_echo_computes_the_whole_prompt(http: httpx.Client) -> None:
    """With or without logprobs to show for it, and the usage says so."""
    body = {"prompt": [7] * 20, "max_tokens": 1, "temperature": 0}
    cached = [
        http.post("/v1/completions", json={**body, **extra}).json()["usage"][
            "prompt_tokens_details"
        ]["cached_tokens"]
        for extra in ({}, {}, {"echo": True})
    ]
    assert cached == [0, 16, 0]


def test_echo_without_logprobs_is_the_text_as_sent(client: openai.OpenAI) -> None:
    made = client.completions.create(
        model="tiny", prompt="Numbers <|im_end|>", max_tokens=0, echo=True
    )
    assert made.choices[0].text == "Numbers <|im_end|>"
    assert made.choices[0].logprobs is None


def test_a_stop_string_ends_the_text_before_it(http: httpx.Client) -> None:
    asked = {"prompt": IDS, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    whole = http.post("/v1/completions", json=asked).json()["choices"][0]
    stop = whole["text"][10:13]
    at = whole["text"].index(stop)
    cut = http.post("/v1/completions", json={**asked, "stop": stop}).json()
    (choice,) = cut["choices"]
    assert choice["text"] == whole["text"][:at]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert cut["usage"]["completion_tokens"] <= 24


def test_a_stop_id_ends_the_answer_and_is_counted(http: httpx.Client) -> None:
    asked = {"prompt": IDS, "max_tokens": 8, "seed": 5, "ignore_eos": True}
    asked["return_token_ids"] = True
    whole = http.post("/v1/completions", json=asked).json()["choices"][0]
    stop = whole["token_ids"][3]
    length = whole["token_ids"].index(stop) + 1
    cut = http.post("/v1/completions", json={**asked, "stop_token_ids": [stop]}).json()
    (choice,) = cut["choices"]
    assert choice["token_ids"] == whole["token_ids"][:length]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert cut["usage"]["completion_tokens"] == length


def test_special_tokens_are_added_unless_told(server: LiveServer, http: httpx.Client) -> None:
    for add in (True, False):
        body = http.post(
            "/v1/completions",
            json={
                "prompt": "The",
                "max_tokens": 0,
                "return_token_ids": True,
                "add_special_tokens": add,
            },
        ).json()
        expected = server.engine.tokenizer.encode("The", add)
        assert body["choices"][0]["prompt_token_ids"] == expected


def test_null_means_absent(http: httpx.Client) -> None:
    names = ("model", "max_tokens", "temperature", "stop", "n", "stream", "logit_bias", "seed")
    names += ("suffix", "best_of", "stream_options", "logprobs", "echo", "user")
    body = {"prompt": "The", "ignore_eos": True} | dict.fromkeys(names)
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == 16


def test_any_content_type_will_do(http: httpx.Client) -> None:
    response = http.post(
        "/v1/completions",
        content=b'{"prompt": "The", "max_tokens": 0}',
        headers={"content-type": "text/plain"},
    )
    assert response.status_code == 200


def test_logit_bias_forces_a_token(http: httpx.Client) -> None:
    body = http.post(
        "/v1/completions",
        json={
            "prompt": IDS,
            "max_tokens": 2,
            "temperature": 0,
            "logit_bias": {"77": 100},
            "return_token_ids": True,
        },
    ).json()
    assert body["choices"][0]["token_ids"] == [77, 77]


def test_a_long_text_is_tokenised_alike_off_the_loop(
    server: LiveServer, http: httpx.Client
) -> None:
    text = "The store keeps what the model has read. " * 1000
    response = http.post("/tokenize", json={"prompt": text})
    assert response.json()["tokens"] == server.engine.tokenizer.encode(text)
