"""Prefix matching, committing, and what a request's blocks become."""

import pytest

from engine.prefix_match import DEVICE, PrefixHit
from engine.request import Request
from engine.scheduler import Scheduler
from tests.engine.planning import (
    BLOCK_SIZE,
    make_kv,
    make_request,
    make_scheduler,
    run_pass,
    run_to_end,
)


def serve(scheduler: Scheduler, request: Request) -> int:
    """Run to the end; cached tokens."""
    scheduler.add(request)
    run_to_end(scheduler)
    return request.cached.total


@pytest.mark.parametrize("num_prompt", range(1, 14))
def test_a_replayed_prompt_hits_all_but_its_last_token(num_prompt: int) -> None:
    scheduler = make_scheduler()
    prompt = list(range(num_prompt))
    assert serve(scheduler, make_request(prompt, max_tokens=1)) == 0
    expected = (num_prompt - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert serve(scheduler, make_request(prompt, max_tokens=1)) == expected


@pytest.mark.parametrize("num_output", range(1, 10))
def test_generated_tokens_hit_up_to_the_committed_length(num_output: int) -> None:
    """The last token was never an input: its block is full by count and must not be kept."""
    scheduler = make_scheduler()
    first = make_request(6, max_tokens=num_output)
    serve(scheduler, first)
    replay = make_request([*first.token_ids, 1, 2, 3, 4, 5], max_tokens=1)
    committed = 6 + num_output - 1
    assert serve(scheduler, replay) == committed // BLOCK_SIZE * BLOCK_SIZE


def test_another_salt_hits_nothing() -> None:
    scheduler = make_scheduler()
    prompt = list(range(12))
    serve(scheduler, make_request(prompt, salt="a"))
    assert serve(scheduler, make_request(prompt, salt="b")) == 0
    assert serve(scheduler, make_request(prompt)) == 0
    assert serve(scheduler, make_request(prompt, salt="a")) == 8


def test_a_hit_stops_at_the_first_difference() -> None:
    scheduler = make_scheduler()
    serve(scheduler, make_request(list(range(16))))
    changed = [*range(8), 99, *range(9, 16)]
    assert serve(scheduler, make_request(changed)) == 8


def test_the_same_tokens_elsewhere_are_no_hit() -> None:
    """A block stands for everything before it, not for its own tokens."""
    scheduler = make_scheduler()
    serve(scheduler, make_request([*range(4), *range(50, 54), 9]))
    serve(scheduler, make_request([*range(4, 8), *range(60, 64), 9]))
    assert serve(scheduler, make_request([*range(4, 8), *range(50, 54), 9])) == 4


def test_prompt_logprobs_compute_the_whole_prompt() -> None:
    scheduler = make_scheduler()
    prompt = list(range(12))
    serve(scheduler, make_request(prompt))
    assert serve(scheduler, make_request(prompt, prompt_logprobs=0)) == 0


def test_shared_blocks_are_referenced_not_copied() -> None:
    scheduler = make_scheduler(num_blocks=16)
    prompt = list(range(13))
    serve(scheduler, make_request(prompt))
    one, other = make_request(prompt), make_request(prompt)
    scheduler.add(one)
    scheduler.add(other)
    scheduler.schedule()
    assert one.block_tables[0][:3] == other.block_tables[0][:3]
    assert one.block_tables[0][3] != other.block_tables[0][3]  # written, so private


def test_a_full_hit_recomputes_its_last_block_in_private() -> None:
    scheduler = make_scheduler(num_blocks=16)
    prompt = list(range(12))
    serve(scheduler, make_request(prompt))
    again = make_request(prompt)
    scheduler.add(again)
    scheduler.schedule()
    pool = scheduler.kv.pool
    known = [pool.lookup(key) for key in pool.known()]
    held = [block in known for block in again.block_tables[0]]
    assert held == [True, True, False]


@pytest.mark.parametrize("way_out", ["finish", "preempt"])
def test_a_block_takes_the_place_of_its_evicted_twin(way_out: str) -> None:
    """The last block of a full hit is computed in private; its twin goes while it is in use."""
    scheduler = make_scheduler(num_blocks=8)
    prompt = list(range(8))
    serve(scheduler, make_request(prompt, max_tokens=1))
    again = make_request(prompt, max_tokens=3)
    scheduler.add(again)
    run_pass(scheduler, scheduler.schedule())
    pool = scheduler.kv.pool
    taken = [pool.allocate() for _ in range(pool.num_available)]
    assert pool.num_cached == 1
    for block_id in taken:
        pool.release(block_id)
    scheduler.finish(again) if way_out == "finish" else scheduler._preempt(again)
    assert scheduler.kv.match(make_request([*prompt, 9])).num_device == 2


def test_tails_are_evicted_before_heads() -> None:
    scheduler = make_scheduler(num_blocks=6)
    prompt = list(range(17))
    serve(scheduler, make_request(prompt, max_tokens=1))  # 4 full blocks cached
    serve(scheduler, make_request(14, max_tokens=1))  # takes 4 blocks: 2 free ones, then 2 tails
    assert serve(scheduler, make_request(prompt, max_tokens=1)) == 8


def test_a_reset_keeps_running_requests_out_of_the_map() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    request = make_request(list(range(16)), max_tokens=6)
    scheduler.add(request)
    plan = scheduler.schedule()
    for scheduled in plan:
        scheduled.request.num_inflight_tokens = 0
        scheduled.request.num_computed_tokens += scheduled.num_rows
    scheduler.kv.commit(request)
    assert scheduler.kv.pool.num_cached == 2
    assert scheduler.kv.reset(scheduler.live()) == 2
    run_to_end(scheduler)
    prompt = list(range(16))
    assert serve(scheduler, make_request([*prompt, 5])) == 0
    # blocks 2.. were computed after the reset; with their parents recomputed they may be found
    assert scheduler.kv.match(make_request([*prompt, 5])).sources[0] == DEVICE


def test_a_reset_bars_what_the_step_in_flight_is_computing() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    prompt = list(range(16))
    scheduler.add(make_request(prompt, max_tokens=2))
    run_pass(scheduler, scheduler.schedule())
    plan = scheduler.schedule()  # positions 8 to 15 are on the device's stream
    scheduler.kv.reset(scheduler.live())
    run_pass(scheduler, plan)
    assert scheduler.kv.pool.num_cached == 0


def test_what_is_recomputed_after_a_reset_is_cached_again() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=32)
    request = make_request(list(range(16)), max_tokens=6)
    scheduler.add(request)
    run_pass(scheduler, scheduler.schedule())
    assert scheduler.kv.reset(scheduler.live()) == 4
    scheduler._preempt(request)
    assert scheduler.kv.pool.num_cached == 0
    run_to_end(scheduler)
    assert request.num_preemptions == 1
    assert serve(scheduler, make_request([*range(16), 5])) == 16


def test_release_balances_every_reference() -> None:
    kv = make_kv(8)
    request = make_request(13)
    kv.admit(request, PrefixHit(), 0)
    kv.check([request])
    assert kv.pool.num_available == 4
    assert not kv.grow(request, 33)
    assert kv.pool.num_available == 4  # nothing taken
    assert kv.grow(request, 32)
    kv.release(request)
    kv.check([])
    assert kv.pool.num_available == 8
