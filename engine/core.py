"""One step: gather, draft, schedule, run, verify, commit, save, emit.

The synchronous heart of the engine, driven by `AsyncEngine`'s loop, the one task that changes
scheduler, block pool, KV manager and offload index. It awaits exactly two things: the drafter and
the torch thread. Cancelling either await is not supported; the loop stops between steps only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass

from engine.audit_report import AuditReporter
from engine.block_hash import chain_hashes
from engine.detokenizer import Detokenizer
from engine.kv_cache_manager import KVCacheManager
from engine.load_audit import LoadAuditor
from engine.load_policy import LoadChooser
from engine.model_runner import ModelRunner
from engine.outputs import FinishReason, RequestOutput, TokenLogprobs
from engine.request import Request, committed_len
from engine.sampler import DrawRun, Sampled, SampleRow, Unsampled
from engine.scheduler import ScheduledRequest, Scheduler
from engine.sessions import Sessions
from engine.speculation import Speculation
from engine.stats import EngineStats
from engine.step import PromptLogprobRows, SequenceInput, StepInput, StepOutput
from offload.manager import OffloadManager
from offload.tier import BlockHash
from offload.transfers import Transfers

logger = logging.getLogger(__name__)

# So many failed passes in a row mean that the engine, not a request, is at fault.
MAX_FAILED_STEPS = 3


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request with what its stream needs."""

    request: Request
    detokenizer: Detokenizer
    emit: Callable[[RequestOutput], None]
    cache_key: str | None = None  # names its conversation, within the salt
    prompt_logprobs_sent: bool = False


class EngineCore:
    """Plans and verifies; `step()` runs one round and says whether there was anything to do."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        kv: KVCacheManager,
        offload: OffloadManager,
        runner: ModelRunner,
        torch_thread: Executor,
        chooser: LoadChooser,
        speculation: Speculation | None,
        load_deadline: float,
        sessions: Sessions,
        auditor: LoadAuditor | None = None,
        reporter: AuditReporter | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.kv = kv
        self.offload = offload
        self._runner = runner
        self._torch_thread = torch_thread
        self._chooser = chooser
        self._speculation = speculation
        self._load_deadline = load_deadline
        self.auditor = auditor
        self._reporter = reporter
        self._sessions = sessions
        self._live: dict[str, LiveRequest] = {}
        self._num_failed_steps = 0
        self._has_tiers = bool(offload.stats())
        self.counters = EngineStats()

    # --- requests ---------------------------------------------------------------------------

    def add(self, live: LiveRequest) -> None:
        """Take a validated request into the queue; its id must not be in use."""
        self.stop_audit()
        self._live[live.request.request_id] = live
        self._begin_turn(live)
        self.scheduler.add(live.request)

    def live_under(self, space: BlockHash, cache_key: str) -> list[Request]:
        """The requests of one conversation."""
        live = (one for one in self._live.values() if one.cache_key == cache_key)
        return [one.request for one in live if one.request.root_hash == space]

    def abort(self, request_id: str) -> None:
        """Between steps only: what is confirmed by now is kept. Unknown ids are ignored."""
        live = self._live.get(request_id)
        if live is not None:
            self._finish(live, FinishReason.ABORT)

    def forget_drafts(self, salts: Collection[str | None] | None) -> None:
        """Nothing that finished requests of these salts said, or of all, is drafted any more."""
        if self._speculation is None:
            return
        self._speculation.forget(salts)
        for request in self.scheduler.live():
            if salts is None or request.salt in salts:
                request.teaches_drafter = False

    def fail_all(self, message: str) -> None:
        """The engine is lost: tell every stream. Touches no engine state that may be broken."""
        for live in list(self._live.values()):
            live.request.finish_reason = FinishReason.ERROR
            live.emit(self._output(live, [], None, "", error=message))
        self._live.clear()

    @property
    def num_live(self) -> int:
        return len(self._live)

    def next_deadline(self) -> float | None:
        """Monotonic time at which a load in flight becomes a miss."""
        waiting = self.scheduler.waiting_for_loads()
        deadlines = [r.load_deadline for r in waiting if r.load_deadline is not None]
        return min(deadlines, default=None)

    # --- the step ---------------------------------------------------------------------------

    async def step(self) -> bool:
        """One round. False if there was nothing to copy and nothing to compute."""
        self._expire_loads()
        transfers = self._gather_transfers()
        if self._speculation is not None:
            rows = self.scheduler.rows_ahead()
            await self._speculation.propose(self.scheduler.decoding(), rows)
        plan = self.scheduler.schedule()
        self._note_scheduled()
        if not plan and not transfers.copies_out and not transfers.copies_in:
            return False
        step = StepInput(
            transfers.copies_out,
            transfers.copies_in,
            [self._sequence_input(scheduled) for scheduled in plan],
        )
        loop = asyncio.get_running_loop()
        output = await loop.run_in_executor(self._torch_thread, self._runner.execute, step)
        self._settle_transfers(transfers, output)
        self._process(plan, output)
        return True

    def _gather_transfers(self) -> Transfers:
        transfers = self.offload.poll()
        self.kv.loads.copying(transfers.copies_in)
        for ticket in transfers.failed_loads:
            for request, block_index in self.kv.loads.failed(ticket):
                self.scheduler.load_failed(request, block_index)
        return transfers

    def _settle_transfers(self, transfers: Transfers, output: StepOutput) -> None:
        self.offload.copied_out(transfers.copies_out, output.copy_out_seconds)
        self.offload.copied_in(transfers.copies_in, output.copy_in_seconds)
        for copy in transfers.copies_in:
            for request in self.kv.loads.loaded(copy.ticket):
                if not request.pending_loads:
                    self.scheduler.loads_settled(request)

    def _expire_loads(self) -> None:
        now = time.monotonic()
        for request in self.scheduler.waiting_for_loads():
            patience = min(self._load_deadline, request.load_patience)
            if request.load_deadline is None:
                request.load_deadline = now + patience
            if request.load_deadline <= now:
                logger.log(
                    logging.WARNING if patience == self._load_deadline else logging.DEBUG,
                    "request %s: loads took longer than %.1f s, recomputing",
                    request.request_id,
                    patience,
                )
                self.scheduler.load_late(request)

    def _note_scheduled(self) -> None:
        now = time.monotonic()
        for request in self.scheduler.running:
            if request.times.first_scheduled is None:
                request.times.first_scheduled = now

    async def audit(self) -> bool:
        """Idle time: one pass of checking what was loaded; False if there is nothing to check.

        Legal while no request is live. Cancelling it is not supported, as for `step`.
        """
        planned = None if self.auditor is None else self.auditor.next_pass()
        if self.auditor is None or planned is None:
            return False
        loop = asyncio.get_running_loop()
        output = await loop.run_in_executor(self._torch_thread, self._runner.audit, planned)
        for failure in self.auditor.settle(output):
            if self._reporter is not None:
                self._reporter.report(failure)
        return True

    def stop_audit(self) -> None:
        """Somebody wants what an audit holds; it begins anew when the engine is idle again."""
        if self.auditor is not None:
            self.auditor.give_way()

    # --- plan to input ----------------------------------------------------------------------

    def _sequence_input(self, scheduled: ScheduledRequest) -> SequenceInput:
        request = scheduled.request
        start = request.num_computed_tokens
        num_known = scheduled.num_rows - len(scheduled.draft_token_ids)
        token_ids = request.token_ids[start : start + num_known] + scheduled.draft_token_ids
        end = start + scheduled.num_rows
        return SequenceInput(
            token_ids=token_ids,
            start=start,
            block_tables=[table[: self.kv.num_blocks_for(end)] for table in request.block_tables],
            run=self._draw_run(scheduled),
            prompt_logprobs=self._prompt_logprob_rows(request, start, num_known),
        )

    @staticmethod
    def _draw_run(scheduled: ScheduledRequest) -> DrawRun | None:
        """The row of the last known token and of each draft draws the token after it."""
        request = scheduled.request
        if not scheduled.reaches_end or request.max_tokens == 0:
            return None
        row = SampleRow(
            params=request.params,
            seed=request.seed,
            position=request.num_tokens,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=request.token_ids[request.num_prompt_tokens :],
            stop_ids=request.stop_ids,
        )
        return DrawRun(row, scheduled.draft_token_ids)

    @staticmethod
    def _prompt_logprob_rows(
        request: Request, start: int, num_known: int
    ) -> PromptLogprobRows | None:
        """Position p predicts prompt token p + 1; the last prompt position predicts output."""
        num_top = request.params.prompt_logprobs
        if num_top is None or request.num_output_tokens:
            return None
        if start == 0:
            request.prompt_logprobs = [None]  # the first token is predicted by nothing
        next_ids = request.prompt_token_ids[start + 1 : start + num_known + 1]
        return PromptLogprobRows(next_ids, num_top) if next_ids else None

    # --- output to state --------------------------------------------------------------------

    def _process(self, plan: list[ScheduledRequest], output: StepOutput) -> None:
        for scheduled in plan:
            scheduled.request.num_inflight_tokens = 0
        if output.error is not None:
            self._fail_step(plan, output.error)
            return
        if not plan:
            return
        self._num_failed_steps = 0
        num_prompt_rows = sum(s.num_rows for s in plan if not s.request.is_decoding)
        self._chooser.observe_pass(num_prompt_rows, output.seconds)
        if self._speculation is not None and not num_prompt_rows:
            num_rows = sum(scheduled.num_rows for scheduled in plan)
            self._speculation.observe_pass(num_rows, output.seconds)
        for scheduled, draws, prompt in zip(
            plan, output.draws, output.prompt_logprobs, strict=True
        ):
            self._advance(scheduled, draws, prompt)

    def _fail_step(self, plan: list[ScheduledRequest], error: Exception) -> None:
        """Nothing of this pass is confirmed; its requests end, the others go on."""
        logger.error("a forward pass failed", exc_info=error)
        self.counters.failed_steps += 1
        self._num_failed_steps += 1
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            raise error
        for scheduled in plan:
            live = self._live[scheduled.request.request_id]
            self._finish(live, FinishReason.ERROR, error=f"the forward pass failed: {error}")

    def _advance(
        self,
        scheduled: ScheduledRequest,
        draws: Sequence[Sampled | Unsampled],
        prompt_logprobs: Sequence[TokenLogprobs],
    ) -> None:
        """Count what the pass confirmed, append what it drew, end or go on.

        num_computed_tokens       num_tokens
        |------ known tokens ---------|-- accepted drafts --|-- rejected --|
        |------------- confirmed: input was final ----------|
        """
        request, drafts = scheduled.request, scheduled.draft_token_ids
        live = self._live[request.request_id]
        kept = [draw for draw in draws if isinstance(draw, Sampled)]
        num_accepted = max(0, len(kept) - 1)
        broken = next((draw for draw in draws if isinstance(draw, Unsampled)), None)
        if broken is not None and not drafts:
            # Logits that are no numbers: what the pass wrote proves nothing.
            self._finish(live, FinishReason.ERROR, error=broken.error)
            return
        if broken is not None:
            # It may be a guess's own KV that is none, and that reaches the rows before it, too.
            request.drafts_barred = True
            if not kept:
                return  # the same row again, alone
        request.prompt_logprobs.extend(prompt_logprobs)
        request.num_computed_tokens += scheduled.num_rows - len(drafts) + num_accepted
        if kept:
            self._append(live, kept, len(drafts))
        elif request.num_uncomputed_tokens == 0:
            self._finish(live, FinishReason.LENGTH)  # max_tokens 0: prefill was all
        else:
            self.kv.commit(request)

    def _append(self, live: LiveRequest, draws: list[Sampled], num_drafts: int) -> None:
        """Append until something ends the generation; what the run had beyond it is dropped.

        All `draws` but the last are accepted drafts, of `num_drafts`.
        """
        request = live.request
        if request.times.first_token is None:
            request.times.first_token = time.monotonic()
        new_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        text = ""
        stop_reason: int | str | None = None
        reason: FinishReason | None = None
        for draw in draws:
            request.token_ids.append(draw.token_id)
            new_ids.append(draw.token_id)
            if draw.logprobs is not None:
                logprobs.append(draw.logprobs)
            piece, reason, stop_reason = self._end_of(live, draw.token_id)
            text += piece
            if reason is not None:
                break
        self.counters.generation_tokens += len(new_ids)
        if self._speculation is not None:
            num_accepted = len(draws) - 1
            num_kept = min(num_accepted, len(new_ids))
            self._speculation.observe(request, num_drafts, num_accepted, num_kept)
        kept = logprobs if request.params.logprobs is not None else None
        if reason is not None:
            self._finish(live, reason, new_ids, kept, text, stop_reason)
            return
        self.kv.commit(request)
        live.emit(self._output(live, new_ids, kept, text))

    def _end_of(
        self, live: LiveRequest, token_id: int
    ) -> tuple[str, FinishReason | None, int | str | None]:
        """Text of the token just appended, and whether it ends the generation."""
        request = live.request
        if token_id in request.stop_ids and request.num_output_tokens > request.params.min_tokens:
            by_request = token_id in request.params.stop_token_ids
            return live.detokenizer.flush(), FinishReason.STOP, token_id if by_request else None
        text, stop_string = live.detokenizer.push(token_id)
        if stop_string is not None:
            return text, FinishReason.STOP, stop_string
        if request.num_output_tokens >= request.max_tokens:
            return text + live.detokenizer.flush(), FinishReason.LENGTH, None
        return text, None, None

    # --- conversations ----------------------------------------------------------------------

    def _begin_turn(self, live: LiveRequest) -> None:
        """What the last turn under the key left and this one does not continue goes first now."""
        if live.cache_key is None:
            return
        request = live.request
        prompt = chain_hashes(request.root_hash, request.prompt_token_ids, self.kv.block_size)
        request.block_hashes = list(prompt)
        if request.is_background:
            return  # a guess at the turn to come
        left = self._sessions.superseded(request.root_hash, live.cache_key, prompt)
        if left:
            self.kv.supersede(left)

    def _end_turn(self, live: LiveRequest, num_committed: int) -> None:
        """After the last commit: `num_committed` tokens, or what it had when it was preempted, are
        what the next turn may find."""
        if live.cache_key is not None:
            request = live.request
            num_blocks = max(num_committed // self.kv.block_size, request.num_left_blocks)
            chain = request.block_hashes[:num_blocks]
            record = self._sessions.foresee if request.is_background else self._sessions.record
            record(request.root_hash, live.cache_key, chain)

    # --- ends -------------------------------------------------------------------------------

    def _finish(
        self,
        live: LiveRequest,
        reason: FinishReason,
        token_ids: list[int] | None = None,
        logprobs: list[TokenLogprobs] | None = None,
        text: str = "",
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> None:
        """The one way out: commit, free, count, tell the stream exactly once."""
        request = live.request
        if request.is_background:
            self.counters.idle_prefills += reason is FinishReason.LENGTH
            num_computed = request.num_computed_tokens - request.cached.total
            self.counters.idle_prefill_tokens += max(0, num_computed)
        num_committed = committed_len(request)
        self.scheduler.finish(request)
        self._end_turn(live, num_committed)
        del self._live[request.request_id]
        if self._speculation is not None:
            self._speculation.finish(request)
        request.finish_reason = reason
        request.times.finished = time.monotonic()
        if not request.is_background:
            self.counters.finished[reason] = self.counters.finished.get(reason, 0) + 1
            if request.admitted_once:
                self._count_hits(request)
        live.emit(self._output(live, token_ids or [], logprobs, text, stop_reason, error))

    def _count_hits(self, request: Request) -> None:
        counters, cached = self.counters, request.cached
        counters.prompt_tokens += request.num_prompt_tokens
        counters.prefix_cache_queries += request.num_prompt_tokens
        counters.prefix_cache_hits += cached.device
        if self._has_tiers:
            counters.external_queries += request.num_prompt_tokens - cached.device
            counters.external_hits += cached.cpu + cached.disk
        counters.recomputed_by_choice += request.recomputed_by_choice
        counters.prefill_seconds_saved += self._chooser.prefill_seconds(cached.total)
        for tier in ("device", "cpu", "disk"):
            hits = counters.hit_tokens.get(tier, 0) + getattr(cached, tier)
            counters.hit_tokens[tier] = hits

    def _output(
        self,
        live: LiveRequest,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        text: str,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> RequestOutput:
        request = live.request
        prompt_logprobs = None
        if request.wants_prompt_logprobs and not live.prompt_logprobs_sent:
            live.prompt_logprobs_sent = True
            prompt_logprobs = list(request.prompt_logprobs)
        return RequestOutput(
            request_id=request.request_id,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=request.finish_reason,
            stop_reason=stop_reason,
            error=error,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens,
            cached=request.cached,
            recomputed_by_choice=request.recomputed_by_choice,
            times=request.times,
            num_accepted_drafts=request.num_accepted_drafts,
            num_rejected_drafts=request.num_rejected_drafts,
        )

    # --- sight ------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """A snapshot; lists and dicts are copies."""
        pool, counters = self.kv.pool, self.counters
        stats = EngineStats(
            num_running=sum(not r.is_background for r in self.scheduler.running),
            num_waiting=len(self.scheduler.waiting)
            + sum(not r.is_background for r in self.scheduler.loading),
            kv_cache_usage=1.0 - pool.num_available / pool.num_blocks,
            num_blocks=pool.num_blocks,
            block_size=self.kv.block_size,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            finished=dict(counters.finished),
            preemptions=self.scheduler.num_preemptions,
            prefix_cache_queries=counters.prefix_cache_queries,
            prefix_cache_hits=counters.prefix_cache_hits,
            external_queries=counters.external_queries,
            external_hits=counters.external_hits,
            recomputed_by_choice=counters.recomputed_by_choice,
            prefill_seconds_saved=counters.prefill_seconds_saved,
            hit_tokens=dict(counters.hit_tokens),
            idle_prefills=counters.idle_prefills,
            idle_prefill_tokens=counters.idle_prefill_tokens,
            failed_steps=counters.failed_steps,
            failed_checks=counters.failed_checks,
            load_audits=asdict(self.auditor.counts()) if self.auditor else {},
            tiers=self.offload.stats(),
        )
        if self._speculation is not None:
            self._speculation.report(stats)
        return stats

    def check(self) -> None:
        """Conservation laws, raising AssertionError; cheap enough for every test step."""
        audit = self.auditor
        borrowers = audit.borrowers() if audit else []
        audited = audit.audited() if audit else []
        self.kv.check([*self.scheduler.live(), *borrowers], audited)
        waiting_for_loads = {r.request_id for r in self.scheduler.loading}
        assert all(r.pending_loads for r in self.scheduler.loading), waiting_for_loads
        ids = {request.request_id for request in self.scheduler.live()}
        assert ids == self._live.keys(), "a live request is not in exactly one queue"
