"""`kill -9` of the whole server in the middle of saving: what comes back is right, and is used."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.cli.store import store_verify
from tests.api.command import PATIENCE, Command
from tests.running_engine import LOGPROB_TOLERANCE

NUM_ROUNDS = 3
NUM_PROMPTS = 12
BLOCK_SIZE = 4


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, 380) for _ in range(61)] for _ in range(NUM_PROMPTS)]


def complete(http: httpx.Client, prompt: list[int], salt: str | None = None) -> Any:
    body = {
        "prompt": prompt,
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
        "cache_salt": salt,
    }
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def logprobs_of(answer: Any) -> list[float]:
    values: list[float] = answer["choices"][0]["logprobs"]["token_logprobs"]
    return values


def start(model: Path, cache: Path, store: Path) -> Command:
    return Command(
        *(model, "--port", "0", "--threads", "1", "--dtype", "float32", "--block-size", BLOCK_SIZE),
        *("--kv-blocks", "128", "--cpu-tier", "64KiB", "--cache-dir", cache),
        *("--disk-tier", store, "--disk-tier-size", "64MiB", "--load-policy", "always"),
    )


def test_killed_in_the_middle_of_saving(
    tiny_llama: Path, kernel_cache: Path, tmp_path: Path
) -> None:
    kill_rounds(NUM_ROUNDS, tiny_llama, kernel_cache, tmp_path / "kv")


@pytest.mark.soak
def test_killed_a_hundred_times(tiny_llama: Path, kernel_cache: Path, tmp_path: Path) -> None:
    kill_rounds(100, tiny_llama, kernel_cache, tmp_path / "kv")


def kill_rounds(num_rounds: int, model: Path, cache: Path, store: Path) -> None:
    rng = random.Random(1)
    truths: dict[int, Any] = {}
    num_hits = 0
    for _ in range(num_rounds):
        server = start(model, cache, store)
        try:
            with httpx.Client(base_url=server.ready(), timeout=PATIENCE) as http:
                for number, prompt in enumerate(prompts()):
                    answer = complete(http, prompt)
                    truth = truths.setdefault(number, answer)
                    assert answer["choices"][0]["token_ids"] == truth["choices"][0]["token_ids"]
                    pairs = zip(logprobs_of(answer), logprobs_of(truth), strict=True)
                    assert max(abs(a - b) for a, b in pairs) <= LOGPROB_TOLERANCE
                    by_tier = answer["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]
                    num_hits += by_tier["disk"] > 0
                    if truth is answer and rng.random() < 0.25:
                        break  # killed with part of the prompts never asked
                busy = threading.Thread(target=_flood, args=(server, http.base_url, rng.random()))
                busy.start()
                time.sleep(0.3 * rng.random())
                server.process.kill()
                busy.join()
        finally:
            server.close()
        # Each block is absent or whole: a torn one would be found here, and temporaries are none.
        assert store_verify(store) == 0
    assert num_hits > 0


def _flood(server: Command, url: httpx.URL, seed: float) -> None:
    """Writes new blocks until the server dies under it."""
    rng = random.Random(seed)
    with (
        httpx.Client(base_url=url, timeout=PATIENCE) as http,
        contextlib.suppress(httpx.TransportError),
    ):
        while server.process.poll() is None:
            complete(http, [rng.randrange(3, 380) for _ in range(61)], salt="flood")
