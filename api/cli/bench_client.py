"""One measured request against a running server, and the proof that its answer was whole."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from api.cli.client import aiter_events, describe, error_message

TIERS = ("device", "cpu", "disk")


@dataclass(slots=True)
class Measured:
    """One request. Times are seconds; `arrivals` are those of its chunks with tokens, from 0."""

    conversation: int
    turn: int
    num_prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    seconds: float = 0.0
    cached_by_tier: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    recomputed_by_choice: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.arrivals[0]

    @property
    def gaps(self) -> list[float]:
        """Times between consecutive chunks."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Mean time per token after the first; None for a single token."""
        if len(self.token_ids) < 2 or len(self.arrivals) < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (len(self.token_ids) - 1)


@dataclass(frozen=True, slots=True)
class Target:
    """What every request of a run has in common."""

    url: str
    model: str
    output_tokens: int
    cache_salt: str


async def measure(
    client: httpx.AsyncClient, target: Target, prompt: list[int], measured: Measured, group: str
) -> None:
    """Sends `prompt` and fills in `measured`; a failure is its `error`, never an exception.

    Cancellation closes the connection, which stops the generation.
    """
    body = {
        "model": target.model,
        "prompt": prompt,
        "max_tokens": target.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "cache_salt": target.cache_salt,
        "prompt_cache_key": group,
    }
    started = time.perf_counter()
    usage: dict[str, Any] | None = None
    finish: str | None = None
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                measured.error = error_message(response.status_code, await response.aread())
                return
            async for event in aiter_events(response):
                if "error" in event:
                    measured.error = str(event["error"].get("message", event["error"]))
                    return
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    finish = choice.get("finish_reason") or finish
                    if token_ids := choice.get("token_ids"):
                        measured.arrivals.append(time.perf_counter() - started)
                        measured.token_ids += token_ids
    except (httpx.HTTPError, ConnectionError, ValueError) as error:
        measured.error = describe(error, target.url)
        return
    finally:
        measured.seconds = time.perf_counter() - started
    measured.error = _fault(measured, target, usage, finish)


def _fault(
    measured: Measured, target: Target, usage: dict[str, Any] | None, finish: str | None
) -> str | None:
    """Why the answer is not what was asked for; None if it is. Takes over the cached tokens."""
    if len(measured.token_ids) != target.output_tokens:
        return f"{len(measured.token_ids)} tokens instead of {target.output_tokens}"
    if finish != "length":
        return f"finish reason {finish!r} instead of 'length'"
    if usage is None:
        return "no usage chunk"
    if usage["prompt_tokens"] != measured.num_prompt_tokens:
        return f"{usage['prompt_tokens']} prompt tokens instead of {measured.num_prompt_tokens}"
    if usage["completion_tokens"] != target.output_tokens:
        return f"usage counts {usage['completion_tokens']} tokens"
    details = usage.get("prompt_tokens_details") or {}
    by_tier = details.get("cached_tokens_by_tier") or {}
    measured.cached_by_tier |= by_tier
    measured.recomputed_by_choice = details.get("recomputed_by_choice", 0)
    if by_tier and sum(by_tier.values()) != details.get("cached_tokens"):
        return f"tiers {by_tier} do not sum to {details.get('cached_tokens')} cached tokens"
    return None
