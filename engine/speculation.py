"""Speculation: who drafts, how deep, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from engine.draft_depth import DraftDepth
from engine.drafter import DraftContext
from engine.guarded_drafter import GuardedDrafter
from engine.request import Request
from engine.scheduler import RowsAhead
from engine.stats import EngineStats
from engine.token_view import TokenView


class Speculation:
    """Fills `Request.draft_token_ids` before a step and learns from it. Engine loop only."""

    def __init__(self, drafter: GuardedDrafter, depth: DraftDepth, max_tokens: int) -> None:
        self._drafter = drafter
        self._depth = depth
        self._max_tokens = max_tokens
        self._accepted_per_pos = [0] * max_tokens
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._num_accepted_tokens = 0

    async def propose(self, decoding: Sequence[Request], rows: RowsAhead) -> None:
        """Drafts for those of the `decoding` requests of the next step that have use for them.

        Cancelling it is not supported, as for the step.
        """
        if self._drafter.tells_likelihoods:
            self._propose_likely(decoding, rows)
            return
        wanted = [(request.request_id, _room(request)) for request in decoding]
        depths = self._depth.plan(wanted, rows.prompts, rows.spare)
        asked = [(r, depth) for r, depth in zip(decoding, depths, strict=True) if depth > 0]
        if not asked:
            return
        started = time.perf_counter()
        proposals = await self._drafter.propose([_context(r, depth) for r, depth in asked])
        self._depth.observe_call(
            max(depth for _, depth in asked),
            time.perf_counter() - started,
            len(asked),
            sum(map(bool, proposals)),
        )
        for (request, _), drafts in zip(asked, proposals, strict=True):
            request.draft_token_ids = drafts

    def _propose_likely(self, decoding: Sequence[Request], rows: RowsAhead) -> None:
        """A drafter that knows how good its guesses are is asked first; then all are weighed."""
        rooms = [(request, min(_room(request), self._max_tokens)) for request in decoding]
        asked = [(request, room) for request, room in rooms if room > 0]
        proposed = self._drafter.propose_likely([_context(r, room) for r, room in asked])
        if proposed is None:
            return
        likely = [(len(drafts), likelihood) for drafts, likelihood in proposed]
        depths = self._depth.weigh(likely, len(decoding), rows.prompts, rows.spare)
        for (request, _), (drafts, _), depth in zip(asked, proposed, depths, strict=True):
            request.draft_token_ids = drafts[:depth]

    def observe(self, request: Request, num_drafts: int, num_accepted: int, num_kept: int) -> None:
        """A run was verified; of the accepted drafts `num_kept` were not behind the end."""
        if not num_drafts:
            return
        if not self._drafter.tells_likelihoods:  # or it has learnt that by itself
            self._depth.observe_drafts(request.request_id, num_drafts, num_accepted)
        request.num_accepted_drafts += num_kept
        request.num_rejected_drafts += num_drafts - num_kept
        self._num_drafts += 1
        self._num_draft_tokens += num_drafts
        self._num_accepted_tokens += num_kept
        for position in range(num_kept):
            self._accepted_per_pos[position] += 1

    def observe_pass(self, num_rows: int, seconds: float) -> None:
        """A pass of decoding requests alone, drafts included."""
        self._depth.observe_pass(num_rows, seconds)

    def finish(self, request: Request) -> None:
        """A request is over; what it generated may teach the drafter."""
        if request.num_output_tokens:  # without any it was never drafted for
            self._depth.finish(request.request_id)
            self._drafter.finish(_context(request, 0), teaches=request.teaches_drafter)

    def forget(self, salts: Collection[str | None] | None) -> None:
        """Caches are reset: nothing said under these salts, or at all, is drafted any more."""
        self._drafter.forget(salts)

    def report(self, stats: EngineStats) -> None:
        """Enter the counters."""
        stats.spec_num_drafts = self._num_drafts
        stats.spec_num_draft_tokens = self._num_draft_tokens
        stats.spec_num_accepted_tokens = self._num_accepted_tokens
        stats.spec_accepted_per_pos = list(self._accepted_per_pos)
        stats.drafter_failures = {str(k): n for k, n in self._drafter.failures.items()}


def _room(request: Request) -> int:
    """How many drafts are of use: a run yields one token beyond them."""
    if request.drafts_barred:
        request.drafts_barred = False
        return 0
    return request.max_tokens - request.num_output_tokens - 1


def _context(request: Request, max_tokens: int) -> DraftContext:
    return DraftContext(
        request_id=request.request_id,
        token_ids=TokenView(request.token_ids),
        max_tokens=max_tokens,
        salt=request.salt,
        num_prompt_tokens=request.num_prompt_tokens,
        params=request.params,
        seed=request.seed,
    )
