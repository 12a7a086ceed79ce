"""Real drafters with known faults, for `--speculative tests.drafters:Class` and for direct use.

Those that know the truth look it up in `CONTINUATIONS`: the tokens that the target is known to
generate after a prompt. A test fills it in the same process with `know`, or names a JSON file of
`[[prompt, output], ...]` in the environment variable of `CONTINUATIONS_VARIABLE` for another one.
A prompt that is not known raises, lest a test pass because nothing was ever drafted.
"""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path

from engine.drafter import DraftContext

CONTINUATIONS: dict[tuple[int, ...], tuple[int, ...]] = {}
CONTINUATIONS_VARIABLE = "DRAFTER_CONTINUATIONS"


def know(prompt: Sequence[int], output: Sequence[int]) -> None:
    """From now on the drafters know that the target follows `prompt` with `output`."""
    CONTINUATIONS[tuple(prompt)] = tuple(output)


class OracleDrafter:
    """Always right, as far as the known continuation reaches."""

    def __init__(self, *, vocab_size: int, max_tokens: int) -> None:
        self.vocab_size = vocab_size
        self.max_tokens = max_tokens
        self.finished: list[str] = []
        if path := os.environ.get(CONTINUATIONS_VARIABLE):
            for prompt, output in json.loads(Path(path).read_text()):
                know(prompt, output)

    def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        return [self.guess(context) for context in contexts]

    def finish(self, request_id: str) -> None:
        self.finished.append(request_id)

    def guess(self, context: DraftContext) -> list[int]:
        num_drafts = min(self.max_tokens, context.max_tokens)
        return list(self.truth(context.token_ids)[:num_drafts])

    def truth(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """The known tokens after `token_ids`."""
        token_ids = tuple(token_ids)
        for num_prompt_tokens in range(len(token_ids), 0, -1):
            output = CONTINUATIONS.get(token_ids[:num_prompt_tokens])
            if output is None:
                continue
            generated = token_ids[num_prompt_tokens:]
            if output[: len(generated)] == generated:
                return output[len(generated) :]
        raise LookupError(f"no known continuation fits a sequence of {len(token_ids)} tokens")


class AlwaysWrongDrafter(OracleDrafter):
    """No draft is ever accepted, so every draft slot holds rejected KV."""

    def guess(self, context: DraftContext) -> list[int]:
        return [(token_id + 1) % self.vocab_size for token_id in super().guess(context)]


class RandomAcceptanceDrafter(OracleDrafter):
    """Each draft is right with `acceptance`, by a coin that depends on its position alone."""

    acceptance = 0.6
    seed = 0

    def guess(self, context: DraftContext) -> list[int]:
        drafts = super().guess(context)
        for i, position in enumerate(
            range(len(context.token_ids), len(context.token_ids) + len(drafts))
        ):
            if random.Random(f"{self.seed}:{position}").random() >= self.acceptance:
                drafts[i] = (drafts[i] + 1) % self.vocab_size
        return drafts


class FewWordsDrafter(OracleDrafter):
    """Knows nothing and guesses among `WORDS`, by a die that depends on request and position."""

    WORDS = (40, 160)

    def guess(self, context: DraftContext) -> list[int]:
        start = len(context.token_ids)
        num_drafts = min(self.max_tokens, context.max_tokens)
        dice = (random.Random(f"{context.request_id}:{start + i}") for i in range(num_drafts))
        return [die.choice(self.WORDS) for die in dice]


class OneWordDrafter(FewWordsDrafter):
    """Guesses the same word for ever: what favours drafts shows as too many of it."""

    def guess(self, context: DraftContext) -> list[int]:
        return [self.WORDS[0]] * min(self.max_tokens, context.max_tokens)


class RaisingDrafter(OracleDrafter):
    """Raises from every call."""

    def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        raise RuntimeError("this drafter always raises")

    def finish(self, request_id: str) -> None:
        raise RuntimeError("this drafter always raises")


class NonsenseDrafter(OracleDrafter):
    """Answers each call with the next kind of nonsense, round and round."""

    KINDS = ("wrong_length", "wrong_type", "too_many", "out_of_vocabulary", "not_lists", "none")

    def __init__(self, *, vocab_size: int, max_tokens: int) -> None:
        super().__init__(vocab_size=vocab_size, max_tokens=max_tokens)
        self.num_calls = 0

    def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        kind = self.KINDS[self.num_calls % len(self.KINDS)]
        self.num_calls += 1
        answer: object = {
            "wrong_length": [[]] * (len(contexts) + 1),
            "wrong_type": [["1"] for _ in contexts],
            "too_many": [[0] * (context.max_tokens + 1) for context in contexts],
            "out_of_vocabulary": [[self.vocab_size] for _ in contexts],
            "not_lists": [7 for _ in contexts],
            "none": None,
        }[kind]
        return answer  # type: ignore[return-value]


class SlowDrafter(OracleDrafter):
    """Right, but each call returns only once `release` is set; `entered` counts the calls."""

    def __init__(self, *, vocab_size: int, max_tokens: int) -> None:
        super().__init__(vocab_size=vocab_size, max_tokens=max_tokens)
        self.release = threading.Event()
        self.entered = 0
        self.has_entered = threading.Event()

    def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        self.entered += 1
        self.has_entered.set()
        self.release.wait()
        return super().propose(contexts)
