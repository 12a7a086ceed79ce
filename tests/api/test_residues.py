"""Committed length over HTTP: every residue, ended by length, stop id and stop string.

Token-id prompts and `return_token_ids`, so that lengths are exact; the oracle is the same server
under another `cache_salt`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from engine.config import EngineConfig
from tests import drafters
from tests.api.live_server import LiveServer
from tests.running_engine import LOGPROB_TOLERANCE

BLOCK_SIZE = 16
NUM_PROMPT = 21
LONGEST = 2 * BLOCK_SIZE
TAIL = [5, 6, 7]
DRAFTERS = [
    "off",
    "tests.drafters:AlwaysWrongDrafter",
    "tests.drafters:RandomAcceptanceDrafter",
]


ENDINGS = ["length", "stop_id", "stop_string"]


def prompt_of(number: int, ending: str) -> list[int]:
    """A prompt that shares its first token with no other."""
    return [4 + number + 40 * ENDINGS.index(ending)] + [
        (13 * number + 5 * i) % 300 + 40 for i in range(NUM_PROMPT - 1)
    ]


@pytest.fixture(scope="module", params=DRAFTERS)
def residue_server(
    request: pytest.FixtureRequest, engine_config: EngineConfig
) -> Iterator[LiveServer]:
    config = replace(
        engine_config,
        block_size=BLOCK_SIZE,
        speculative=request.param,
        speculative_tokens=5,
        speculative_depth="fixed",
    )
    with LiveServer(config) as live:
        yield live


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_model / "tokenizer.json"))


@pytest.fixture(scope="module")
def ascii_only(tokenizer: Tokenizer) -> dict[str, Any]:
    """Keeps a random model to tokens of printable text: any of them can be a stop string."""
    texts = {i: tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size())}
    banned = [i for i, text in texts.items() if not (text.isascii() and text.isprintable())]
    return {"logit_bias": {str(i): -100 for i in (*banned, 0, 1, 2)}}


def complete(http: httpx.Client, prompt: Any, max_tokens: int, **extra: Any) -> Any:
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


def complete_cold(
    http: httpx.Client, prompts: list[list[int]], max_tokens: int, salt: str, **extra: Any
) -> list[Any]:
    """The choices of prompts that share nothing, nothing of them cached; half of them at once."""
    choices: list[Any] = []
    for half in (prompts[: len(prompts) // 2], prompts[len(prompts) // 2 :]):
        answer = complete(http, half, max_tokens, cache_salt=salt, **extra)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        choices += answer["choices"]
    return choices


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_residue(
    residue_server: LiveServer, ascii_only: dict[str, Any], tokenizer: Tokenizer, ending: str
) -> None:
    """Replaying all ids and a tail hits the committed length and gives a cold run's logprobs."""
    prompts = [prompt_of(number, ending) for number in range(1, LONGEST + 1)]
    replays: list[list[int]] = []
    for prompt in prompts:
        drafters.CONTINUATIONS.setdefault(tuple(prompt), ())
    with residue_server.client() as http:
        truths = complete_cold(http, prompts, LONGEST + 8, f"truth-{ending}", **ascii_only)
        warm: list[Any] = []
        for number, (prompt, truth) in enumerate(zip(prompts, truths, strict=True), start=1):
            drafters.know(prompt, truth["token_ids"])
            extra, count = limits(tokenizer, truth["token_ids"], number, ending)
            max_tokens = extra.pop("max_tokens", LONGEST + 8)
            answer = complete(http, prompt, max_tokens, **extra, **ascii_only)
            choice = answer["choices"][0]
            assert choice["token_ids"] == truth["token_ids"][:count]
            assert choice["finish_reason"] == ("length" if ending == "length" else "stop")
            assert answer["usage"]["completion_tokens"] == count
            assert len(choice["logprobs"]["token_logprobs"]) == count
            history = prompt + choice["token_ids"]
            replays.append([*history, *TAIL])
            drafters.CONTINUATIONS.setdefault(tuple(replays[-1]), ())
            replay = complete(http, replays[-1], 3, temperature=0)
            expected = (len(history) - 1) // BLOCK_SIZE * BLOCK_SIZE
            assert replay["usage"]["prompt_tokens_details"]["cached_tokens"] == expected
            warm += replay["choices"]
        cold = complete_cold(http, replays, 3, f"cold-{ending}", temperature=0)
    for ours, theirs in zip(warm, cold, strict=True):
        assert ours["token_ids"] == theirs["token_ids"]
        pairs = zip(
            ours["logprobs"]["token_logprobs"], theirs["logprobs"]["token_logprobs"], strict=True
        )
        assert max(abs(a - b) for a, b in pairs) <= LOGPROB_TOLERANCE


def limits(
    tokenizer: Tokenizer, truth_ids: list[int], number: int, ending: str
) -> tuple[dict[str, Any], int]:
    """Request fields that end the answer at about `number` tokens, and at exactly how many."""
    if ending == "length":
        return {"max_tokens": number}, number
    count = number
    while truth_ids[count - 1] in truth_ids[: count - 1]:
        count += 1
    if ending == "stop_id":
        return {"stop_token_ids": [truth_ids[count - 1]]}, count
    # The first token from `number` on whose text has not been seen before.
    texts = [tokenizer.decode(truth_ids[:length]) for length in range(len(truth_ids) + 1)]
    for length in range(number, len(truth_ids) + 1):
        piece = texts[length][len(texts[length - 1]) :]
        if texts[length].index(piece) == len(texts[length - 1]):
            return {"stop": [piece]}, length
    raise AssertionError("the answer holds no piece to stop at")
