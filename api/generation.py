"""One HTTP request as engine requests: one per choice, started together, ended together."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from api import errors
from api.metrics import Metrics, TokenClock
from api.prompts import Prompt, check_token_ids
from api.protocol import GenerationBody
from engine.errors import InvalidRequestError
from engine.outputs import FinishReason, RequestOutput
from engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from engine.async_engine import AsyncEngine, RequestStream

SEED_RANGE = 1 << 64


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice of the answer; `index` counts prompts first, then the `n` of each."""

    index: int
    prompt: Prompt
    params: SamplingParams


def sampling_params(
    body: GenerationBody,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """The sampler's view of `body`. Raises `InvalidRequestError` in the client's field names."""
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=body.min_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias=body.logit_bias,
            seed=body.seed,
            stop=tuple(body.stop),
            stop_token_ids=tuple(body.stop_token_ids),
            ignore_eos=body.ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
    except InvalidRequestError as error:
        param = body.max_tokens_field if error.param == "max_tokens" else error.param
        raise InvalidRequestError(str(error), param, error.code) from None


def choices_of(
    engine: AsyncEngine, prompts: Sequence[Prompt], params: SamplingParams, n: int
) -> list[Choice]:
    """`n` choices for each prompt; a seed counts up over the `n`. Raises `ApiError` 400."""
    check_token_ids(engine, params.stop_token_ids, "stop_token_ids")
    check_token_ids(engine, list(params.logit_bias), "logit_bias")
    variants = [params]
    if params.seed is not None:
        seeds = ((params.seed + i) % SEED_RANGE for i in range(1, n))
        variants += [replace(params, seed=seed) for seed in seeds]
    else:
        variants *= n
    return [
        Choice(index * n + i, prompt, variants[i])
        for index, prompt in enumerate(prompts)
        for i in range(n)
    ]


def check_room(engine: AsyncEngine, num_sequences: int) -> None:
    """Raises `ApiError` 400 where so many can never be taken at once, and `QueueFullError` where
    they cannot now: before anything is tokenised, so that refusing stays cheap."""
    most = engine.config.max_num_seqs + engine.config.max_queue
    if num_sequences > most:
        raise errors.invalid_request(
            f"The request asks for {num_sequences} sequences (prompts times n), but this server "
            f"takes at most {most} at once; split it.",
            "n",
            "too_many_sequences",
        )
    engine.check_capacity(num_sequences)


class Generation:
    """The running engine requests of one HTTP request. Whoever starts it must `aclose` it."""

    def __init__(self, choices: Sequence[Choice], metrics: Metrics, block_size: int) -> None:
        self.id = uuid.uuid4().hex
        self.choices = choices
        self.usage = Usage(choices, block_size)
        self._metrics = metrics
        self._clocks = [TokenClock(metrics) for _ in choices]
        self._streams: list[RequestStream] = []
        self._answers = [_Answer() for _ in choices]  # to those who are to be told

    @classmethod
    async def start(
        cls, engine: AsyncEngine, body: GenerationBody, choices: Sequence[Choice], metrics: Metrics
    ) -> Generation:
        """Submits all choices or none. Raises what the engine raises on submission."""
        generation = cls(choices, metrics, engine.config.block_size)
        engine.check_capacity(len(choices))
        try:
            for choice in choices:
                stream = engine.submit(
                    choice.prompt.token_ids,
                    choice.params,
                    request_id=f"{generation.id}-{choice.index}",
                    priority=body.priority,
                    cache_salt=body.cache_salt,
                    prompt_cache_key=body.prompt_cache_key,
                )
                generation._streams.append(stream)
        except BaseException:
            await generation.aclose()
            raise
        return generation

    async def batches(self) -> AsyncGenerator[list[tuple[Choice, RequestOutput]], None]:
        """What the choices have newly produced, in order within each choice; ends with the last.

        Raises `ApiError` as soon as one choice fails: the answer could not be whole any more.
        """
        source = _one(self._streams[0]) if len(self._streams) == 1 else _all(self._streams)
        async with aclosing(source):
            async for batch in source:
                for index, output in batch:
                    self._observe(index, output)
                yield [(self.choices[index], output) for index, output in batch]

    def _observe(self, index: int, output: RequestOutput) -> None:
        self._clocks[index].tick(len(output.token_ids))
        self.usage.update(index, output)
        if self.choices[index].prompt.conversation is not None:
            answer = self._answers[index]
            answer.token_ids += output.token_ids
            answer.text += output.text
            if output.finish_reason is not None:
                self._tell(index, output.finish_reason)
        if output.finish_reason is None:
            return
        self._metrics.observe_finished(output)
        if output.finish_reason is FinishReason.ABORT:
            raise errors.unavailable(
                "The server stopped this request because it is shutting down.", "aborted", 5.0
            )
        if output.finish_reason is FinishReason.ERROR:
            raise errors.internal(f"Generation failed: {output.error or 'engine fault'}.")

    def _tell(self, index: int, reason: FinishReason | None) -> None:
        """The conversation learns what was generated, once."""
        answer, conversation = self._answers[index], self.choices[index].prompt.conversation
        if conversation is not None and not answer.is_told:
            answer.is_told = True
            is_only = len(self.choices) == 1
            conversation.answered(answer.token_ids, answer.text, reason, is_only=is_only)

    async def aclose(self) -> None:
        """Stops what still runs. Harmless when everything has ended, and when called again."""
        streams, self._streams = self._streams, []
        for index, stream in enumerate(streams):
            self._tell(index, None)
            await stream.aclose()


@dataclass(slots=True)
class _Answer:
    """What one choice has generated so far."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    is_told: bool = False


async def _one(stream: RequestStream) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]:
    async for output in stream:
        yield [(0, output)]
        if output.finish_reason is not None:
            return
    raise errors.internal("Generation ended without a finish reason.")


async def _all(
    streams: Sequence[RequestStream],
) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]:
    """Whatever is ready, from all streams, as one batch."""
    ready: list[tuple[int, RequestOutput]] = []
    failures: list[BaseException] = []
    news = asyncio.Event()

    async def pump(index: int, stream: RequestStream) -> None:
        try:
            async for batch in _one(stream):
                ready.extend((index, output) for _, output in batch)
                news.set()
        except Exception as error:
            failures.append(error)
            news.set()

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    num_running = len(streams)
    try:
        while num_running:
            await news.wait()
            news.clear()
            batch = ready.copy()
            ready.clear()
            num_running -= sum(output.finish_reason is not None for _, output in batch)
            if batch:
                yield batch
            if failures:
                raise failures[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Usage:
    """Running totals over all choices.

    A prompt is counted once however many choices it has, and what was cached of it is what its
    first choice found.
    """

    def __init__(self, choices: Sequence[Choice], block_size: int) -> None:
        self._block_size = block_size
        self._first: dict[int, RequestOutput | None] = {}
        self._num_prompt_tokens = 0
        seen: set[int] = set()
        for position, choice in enumerate(choices):
            if id(choice.prompt) not in seen:
                seen.add(id(choice.prompt))
                self._first[position] = None
                self._num_prompt_tokens += len(choice.prompt.token_ids)
        self._num_output_tokens = [0] * len(choices)
        self._num_accepted_drafts = [0] * len(choices)
        self._num_rejected_drafts = [0] * len(choices)

    def update(self, position: int, output: RequestOutput) -> None:
        self._num_output_tokens[position] = output.num_output_tokens
        self._num_accepted_drafts[position] = output.num_accepted_drafts
        self._num_rejected_drafts[position] = output.num_rejected_drafts
        if position in self._first:
            self._first[position] = output

    def body(self) -> dict[str, Any]:
        outputs = [output for output in self._first.values() if output is not None]
        cached = [output.cached for output in outputs]
        completion_tokens = sum(self._num_output_tokens)
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self._num_prompt_tokens + completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(c.total for c in cached),
                "cached_tokens_by_tier": {
                    "device": sum(c.device for c in cached),
                    "cpu": sum(c.cpu for c in cached),
                    "disk": sum(c.disk for c in cached),
                },
                "recomputed_by_choice": sum(output.recomputed_by_choice for output in outputs),
                "cache_write_tokens": sum(map(self._written, outputs)),
                "audio_tokens": 0,
            },
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "audio_tokens": 0,
                "accepted_prediction_tokens": sum(self._num_accepted_drafts),
                "rejected_prediction_tokens": sum(self._num_rejected_drafts),
            },
        }

    def _written(self, output: RequestOutput) -> int:
        """Prompt tokens in whole blocks that the cache did not have: what this request adds."""
        whole = output.num_prompt_tokens // self._block_size * self._block_size
        return max(0, whole - output.cached.total)
