"""What to compute next. One number drives everything: `num_computed_tokens` catches up.

There are no prefill and decode phases: each running request gets rows for tokens it knows and has
not computed, be that a prompt chunk, one token, or one token plus drafts (the idea of vLLM's V1
scheduler). The planning half: no torch, no I/O, runs in microseconds.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.kv_cache_manager import KVCacheManager
from engine.load_policy import LoadPlan
from engine.prefix_match import PrefixHit, count_by_tier
from engine.request import Request, RequestState

# While answers are streaming, prompts get at most this share of the token budget, so that a step,
# and with it the gap between two tokens of a running stream, stays short.
MIXED_PREFILL_SHARE = 4
# Every so many admissions the longest-waiting request goes first whatever its priority.
FAIR_ADMISSION_INTERVAL = 8
# Rows of one request whose prompt logprobs are wanted: each such row costs a whole logits row.
MAX_LOGPROB_CHUNK = 128
# Rows of one step of what nobody asked for: a request that arrives meanwhile waits for it.
MAX_BACKGROUND_CHUNK = 32


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Sequences admitted at once, and rows (tokens computed) per step."""

    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(slots=True)
class ScheduledRequest:
    """`num_rows` tokens from `num_computed_tokens` on, the last `len(draft_token_ids)` drafts.

    num_computed_tokens        num_tokens
    |------ known tokens ----------|---- drafts ----|
    |------------------- num_rows ------------------|
    """

    request: Request
    num_rows: int
    draft_token_ids: list[int] = field(default_factory=list)

    @property
    def reaches_end(self) -> bool:
        """Whether the last known token is among the rows, so that the next one can be drawn."""
        request, known = self.request, self.num_rows - len(self.draft_token_ids)
        return request.num_computed_tokens + known == request.num_tokens


@dataclass(frozen=True, slots=True)
class RowsAhead:
    """Of the next step: rows that prompts will have, and rows that drafts may have."""

    prompts: int
    spare: int


# Decides what of a hit to load beside how many other prompts; the rest is recomputed by choice.
LoadChoice = Callable[[PrefixHit, int], LoadPlan]


def load_everything(hit: PrefixHit, num_competing: int) -> LoadPlan:
    return LoadPlan(hit.num_device)


class Scheduler:
    """Queues and admission; owns every live request. Engine loop only."""

    def __init__(
        self, limits: SchedulerLimits, kv: KVCacheManager, plan_loads: LoadChoice = load_everything
    ) -> None:
        self.limits = limits
        self.kv = kv
        self._plan_loads = plan_loads
        self.waiting: list[Request] = []  # by sort_key
        self.loading: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._num_admissions = 0
        self._lacks_blocks = False  # at the last attempt, for who waits

    # --- queue ------------------------------------------------------------------------------

    @property
    def num_active(self) -> int:
        return len(self.running) + len(self.loading)

    def live(self) -> list[Request]:
        return [*self.running, *self.loading, *self.waiting]

    def add(self, request: Request) -> None:
        request.state = RequestState.WAITING
        bisect.insort(self.waiting, request, key=lambda waiting: waiting.sort_key)

    def finish(self, request: Request) -> None:
        """Commit what is confirmed, free the blocks, forget the request. Legal in every state."""
        if request.state is RequestState.FINISHED:
            return
        self.kv.conclude(request)
        self.kv.touch(request)
        self._leave_queue(request)
        self.kv.release(request)
        request.state = RequestState.FINISHED

    def _leave_queue(self, request: Request) -> None:
        queue = {
            RequestState.WAITING: self.waiting,
            RequestState.LOADING: self.loading,
            RequestState.RUNNING: self.running,
        }[request.state]
        queue.remove(request)

    # --- loads ------------------------------------------------------------------------------

    def waiting_for_loads(self) -> list[Request]:
        """Requests that can compute nothing until a load has come or is given up."""
        return [*self.loading, *(r for r in self.running if self._is_stalled(r))]

    def _is_stalled(self, request: Request) -> bool:
        return bool(request.pending_loads) and not self._num_computable(request)

    def _num_computable(self, request: Request) -> int:
        """Known tokens that can be computed now: up to what is loaded ahead, if anything is."""
        if request.ahead is None:
            return request.num_uncomputed_tokens
        return request.ahead.start * self.kv.block_size - request.num_computed_tokens

    def loads_settled(self, request: Request) -> None:
        """Every load that `request` still counts on is in place: it may run."""
        if request.state is not RequestState.LOADING:
            return  # it is computing the blocks before them
        self._pass_ahead(request)
        if not self.kv.reserve(request):
            # The blocks behind a failed load went to somebody else meanwhile.
            self._requeue(request)
            return
        self._leave_queue(request)
        request.load_deadline = None
        self._run(request)

    def load_failed(self, request: Request, block_index: int) -> None:
        """A load failed or is late: the hit ends before its block, the rest is recomputed."""
        self.kv.shorten_ahead(request, block_index)
        self._count_cached(request)
        if not request.pending_loads:
            self.loads_settled(request)

    def load_late(self, request: Request) -> None:
        """Waiting any longer would cost more than computing what is missing."""
        if request.state is RequestState.LOADING:
            self.load_failed(request, min(request.pending_loads.values()))
            return
        missing = (
            max(request.pending_loads.values())
            + 1
            - request.num_computed_tokens // (self.kv.block_size)
        )
        most = max(1, self.limits.max_num_batched_tokens // self.kv.block_size)
        self.kv.overtake_ahead(request, min(missing, most))
        self._count_cached(request)
        request.load_deadline = None
        request.load_patience = 0.0  # it has waited enough

    def _take_what_came(self) -> None:
        """Requests that have computed up to what was loaded ahead go on behind it."""
        for request in self.running:
            self._pass_ahead(request)

    def _pass_ahead(self, request: Request) -> None:
        is_there = not request.pending_loads and not self._num_computable(request)
        if request.ahead is not None and is_there:
            self.kv.arrive_ahead(request)
            request.load_deadline = None
        if request.ahead is None:
            request.cached_settled = True

    def _requeue(self, request: Request) -> None:
        self._leave_queue(request)
        request.num_left_blocks = max(request.num_left_blocks, request.num_committed_blocks)
        self.kv.release(request)
        request.load_deadline = None
        request.draft_token_ids = []
        self.add(request)

    # --- one step ---------------------------------------------------------------------------

    def decoding(self) -> list[Request]:
        """Who gets a token in the next step, and may have drafts."""
        return [request for request in self.running if request.is_decoding]

    def rows_ahead(self) -> RowsAhead:
        """About what the next step has beside one row for each request that decodes."""
        num_decoding = sum(request.is_decoding for request in self.running)
        known = sum(self._num_wanted(r) for r in self.running if not r.is_decoding)
        prompts = self._mixed_prefill_rows if self._expects_prompts() else 0
        spare = self.limits.max_num_batched_tokens - num_decoding
        if self._expects_prompts() or known:
            spare -= self._mixed_prefill_rows
        return RowsAhead(max(prompts, min(known, self._mixed_prefill_rows)), max(0, spare))

    def _expects_prompts(self) -> bool:
        """Whether somebody waits who would be admitted: there is a seat, and not only no block."""
        is_seat_free = self.num_active < self.limits.max_num_seqs
        return bool(self.waiting) and is_seat_free and not self._lacks_blocks

    def schedule(self) -> list[ScheduledRequest]:
        """Rows for the next pass: decodes first, then admissions, then prompt chunks."""
        self._take_what_came()
        plan = self._schedule_decodes()
        num_decode_rows = sum(scheduled.num_rows for scheduled in plan)
        self._admit_waiting()
        budget = self.limits.max_num_batched_tokens - num_decode_rows
        if num_decode_rows:
            budget = min(budget, self._mixed_prefill_rows)
        plan += self._schedule_prefills(budget)
        if not plan:
            plan = self._unblock()
        for scheduled in plan:
            scheduled.request.num_inflight_tokens = scheduled.num_rows
        return plan

    @property
    def _mixed_prefill_rows(self) -> int:
        """Rows that prompts may have beside answers that are streaming."""
        return max(1, self.limits.max_num_batched_tokens // MIXED_PREFILL_SHARE)

    def _schedule_decodes(self) -> list[ScheduledRequest]:
        """Everybody's next token first; drafts only with rows and blocks nobody else wants."""
        decoding = sorted((r for r in self.running if r.is_decoding), key=lambda r: r.sort_key)
        plan = [
            ScheduledRequest(request, num_rows=1)
            for request in decoding
            # One ahead of it may have preempted it meanwhile.
            if request.state is RequestState.RUNNING
            and self._make_room(request, request.num_tokens)
        ]
        spare_rows = self.limits.max_num_batched_tokens - len(plan)
        if self._expects_prompts() or len(plan) < len(self.running):
            spare_rows = max(0, spare_rows - self._mixed_prefill_rows)
        self._add_drafts(plan, spare_rows)
        return plan

    def _add_drafts(self, plan: list[ScheduledRequest], spare_rows: int) -> None:
        """Rows are shared evenly: whoever has fewer drafts leaves more to the others.

        While somebody waits for blocks, drafts get none that is not held already.
        """
        spares_blocks = bool(self.waiting) and self._lacks_blocks
        with_drafts = sorted(
            (one for one in plan if one.request.draft_token_ids),
            key=lambda one: len(one.request.draft_token_ids),
        )
        for position, scheduled in enumerate(with_drafts):
            request = scheduled.request
            share = spare_rows // (len(with_drafts) - position)
            if spares_blocks:
                held = len(request.block_tables[0]) * self.kv.block_size - request.num_tokens
                share = min(share, held)
            drafts, request.draft_token_ids = request.draft_token_ids[:share], []
            if drafts and self.kv.grow(request, request.num_tokens + len(drafts)):
                spare_rows -= len(drafts)
                scheduled.num_rows += len(drafts)
                scheduled.draft_token_ids = drafts

    def _make_room(self, request: Request, num_positions: int) -> bool:
        """Blocks for so many positions; preempts from the tail. False if `request` itself went."""
        while not self.kv.grow(request, num_positions):
            victim = max(self.running, key=lambda running: running.sort_key)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _unblock(self) -> list[ScheduledRequest]:
        """Prompts whose windows found no blocks at all: the first goes on at the others' cost."""
        stuck = [r for r in self.running if self._num_computable(r)]
        if not stuck:
            return []
        first = min(stuck, key=lambda request: request.sort_key)
        if not self._make_room(first, first.num_computed_tokens + 1):
            return []
        wanted = min(self._num_wanted(first), self.limits.max_num_batched_tokens)
        return [ScheduledRequest(first, self.kv.grow_for_rows(first, wanted))]

    def _num_wanted(self, request: Request) -> int:
        """Rows of one step that a prompt can use and may have."""
        wanted = self._num_computable(request)
        if request.wants_prompt_logprobs:
            wanted = min(wanted, MAX_LOGPROB_CHUNK)
        return min(wanted, MAX_BACKGROUND_CHUNK) if request.is_background else wanted

    def _preempt(self, request: Request) -> None:
        self.kv.conclude(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._requeue(request)

    def _schedule_prefills(self, budget: int) -> list[ScheduledRequest]:
        """Half the budget by shortest remainder, half by arrival.

        The first half lets a short prompt through behind a very long one, the second keeps a
        stream of short ones from starving the long one.
        """
        prefilling = [r for r in self.running if not r.is_decoding]
        rows = dict.fromkeys(prefilling, 0)

        def hand_out(order: list[Request], amount: int) -> int:
            for request in order:
                take = min(self._num_wanted(request) - rows[request], amount)
                rows[request] += take
                amount -= take
            return amount

        by_arrival = sorted(prefilling, key=lambda r: r.sort_key)
        by_remainder = sorted(by_arrival, key=lambda r: r.num_uncomputed_tokens)
        left = hand_out(by_remainder, budget // 2)
        hand_out(by_arrival, budget - budget // 2 + left)
        plan = []
        for request in by_arrival:
            num_rows = self.kv.grow_for_rows(request, rows[request])
            if num_rows:
                plan.append(ScheduledRequest(request, num_rows))
        return plan

    # --- admission --------------------------------------------------------------------------

    def _admit_waiting(self) -> None:
        self._lacks_blocks = False
        while self.waiting and self.num_active < self.limits.max_num_seqs:
            if not self._admit(self._next_waiting()):
                self._lacks_blocks = True
                return

    def _next_waiting(self) -> Request:
        if self._num_admissions % FAIR_ADMISSION_INTERVAL == FAIR_ADMISSION_INTERVAL - 1:
            return min(self.waiting, key=lambda r: r.arrival_order)
        return self.waiting[0]

    def _admit(self, request: Request) -> bool:
        """Take `request` off the queue if the pool holds all its known tokens."""
        hit = self.kv.match(request)
        loads = self._fitting_loads(request, hit)
        if loads is None:
            return False
        self._leave_queue(request)
        self.kv.admit(request, hit, loads.start)
        request.load_patience = loads.patience
        # Coming back after a preemption it finds what it stored itself; one that nobody sent says
        # nothing about what will be asked for.
        is_asked = not request.admitted_once and not request.is_background
        self.kv.touch(request, hit.num_held if is_asked else 0)
        self._num_admissions += 1
        self._note_sources(request, hit, loads.start)
        self._count_cached(request)
        if request.pending_loads and self._is_stalled(request):
            request.state = RequestState.LOADING
            self.loading.append(request)
        else:
            self._run(request)
        return True

    def _fitting_loads(self, request: Request, hit: PrefixHit) -> LoadPlan | None:
        """What of a hit to load; None if the pool is too short for the request."""
        num_competing = sum(not running.is_decoding for running in self.running)
        loads = self._plan_loads(hit, num_competing)
        if self._has_room(request, hit, loads.start):
            return loads
        if self.num_active:
            return None
        loads = LoadPlan(hit.num_held)  # with the pool to itself it fits without loads
        return loads if self._has_room(request, hit, loads.start) else None

    def foresee(self, request: Request) -> tuple[PrefixHit, int]:
        """What `request`, not queued, would hit if it came now, and the first block it would load
        rather than compute."""
        hit = self.kv.match(request)
        loads = self._fitting_loads(request, hit)
        if loads is None:  # it would wait until there is room
            loads = self._plan_loads(hit, 0)
        return hit, loads.start

    def _has_room(self, request: Request, hit: PrefixHit, start: int) -> bool:
        # A block each for the others to grow into, or admission causes preemption.
        headroom = len(self.running) * len(self.kv.groups) if self.num_active else 0
        wanted = self.kv.num_blocks_to_take(request, hit, start) + headroom
        return wanted <= self.kv.pool.num_available

    def _note_sources(self, request: Request, hit: PrefixHit, start: int) -> None:
        """Remember the nearest tier of each block when it was first hit."""
        if request.cached_settled:
            return
        if not request.block_sources:
            request.recomputed_by_choice = (start - hit.num_device) * self.kv.block_size
        known = len(request.block_sources)
        request.block_sources += hit.sources[known:]

    def _count_cached(self, request: Request) -> None:
        """`cached_tokens` belongs to the first admission and is settled once its loads are in.

        |-- on the device --|-- recomputed --|-- loaded ahead --|
        """
        if request.cached_settled:
            return
        sources = request.block_sources[: request.num_hit_blocks]
        if request.ahead is not None:
            sources = sources + request.block_sources[request.ahead.start : request.ahead.stop]
        request.cached = count_by_tier(sources, self.kv.block_size)

    def _run(self, request: Request) -> None:
        request.state = RequestState.RUNNING
        request.admitted_once = True
        self._pass_ahead(request)
        self.running.append(request)
