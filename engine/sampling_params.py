"""What a request asks of the sampler. Plain data, validated once, shared by every layer above."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from engine.errors import InvalidRequestError

MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1  # signed or unsigned, as clients draw them
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters with OpenAI's defaults; `top_k` 0 or -1 means no limit.

    `logprobs` is the number of alternatives per returned token (0: the drawn token alone,
    None: none at all); `prompt_logprobs` the same for the prompt's tokens. `max_tokens` None means
    as many as fit; 0 means prefill only. Raises `InvalidRequestError` naming the field.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        self._check_range("temperature", self.temperature, 0.0, 100.0)
        self._check_range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        self._check_range("min_p", self.min_p, 0.0, 1.0)
        self._check_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_open=True)
        self._check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self._check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.top_k < -1:
            raise InvalidRequestError("top_k must be -1, 0 (both: no limit) or positive", "top_k")
        if self.max_tokens is not None and self.max_tokens < 0:
            raise InvalidRequestError("max_tokens must not be negative", "max_tokens")
        if self.min_tokens < 0:
            raise InvalidRequestError("min_tokens must not be negative", "min_tokens")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError("min_tokens must not exceed max_tokens", "min_tokens")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_LOGPROBS:
                raise InvalidRequestError(f"{name} must be between 0 and {MAX_LOGPROBS}", name)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(f"stop takes at most {MAX_STOP_STRINGS} strings", "stop")
        if any(not text for text in self.stop):
            raise InvalidRequestError("stop must not hold an empty string", "stop")
        if self.seed is not None and not MIN_SEED <= self.seed <= MAX_SEED:
            raise InvalidRequestError(f"seed must be from {MIN_SEED} to {MAX_SEED}", "seed")
        for token_id, bias in self.logit_bias.items():
            if token_id < 0 or not -100.0 <= bias <= 100.0:
                raise InvalidRequestError(
                    "logit_bias maps token ids to values between -100 and 100", "logit_bias"
                )

    @staticmethod
    def _check_range(
        name: str, value: float, low: float, high: float, low_open: bool = False
    ) -> None:
        if not math.isfinite(value) or value > high or value < low or (low_open and value == low):
            bracket = "(" if low_open else "["
            raise InvalidRequestError(f"{name} must be in {bracket}{low:g}, {high:g}]", name)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0
