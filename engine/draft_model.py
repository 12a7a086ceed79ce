"""A draft model: a smaller model of the same vocabulary guesses what the target will draw.

It computes its own KV over every token of a request, whatever the target loaded or found, in pages
of its own with a prefix cache of their own. So what it guesses depends on the tokens alone: after
a prefix hit of the target it is as good as without.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.block_hash import root_hash
from engine.drafter import DraftContext
from engine.kv_cache_manager import KVCacheManager
from engine.request import Request
from engine.sampler import DrawRun, Sampled, SampleRow
from engine.scheduler import MIXED_PREFILL_SHARE
from engine.step import SequenceInput, StepInput
from offload.tier import Forget

if TYPE_CHECKING:
    from engine.model_runner import ModelRunner


@dataclass(slots=True, eq=False)
class Shadow:
    """A request of the target as the draft model knows it.

    0          request.num_computed_tokens       request.num_tokens
    |-------- KV computed -----------|---- to compute ----|-- guesses --|
    |-------------- tokens that the target has -----------|

    `guesses` are those of the last call that were read as input: their slots behind the last known
    token are written. There are some only where nothing before them is left to compute. They never
    stand in `request.token_ids`, so neither a hash nor `committed_len` can reach them.
    """

    request: Request
    guesses: list[int] = field(default_factory=list)

    def follow(self, token_ids: Sequence[int]) -> bool:
        """The target's tokens are now these; False, with nothing changed, if what it had is no
        beginning of them.

              request.num_tokens before        len(token_ids)
        |-- known tokens --|------ new tokens ------|
                           |-- guesses --|
                           |-- agree --|   written over the tokens that stand there: kept

        The last token is computed again even if a guess was equal to it: its logits are needed.
        """
        request, num_known = self.request, self.request.num_tokens
        if token_ids[:num_known] != tuple(request.token_ids):
            return False
        new_ids = token_ids[num_known:]
        agree = _common_length(self.guesses, new_ids)
        request.token_ids.extend(new_ids)
        request.num_computed_tokens += agree
        request.num_computed_tokens = min(request.num_computed_tokens, len(token_ids) - 1)
        self.guesses.clear()
        return True


@dataclass(slots=True, eq=False)
class _Run:
    """Drafting for one context within one call."""

    context: DraftContext
    shadow: Shadow
    limit: int  # drafts at most
    drafts: list[int] = field(default_factory=list)
    ended: bool = False  # no further draft is possible or of use

    @property
    def request(self) -> Request:
        return self.shadow.request

    def draws_next(self) -> SampleRow:
        """What decides the token behind the known ones and the drafts so far: as the target's."""
        request = self.request
        return SampleRow(
            params=request.params,
            seed=request.seed,
            position=request.num_tokens + len(self.drafts),
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=request.token_ids[request.num_prompt_tokens :] + self.drafts,
            stop_ids=request.stop_ids,
        )

    def take(self, token_id: int) -> None:
        """The draft model's own draw; behind one that ends the answer nothing is of use."""
        self.drafts.append(token_id)
        request = self.request
        num_outputs = request.num_output_tokens + len(self.drafts)
        is_last = token_id in request.stop_ids and num_outputs > request.params.min_tokens
        self.ended = is_last or len(self.drafts) >= self.limit


class ModelDrafter:
    """`Drafter` over a model with paged KV. Every method is called on the torch thread alone."""

    def __init__(
        self,
        runner: ModelRunner,
        kv: KVCacheManager,
        *,
        fingerprint: bytes,
        vocab_size: int,
        max_model_len: int,
        max_rows: int,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        """`kv` plans the blocks of `runner`'s pool and has no tiers; `fingerprint` says what they
        hold. `vocab_size` bounds ids that are read or drawn, `max_model_len` positions. A call
        catches up at most `max_rows` tokens, of long backlogs a share of that. `eos_token_ids` are
        the target's.
        """
        self._runner = runner
        self._kv = kv
        self._fingerprint = fingerprint
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._max_rows = max_rows
        self._max_chunk = max(1, max_rows // MIXED_PREFILL_SHARE)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._shadows: OrderedDict[str, Shadow] = OrderedDict()  # asked last comes last
        self._asked: set[str] = set()  # in this call: what they hold is not taken from them

    @property
    def kv(self) -> KVCacheManager:
        """The draft model's own blocks; for figures and checks."""
        return self._kv

    def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        """As `Drafter.propose`; [] also while a request's KV is not up to date, which takes several
        calls after a long prompt, and where the pool or the model's positions do not suffice.

        Raises whatever a forward pass failed with; the requests of that pass begin anew.
        """
        self._asked = {context.request_id for context in contexts}
        runs = [self._begin(context) for context in contexts]
        begun = [run for run in runs if run is not None]
        self._catch_up(begun)
        while guessing := [run for run in begun if self._can_guess(run)]:
            self._guess(guessing)
        return [[] if run is None else run.drafts for run in runs]

    def remember(self, context: DraftContext) -> None:
        """All tokens of a request that ends: accepted guesses of the last call are kept."""
        shadow = self._shadows.get(context.request_id)
        if shadow is not None and not shadow.follow(context.token_ids):
            self._drop(shadow)

    def finish(self, request_id: str) -> None:
        """Free the blocks; what is certain of them stays findable. Unknown ids are ignored."""
        shadow = self._shadows.pop(request_id, None)
        if shadow is not None:
            self._kv.conclude(shadow.request)
            self._kv.release(shadow.request)

    def forget(self, salts: Collection[str | None] | None) -> None:
        """Nothing computed under these salts until now, or under any, is ever found again."""
        for shadow in self._shadows.values():
            shadow.guesses.clear()  # their slots would be believed once the target draws the same
        where = None
        if salts is not None:
            roots = frozenset(root_hash(self._fingerprint, salt) for salt in salts)
            where = Forget(roots=roots)
        self._kv.reset([shadow.request for shadow in self._shadows.values()], where)

    def check(self) -> None:
        """Conservation laws, raising AssertionError."""
        self._kv.check(shadow.request for shadow in self._shadows.values())

    # --- which requests can be drafted for --------------------------------------------------

    def _begin(self, context: DraftContext) -> _Run | None:
        """Follow the context and see to its blocks; None where there is nothing to draft."""
        num_tokens = len(context.token_ids)
        # The row at position p draws the token at p + 1, and the last row allowed is at
        # max_model_len - 1.
        limit = min(context.max_tokens, self._max_model_len + 1 - num_tokens)
        if context.max_tokens < 1 or not num_tokens:
            return None
        if limit < 1:
            self.finish(context.request_id)
            return None
        shadow = self._shadow_of(context)
        if shadow is None or not (shadow.request.block_tables or self._admit(shadow.request)):
            return None
        return _Run(context, shadow, limit)

    def _shadow_of(self, context: DraftContext) -> Shadow | None:
        """The request's shadow, up to date with its tokens; None if it has an id that the draft
        model does not know."""
        shadow = self._shadows.get(context.request_id)
        num_seen = 0 if shadow is None else shadow.request.num_tokens
        if shadow is not None and not shadow.follow(context.token_ids):
            self._drop(shadow)  # another request under the same id
            shadow, num_seen = None, 0
        if max(context.token_ids[num_seen:], default=0) >= self._vocab_size:
            self.finish(context.request_id)
            return None
        if shadow is None:
            shadow = Shadow(self._new_request(context))
            self._shadows[context.request_id] = shadow
        self._shadows.move_to_end(context.request_id)
        request = shadow.request
        if request.num_computed_tokens < request.num_committed_blocks * self._kv.block_size:
            # The last token has to be computed again and lies in a block that others may share,
            # which is never written: another hit leaves it out.
            self._kv.release(request)
        return shadow

    def _new_request(self, context: DraftContext) -> Request:
        params = dataclasses.replace(context.params, logprobs=None, prompt_logprobs=None)
        eos = () if params.ignore_eos else self._eos_token_ids
        request = Request(
            request_id=context.request_id,
            prompt_token_ids=context.token_ids[: context.num_prompt_tokens],
            params=params,
            max_tokens=0,  # it never generates: its tokens come from the target
            stop_ids=frozenset((*eos, *params.stop_token_ids)),
            seed=context.seed,
            root_hash=root_hash(self._fingerprint, context.salt),
            arrival_order=0,
        )
        request.token_ids = list(context.token_ids)
        return request

    def _admit(self, request: Request) -> bool:
        """Take what the prefix cache holds and blocks for the rest; False if they do not fit."""
        kv = self._kv
        if kv.max_blocks_held(request.num_tokens) > kv.pool.num_blocks:
            return False

        def fits() -> bool:
            hit = kv.match(request)
            return kv.num_blocks_to_take(request, hit, hit.num_held) <= kv.pool.num_available

        if not self._make_room(fits):
            return False
        hit = kv.match(request)
        kv.admit(request, hit, hit.num_held)
        return True

    def _make_room(self, fits: Callable[[], bool]) -> bool:
        """Let go of requests that are not asked now, the one asked longest ago first, until
        `fits`; they are rebuilt when they are asked again."""
        while not fits():
            victim = next((name for name in self._shadows if name not in self._asked), None)
            if victim is None:
                return False
            self.finish(victim)
        return True

    def _drop(self, shadow: Shadow) -> None:
        """Nothing that was not kept before is worth keeping."""
        self._kv.release(shadow.request)
        del self._shadows[shadow.request.request_id]

    # --- passes -----------------------------------------------------------------------------

    def _catch_up(self, runs: Sequence[_Run]) -> None:
        """Compute known tokens, short backlogs first, so that a prompt delays nobody; each request
        that comes up to date draws its first draft in the same pass."""
        budget, chunk_budget = self._max_rows, self._max_chunk
        planned: list[tuple[_Run, SequenceInput]] = []
        for run in sorted(runs, key=lambda run: run.request.num_uncomputed_tokens):
            backlog = run.request.num_uncomputed_tokens
            is_long = backlog > self._max_chunk
            num_rows = min(backlog, budget, chunk_budget if is_long else budget)
            num_rows = self._grow(run.request, num_rows)
            if num_rows:
                budget -= num_rows
                chunk_budget -= num_rows if is_long else 0
                planned.append((run, self._known_rows(run, num_rows)))
        self._compute(planned)

    def _grow(self, request: Request, num_rows: int) -> int:
        end = request.num_computed_tokens + num_rows
        self._make_room(lambda: self._kv.grow(request, end))
        return self._kv.grow_for_rows(request, num_rows)

    def _known_rows(self, run: _Run, num_rows: int) -> SequenceInput:
        request = run.request
        start, end = request.num_computed_tokens, request.num_computed_tokens + num_rows
        return SequenceInput(
            token_ids=request.token_ids[start:end],
            start=start,
            block_tables=self._tables(request, end),
            run=DrawRun(run.draws_next()) if end == request.num_tokens else None,
        )

    def _can_guess(self, run: _Run) -> bool:
        """Whether there is a draft to go on from, use for another, and a slot to write."""
        if not run.drafts or run.ended:
            return False
        end = run.request.num_tokens + len(run.drafts)
        return self._make_room(lambda: self._kv.grow(run.request, end))

    def _guess(self, runs: Sequence[_Run]) -> None:
        """One row each: read the last draft, draw the next.

        request.num_tokens        + len(drafts)
        |-- drafts read before --|-- last draft: this row --|-- drawn --|
        """
        planned = []
        for run in runs:
            start = run.request.num_tokens + len(run.drafts) - 1
            rows = SequenceInput(
                token_ids=run.drafts[-1:],
                start=start,
                block_tables=self._tables(run.request, start + 1),
                run=DrawRun(run.draws_next()),
            )
            planned.append((run, rows))
        self._compute(planned)

    def _tables(self, request: Request, end: int) -> list[list[int]]:
        return [table[: self._kv.num_blocks_for(end)] for table in request.block_tables]

    def _compute(self, planned: Sequence[tuple[_Run, SequenceInput]]) -> None:
        """One packed pass; what it confirmed is committed, what it drew is drafted."""
        if not planned:
            return
        output = self._runner.execute(StepInput(sequences=[rows for _, rows in planned]))
        if output.error is not None:
            for run, _ in planned:
                self._drop(run.shadow)
            raise output.error
        for (run, rows), draws in zip(planned, output.draws, strict=True):
            tokens = [draw.token_id for draw in draws if isinstance(draw, Sampled)]
            if len(tokens) < len(draws):  # logits that are no numbers: the KV proves nothing
                run.ended = True
                self._drop(run.shadow)
                continue
            if rows.start < run.request.num_tokens:
                run.request.num_computed_tokens += len(rows.token_ids)
                self._kv.commit(run.request)
            else:
                run.shadow.guesses.extend(rows.token_ids)
            for token_id in tokens:
                run.take(token_id)


def _common_length(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens two sequences have in common, counted from the first."""
    num_common = 0
    for left, right in zip(ours, theirs, strict=False):
        if left != right:
            break
        num_common += 1
    return num_common
