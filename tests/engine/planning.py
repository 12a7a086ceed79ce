"""Drives the planning half without a model: a pass is 'the rows are computed, a token is drawn'."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from engine.block_hash import root_hash
from engine.kv_cache_manager import KVCacheManager
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduler import ScheduledRequest, Scheduler, SchedulerLimits
from offload.manager import OffloadManager

FINGERPRINT = bytes(32)
BLOCK_SIZE = 4


def make_kv(num_blocks: int, **fields: Any) -> KVCacheManager:
    return KVCacheManager(num_blocks, BLOCK_SIZE, OffloadManager([], block_bytes=64), **fields)


def make_scheduler(
    num_blocks: int = 64, max_num_seqs: int = 8, max_num_batched_tokens: int = 32
) -> Scheduler:
    limits = SchedulerLimits(max_num_seqs, max_num_batched_tokens)
    return Scheduler(limits, make_kv(num_blocks))


_arrivals = iter(range(1, 1 << 30))


def make_request(
    prompt: int | Sequence[int],
    max_tokens: int = 4,
    *,
    priority: int = 0,
    salt: str | None = None,
    **params: Any,
) -> Request:
    """`prompt` as a number: that many tokens that nobody else has."""
    order = next(_arrivals)
    tokens = [1000 * order + i for i in range(prompt)] if isinstance(prompt, int) else list(prompt)
    return Request(
        request_id=f"r{order}",
        prompt_token_ids=tokens,
        params=SamplingParams(max_tokens=max_tokens, **params),
        max_tokens=max_tokens,
        stop_ids=frozenset(),
        seed=0,
        root_hash=root_hash(FINGERPRINT, salt),
        arrival_order=order,
        priority=priority,
    )


def run_pass(
    scheduler: Scheduler, plan: list[ScheduledRequest], *, num_accepted: int = 0
) -> list[Request]:
    """Confirm every row, draw a token where the rows reach the end; returns who finished."""
    finished = []
    for scheduled in plan:
        request = scheduled.request
        request.num_inflight_tokens = 0
        reaches_end = scheduled.reaches_end
        drafts = scheduled.draft_token_ids
        accepted = min(num_accepted, len(drafts))
        request.num_computed_tokens += scheduled.num_rows - len(drafts) + accepted
        if reaches_end:
            drawn = 7_000_000 + request.arrival_order * 1000 + request.num_output_tokens
            request.token_ids += [*drafts[:accepted], drawn]
        scheduler.kv.commit(request)
        if request.num_output_tokens >= request.max_tokens:
            scheduler.finish(request)
            finished.append(request)
        scheduler.kv.check(scheduler.live())
    return finished


def run_to_end(scheduler: Scheduler, max_passes: int = 1000) -> list[list[Request]]:
    """Passes until nobody is left; who finished in each."""
    history = []
    while scheduler.live():
        assert len(history) < max_passes, "no progress"
        plan = scheduler.schedule()
        assert plan, "live requests and nothing to do"
        history.append(run_pass(scheduler, plan))
    return history


def settle(scheduler: Scheduler) -> None:
    """Rounds of copies until no save and no load is under way."""
    offload, loads = scheduler.kv.offload, scheduler.kv.loads
    deadline = time.monotonic() + 10
    while not offload.idle():
        assert time.monotonic() < deadline, "transfers do not end"
        transfers = offload.poll()
        assert not transfers.failed_loads
        loads.copying(transfers.copies_in)
        offload.copied_out(transfers.copies_out)
        offload.copied_in(transfers.copies_in)
        for copy in transfers.copies_in:
            for request in loads.loaded(copy.ticket):
                if not request.pending_loads:
                    scheduler.loads_settled(request)
        if not transfers:
            time.sleep(0.001)
