"""Bodies: what is known, what is ignored, what the OpenAPI page says."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api.body import parse
from api.metrics import Metrics
from api.protocol import ChatBody, CompletionBody


def test_unknown_fields_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            parse(CompletionBody, {"prompt": "x", "brand_new": 1, "user": "me"}, metrics)
    assert [record.getMessage() for record in caplog.records] == [
        "Ignoring the unknown body field 'brand_new' (logged once)"
    ]
    assert metrics.ignored_fields == {"brand_new": 3}


def test_defaults_are_openais() -> None:
    body = parse(ChatBody, {"messages": []}, Metrics())
    assert (body.temperature, body.top_p, body.n, body.stream) == (1.0, 1.0, 1, False)
    assert (body.asked_max_tokens, body.max_tokens_field) == (None, "max_tokens")
    assert body.add_special_tokens is False
    assert parse(CompletionBody, {"prompt": ""}, Metrics()).add_special_tokens is True


def test_whole_numbers_are_numbers() -> None:
    body = parse(CompletionBody, {"prompt": "x", "temperature": 0, "top_p": 1}, Metrics())
    assert (body.temperature, body.top_p) == (0.0, 1.0)


NAMES = sorted(
    {*CompletionBody.model_fields, *CompletionBody.unsupported}
    | {*ChatBody.model_fields, *ChatBody.unsupported}
    - {"max_completion_tokens", "n"}  # valid large ones would only take long
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.integers(-3, 400)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    path=st.sampled_from(["completions", "chat/completions"]),
    fields=st.dictionaries(st.sampled_from(NAMES), VALUES, min_size=1, max_size=3),
)
def test_no_body_makes_the_server_fail(
    http: httpx.Client, path: str, fields: dict[str, Any]
) -> None:
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], **fields}
    response = http.post(f"/v1/{path}", json={**body, "max_tokens": 1})
    assert response.status_code in (200, 400, 404), (body, response.text)
    if response.status_code != 200:
        assert response.json()["error"]["message"]


def test_the_openapi_page_stands_alone(http: httpx.Client) -> None:
    page = http.get("/openapi.json").json()
    schema = page["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]
    fields = schema["application/json"]["schema"]["properties"]
    assert fields.keys() >= {"messages", "max_completion_tokens", "top_k", "cache_salt"}
    assert "include_usage" in str(fields["stream_options"])

    def references(node: Any) -> list[str]:
        if isinstance(node, dict):
            own = [node["$ref"]] if "$ref" in node else []
            return own + [found for value in node.values() for found in references(value)]
        if isinstance(node, list):
            return [found for value in node for found in references(value)]
        return []

    known = page.get("components", {}).get("schemas", {})
    assert all(reference.rpartition("/")[2] in known for reference in references(page))
