"""`/v1/models`."""

from __future__ import annotations

import httpx
import openai

from tests.api.live_server import LiveServer


def test_every_served_name_is_listed(server: LiveServer, client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["tiny", "tiny-alias"]
    assert {model.owned_by for model in models} == {"overwinter"}
    assert models[0].to_dict()["max_model_len"] == 1024


def test_one_model(client: openai.OpenAI, http: httpx.Client) -> None:
    assert client.models.retrieve("tiny-alias").id == "tiny-alias"
    assert http.get("/models/tiny").json() == http.get("/v1/models/tiny").json()


def test_models_without_the_version(http: httpx.Client) -> None:
    assert http.get("/models").json() == http.get("/v1/models").json()


def test_answers_carry_the_name_that_was_asked_for(http: httpx.Client) -> None:
    for asked, answered in ((None, "tiny"), ("tiny-alias", "tiny-alias")):
        body = {"prompt": "x", "max_tokens": 0, "model": asked}
        assert http.post("/v1/completions", json=body).json()["model"] == answered
