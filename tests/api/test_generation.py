"""Several engine requests as one: usage, faults, and the end of them all."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from api.errors import ApiError
from api.generation import Choice, Generation, Usage
from api.metrics import Metrics
from api.prompts import Prompt
from api.protocol import CompletionBody
from engine.config import EngineConfig
from engine.outputs import CachedTokens, FinishReason, RequestOutput, RequestTimes
from engine.sampling_params import SamplingParams
from tests.api.live_server import LiveServer

PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


def choices(prompts: list[Prompt], n: int) -> list[Choice]:
    made = [(prompt, i) for prompt in prompts for i in range(n)]
    return [Choice(index, prompt, PARAMS) for index, (prompt, _) in enumerate(made)]


def output(num_prompt: int, num_output: int, cached: CachedTokens, chosen: int) -> RequestOutput:
    return RequestOutput(
        request_id="id",
        text="",
        token_ids=[],
        logprobs=None,
        prompt_logprobs=None,
        finish_reason=FinishReason.LENGTH,
        stop_reason=None,
        error=None,
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        cached=cached,
        recomputed_by_choice=chosen,
        times=RequestTimes(0.0),
    )


def test_usage_sums_prompts_once_and_outputs_all() -> None:
    usage = Usage(choices([Prompt([1] * 10), Prompt([1] * 7)], 2), block_size=4)
    usage.update(0, output(10, 3, CachedTokens(device=4), 1))
    usage.update(1, output(10, 2, CachedTokens(device=8), 9))  # found what the first had left
    usage.update(2, output(7, 4, CachedTokens(cpu=0, disk=4), 2))
    usage.update(3, output(7, 1, CachedTokens(), 9))
    body = usage.body()
    assert (body["prompt_tokens"], body["completion_tokens"], body["total_tokens"]) == (17, 10, 27)
    assert body["prompt_tokens_details"] == {
        "cached_tokens": 8,
        "cached_tokens_by_tier": {"device": 4, "cpu": 0, "disk": 4},
        "recomputed_by_choice": 3,
        "cache_write_tokens": 4,  # the second block of the first prompt; the other's was there
        "audio_tokens": 0,
    }


def test_usage_counts_the_prompt_before_anything_came() -> None:
    usage = Usage(choices([Prompt([1] * 10)], 3), block_size=4)
    assert usage.body()["total_tokens"] == 10
    assert usage.body()["prompt_tokens_details"]["cached_tokens"] == 0


async def _refuse_the_third(server: LiveServer) -> None:
    """Submits three where the engine takes two; whoever was accepted is let go again."""
    engine = server.engine
    body = CompletionBody(prompt="x")
    three = choices([Prompt([50] * 4)], 3)
    seen = 0
    plain_submit = engine.submit

    def submit(*arguments: Any, **named: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == 3:
            raise RuntimeError("no more")
        return plain_submit(*arguments, **named)

    engine.submit = submit  # type: ignore[method-assign]
    try:
        with pytest.raises(RuntimeError):
            await Generation.start(engine, body, three, Metrics())
    finally:
        engine.submit = plain_submit  # type: ignore[method-assign]


def test_a_submission_that_fails_half_way_leaves_nothing(server: LiveServer) -> None:
    server.on_loop(_refuse_the_third(server))
    server.wait_idle()


async def _run_and_close(server: LiveServer, n: int) -> int:
    body = CompletionBody(prompt="x")
    params = SamplingParams(max_tokens=900, ignore_eos=True)
    many = [Choice(i, Prompt([50] * 4), params) for i in range(n)]
    generation = await Generation.start(server.engine, body, many, Metrics())
    seen = 0
    async for batch in generation.batches():
        seen += len(batch)
        if seen >= 2 * n:
            break
    await generation.aclose()
    await generation.aclose()
    return seen


@pytest.mark.parametrize("n", [1, 4])
def test_closing_stops_every_choice(server: LiveServer, n: int) -> None:
    assert server.on_loop(_run_and_close(server, n)) < 900
    server.wait_idle()


def test_an_engine_fault_is_told_to_everyone_now_and_later(engine_config: EngineConfig) -> None:
    body = {"prompt": "The", "max_tokens": 900, "ignore_eos": True}
    with LiveServer(engine_config) as server, server.client() as client:
        request = {**body, "stream": True, "n": 2}
        with client.stream("POST", "/v1/completions", json=request) as running:
            lines = running.iter_lines()
            next(lines)
            server.on_loop(_break(server))
            received = [line for line in lines if line]
        error = json.loads(received[-1].removeprefix("data: "))["error"]
        assert error["type"] == "server_error"
        assert client.get("/health").status_code == 503
        assert client.get("/health").json()["status"] == "failed"
        assert client.get("/ready").status_code == 503
        for asked in ({}, {"stream": True}):
            refused = client.post("/v1/completions", json={**body, **asked})
            assert refused.status_code == 500
            assert refused.json()["error"]["code"] == "internal_error"


async def _break(server: LiveServer) -> None:
    async def step() -> bool:
        raise RuntimeError("broken on purpose")

    server.engine._core.step = step  # type: ignore[method-assign]
    await asyncio.sleep(0)


async def test_a_stream_that_just_ends_is_a_fault() -> None:
    class Stream:
        def __aiter__(self) -> Stream:
            return self

        async def __anext__(self) -> RequestOutput:
            raise StopAsyncIteration

    for n in (1, 2):
        generation = Generation(choices([Prompt([1])], n), Metrics(), 4)
        generation._streams = [Stream() for _ in range(n)]  # type: ignore[misc]
        with pytest.raises(ApiError) as raised:
            await anext(generation.batches())
        assert raised.value.status == 500
