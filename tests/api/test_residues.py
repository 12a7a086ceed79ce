"""Committed length over HTTP: every residue, ended by length, stop id and stop string.

Token-id prompts and `return_token_ids`, so that lengths are exact; the oracle is the same server
under another `cache_salt`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from engine.config import EngineConfig
from tests import drafters
from tests.api.live_server import LiveServer
from tests.running_engine import LOGPROB_TOLERANCE

BLOCK_SIZE = 16
NUM_PROMPT = 21
LONGEST = 2 * BLOCK_SIZE
TAIL = [5, 6, 7]
DRAFTERS = ["off", "tests.drafters:AlwaysWrongDrafter", "tests.drafters:RandomAcceptanceDrafter"]


ENDINGS = ["length", "stop_id", "stop_string"]


def prompt_of(number: int, ending: str) -> list[int]:
    """A prompt that shares its first token with no other."""
    return [4 + number + 40 * ENDINGS.index(ending)] + [(13 * number + 5 * i) % 300 + 40 for i in range(NUM_PROMPT - 1)]


@pytest.fixture(scope="module", params=DRAFTERS)
def residue_server(
    request: pytest.FixtureRequest, engine_config: EngineConfig
) -> Iterator[LiveServer]:
    config = replace(
        engine_config, block_size=BLOCK_SIZE, speculative=request.param, speculative_tokens=5
    )
    with LiveServer(config) as live:
        yield live


def complete(http: httpx.Client, prompt: list[int], max_tokens: int, **extra: Any) -> Any:
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "seed": 7,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
        **extra,
    }
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def check_replay(http: httpx.Client, history: list[int], salt: str) -> None:
    """All ids plus a tail: the committed length in whole blocks, and a cold run's logprobs."""
    prompt = [*history, *TAIL]
    drafters.CONTINUATIONS.setdefault(tuple(prompt), ())
    replay = complete(http, prompt, 3, temperature=0)
    cold = complete(http, prompt, 3, temperature=0, cache_salt=salt)
    expected = (len(history) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert replay["usage"]["prompt_tokens_details"]["cached_tokens"] == expected
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    ours, theirs = replay["choices"][0], cold["choices"][0]
    assert ours["token_ids"] == theirs["token_ids"]
    pairs = zip(
        ours["logprobs"]["token_logprobs"], theirs["logprobs"]["token_logprobs"], strict=True
    )
    assert max(abs(a - b) for a, b in pairs) <= LOGPROB_TOLERANCE


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_residue(residue_server: LiveServer, ending: str) -> None:
    with residue_server.client() as http:
        for number in range(1, LONGEST + 1):
            prompt = prompt_of(number, ending)
            drafters.CONTINUATIONS.setdefault(tuple(prompt), ())
            truth = complete(http, prompt, LONGEST + 8, cache_salt=f"truth-{ending}-{number}")
            truth_ids = truth["choices"][0]["token_ids"]
            drafters.know(prompt, truth_ids)
            extra, count = limits(http, truth_ids, number, ending)
            answer = complete(http, prompt, extra.pop("max_tokens", LONGEST + 8), **extra)
            choice = answer["choices"][0]
            assert choice["token_ids"] == truth_ids[:count]
            assert choice["finish_reason"] == ("length" if ending == "length" else "stop")
            assert answer["usage"]["completion_tokens"] == count
            assert len(choice["logprobs"]["token_logprobs"]) == count
            check_replay(http, prompt + choice["token_ids"], f"{ending}-{number}")


def limits(
    http: httpx.Client, truth_ids: list[int], number: int, ending: str
) -> tuple[dict[str, Any], int]:
    """Request fields that end the answer at about `number` tokens, and at exactly how many."""
    if ending == "length":
        return {"max_tokens": number}, number
    count = number
    while truth_ids[count - 1] in truth_ids[: count - 1]:
        count += 1
    if ending == "stop_id":
        return {"stop_token_ids": [truth_ids[count - 1]]}, count
    texts = [
        http.post("/detokenize", json={"tokens": truth_ids[:length]}).json()["prompt"]
        for length in range(len(truth_ids) + 1)
    ]
    # The first text piece from `number` on that is whole and has not been seen before.
    for length in range(number, len(truth_ids) + 1):
        piece = texts[length][len(texts[length - 1]) :]
        if (
            piece
            and "\ufffd" not in texts[length]
            and texts[length].index(piece) == len(texts[length - 1])
        ):
            return {"stop": [piece]}, length
    raise AssertionError("the answer holds no piece to stop at")
