"""A chat beyond its answer: what was generated is remembered, what follows is computed ahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.outputs import FinishReason

if TYPE_CHECKING:
    from engine.async_engine import AsyncEngine
    from engine.transcripts import Turn

# Stands for what the user will say next.
_PROBE = "\ue000overwinter-next\ue001"


@dataclass(frozen=True, slots=True)
class Conversation:
    """One prompt of a chat, told of every answer to it. `before` are ids that stand ahead of what
    the template makes."""

    engine: AsyncEngine
    messages: Sequence[Mapping[str, Any]]
    cache_salt: str | None
    cache_key: str | None
    turn: Turn
    before: Sequence[int]

    def answered(
        self, token_ids: Sequence[int], text: str, reason: FinishReason | None, *, is_only: bool
    ) -> None:
        """An answer has ended as `reason` says, None where its client left. One that failed proves
        nothing and is not kept. Of several the client takes one: which, nobody knows yet."""
        if reason is FinishReason.ERROR:
            return
        self.engine.transcripts.record(self.turn, token_ids)
        if is_only and reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.engine.prefill_when_idle(
                lambda: self._until_next_turn(text), self.cache_salt, self.cache_key
            )

    def _until_next_turn(self, text: str) -> list[int]:
        """Ids up to where the user's next words will begin; raises what the template raises."""
        messages = [
            *self.messages,
            {"role": "assistant", "content": text},
            {"role": "user", "content": _PROBE},
        ]
        tokenizer = self.engine.tokenizer
        marked = tokenizer.render_marked(messages, add_generation_prompt=False)
        # A blank before the user's words may become one token with them.
        known = marked[: max(0, marked.rfind(_PROBE))].rstrip(" ")
        reading = self.engine.transcripts.read(self.engine.space(self.cache_salt), known)
        return [*self.before, *reading.token_ids]
