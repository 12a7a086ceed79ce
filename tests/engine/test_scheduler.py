"""Scheduling: budget, fairness, priorities, preemption. Pure planning, no model."""

import pytest

from engine import scheduler as scheduler_module
from engine.request import Request
from engine.scheduler import RowsAhead, ScheduledRequest
from tests.engine.planning import make_request, make_scheduler, run_pass, run_to_end


def rows(plan: list[ScheduledRequest]) -> dict[str, int]:
    return {scheduled.request.request_id: scheduled.num_rows for scheduled in plan}


def test_a_prompt_is_computed_in_chunks_of_the_budget() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=32)
    request = make_request(70, max_tokens=1)
    scheduler.add(request)
    seen = []
    while scheduler.live():
        plan = scheduler.schedule()
        seen.append(plan[0].num_rows)
        run_pass(scheduler, plan)
    assert seen == [32, 32, 6]


def test_one_row_a_pass_while_decoding() -> None:
    scheduler = make_scheduler()
    request = make_request(5, max_tokens=4)
    scheduler.add(request)
    seen = []
    while scheduler.live():
        plan = scheduler.schedule()
        seen.append(plan[0].num_rows)
        run_pass(scheduler, plan)
    assert seen == [5, 1, 1, 1]
    assert request.num_computed_tokens == 0  # released
    assert request.num_tokens == 9


def test_running_streams_get_their_row_beside_a_long_prompt() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=32)
    stream = make_request(4, max_tokens=20)
    scheduler.add(stream)
    run_pass(scheduler, scheduler.schedule())
    long = make_request(100, max_tokens=1)
    scheduler.add(long)
    for _ in range(5):
        plan = scheduler.schedule()
        assert rows(plan) == {stream.request_id: 1, long.request_id: 8}  # a quarter of 32
        run_pass(scheduler, plan)


def test_a_short_prompt_is_not_stuck_behind_a_long_one() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=32)
    long, short = make_request(120, max_tokens=1), make_request(10, max_tokens=1)
    scheduler.add(long)
    run_pass(scheduler, scheduler.schedule())
    scheduler.add(short)
    plan = scheduler.schedule()
    assert rows(plan) == {long.request_id: 22, short.request_id: 10}
    assert run_pass(scheduler, plan) == [short]


def test_short_prompts_do_not_starve_a_long_one() -> None:
    """Half the budget goes by arrival, however many shorter ones keep coming."""
    scheduler = make_scheduler(num_blocks=256, max_num_seqs=64, max_num_batched_tokens=32)
    long = make_request(160, max_tokens=1)
    scheduler.add(long)
    passes = 0
    while long in scheduler.live():
        assert passes < 50, "it starves"
        for _ in range(2):  # enough for every row there is
            scheduler.add(make_request(16, max_tokens=1))
        run_pass(scheduler, scheduler.schedule())
        passes += 1
    assert passes == 10  # 16 of 32 rows each pass


def test_the_budget_is_never_exceeded() -> None:
    scheduler = make_scheduler(num_blocks=256, max_num_seqs=8, max_num_batched_tokens=24)
    for size in (50, 3, 17, 40, 9, 33, 2, 28):
        scheduler.add(make_request(size, max_tokens=6))
    while scheduler.live():
        plan = scheduler.schedule()
        assert 0 < sum(s.num_rows for s in plan) <= 24
        run_pass(scheduler, plan)


def test_at_most_max_num_seqs_run() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for _ in range(5):
        scheduler.add(make_request(4, max_tokens=3))
    while scheduler.live():
        plan = scheduler.schedule()
        assert len(scheduler.running) <= 2
        run_pass(scheduler, plan)


def test_lower_priority_number_first_then_arrival() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    late_urgent = []
    first, second = make_request(4, max_tokens=1), make_request(4, max_tokens=1)
    scheduler.add(first)
    scheduler.add(second)
    urgent = make_request(4, max_tokens=1, priority=-1)
    scheduler.add(urgent)
    for finished in run_to_end(scheduler):
        late_urgent += finished
    assert late_urgent == [urgent, first, second]


def test_nobody_starves_behind_a_stream_of_urgent_requests() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    patient = make_request(4, max_tokens=1, priority=5)
    scheduler.add(patient)
    finished: list[Request] = []
    while patient not in finished and len(finished) < 20:
        scheduler.add(make_request(4, max_tokens=1, priority=-5))
        finished += run_pass(scheduler, scheduler.schedule())
    assert len(finished) == 8  # every eighth admission goes to the longest waiting


def test_admission_waits_until_the_pool_holds_the_whole_prompt() -> None:
    scheduler = make_scheduler(num_blocks=8)  # 32 positions
    big, other = make_request(24, max_tokens=2), make_request(12, max_tokens=1)
    scheduler.add(big)
    scheduler.add(other)
    run_pass(scheduler, scheduler.schedule())
    assert scheduler.running == [big]
    assert scheduler.waiting == [other]
    finished = [r for history in run_to_end(scheduler) for r in history]
    assert finished == [big, other]


def test_the_latest_is_preempted_and_resumes_where_it_was() -> None:
    scheduler = make_scheduler(num_blocks=5)  # 20 positions
    first, second = make_request(6, max_tokens=9), make_request(6, max_tokens=9)
    scheduler.add(first)
    scheduler.add(second)
    finished = [r for history in run_to_end(scheduler) for r in history]
    assert finished == [first, second]
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    assert scheduler.num_preemptions == 1
    assert (first.num_output_tokens, second.num_output_tokens) == (9, 9)


def test_a_preempted_request_keeps_its_committed_blocks_findable() -> None:
    scheduler = make_scheduler(num_blocks=5)
    first, second = make_request(6, max_tokens=9), make_request(6, max_tokens=9)
    scheduler.add(first)
    scheduler.add(second)
    while not second.num_preemptions:
        run_pass(scheduler, scheduler.schedule())
    committed = second.num_tokens - 1
    assert scheduler.kv.match(second).num_device == committed // 4


def test_twice_as_many_long_outputs_as_the_pool_holds_all_finish() -> None:
    scheduler = make_scheduler(num_blocks=16, max_num_seqs=8)
    requests = [make_request(5, max_tokens=25) for _ in range(8)]  # 8 x 29 positions, pool of 64
    for request in requests:
        scheduler.add(request)
    run_to_end(scheduler)
    assert [r.num_output_tokens for r in requests] == [25] * 8
    assert scheduler.num_preemptions > 0
    assert scheduler.kv.pool.num_available == 16


def test_drafts_are_rows_and_rejected_ones_are_not_computed() -> None:
    scheduler = make_scheduler()
    request = make_request(5, max_tokens=10)
    scheduler.add(request)
    run_pass(scheduler, scheduler.schedule())
    request.draft_token_ids = [1, 2, 3]
    plan = scheduler.schedule()
    assert plan[0].num_rows == 4
    assert plan[0].draft_token_ids == [1, 2, 3]
    assert plan[0].reaches_end
    run_pass(scheduler, plan, num_accepted=2)
    assert request.num_computed_tokens == 5 + 1 + 2
    assert request.num_tokens == 5 + 1 + 3


def test_drafts_never_cause_preemption() -> None:
    """The pool has one spare block, which the other request needs for its next token."""
    scheduler = make_scheduler(num_blocks=6)
    first, second = make_request(7, max_tokens=9), make_request(7, max_tokens=9)
    scheduler.add(first)
    scheduler.add(second)
    for _ in range(2):  # 7 prompt tokens, then the eighth position: both blocks of both are full
        run_pass(scheduler, scheduler.schedule())
    assert scheduler.kv.pool.num_available == 2
    first.draft_token_ids = [1, 2, 3, 4]  # a third block holds three of them, a fourth the rest
    plan = scheduler.schedule()
    assert rows(plan) == {first.request_id: 1, second.request_id: 1}
    assert scheduler.num_preemptions == 0


def test_drafts_leave_prompts_their_share_of_the_rows() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    streams = [make_request(2, max_tokens=50) for _ in range(2)]
    for stream in streams:
        scheduler.add(stream)
    run_pass(scheduler, scheduler.schedule())
    prompt = make_request(20, max_tokens=1)
    scheduler.add(prompt)
    for num_drafts in (2, 2, 2):  # first waiting, then running
        for stream in streams:
            stream.draft_token_ids = [1, 2, 3, 4]
        plan = scheduler.schedule()
        assert rows(plan) == {
            streams[0].request_id: 1 + num_drafts,
            streams[1].request_id: 1 + num_drafts,
            prompt.request_id: 2,
        }
        run_pass(scheduler, plan)


def test_while_somebody_waits_for_blocks_drafts_get_none_that_is_not_held() -> None:
    scheduler = make_scheduler(num_blocks=6)
    stream = make_request(2, max_tokens=50)
    scheduler.add(stream)
    run_pass(scheduler, scheduler.schedule())
    scheduler.add(make_request(23, max_tokens=1))  # all six blocks of four
    drafted = []
    for _ in range(6):
        stream.draft_token_ids = [1, 2, 3, 4]
        plan = scheduler.schedule()
        held = 4 * len(stream.block_tables[0])
        drafted.append((stream.num_tokens, held, rows(plan)[stream.request_id] - 1))
        run_pass(scheduler, plan)
    # (tokens, slots held, drafts): a second block at first, before anybody was refused.
    assert drafted == [(3, 8, 4), (4, 8, 4), (5, 8, 3), (6, 8, 2), (7, 8, 1), (8, 8, 0)]


def test_rows_for_drafts_are_shared_and_what_one_does_not_use_is_the_others() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    streams = [make_request(2, max_tokens=50) for _ in range(3)]
    for stream in streams:
        scheduler.add(stream)
    run_pass(scheduler, scheduler.schedule())
    assert scheduler.rows_ahead() == RowsAhead(prompts=0, spare=13)
    for stream, num_drafts in zip(streams, (9, 2, 9), strict=True):
        stream.draft_token_ids = [1] * num_drafts
    plan = scheduler.schedule()
    assert list(rows(plan).values()) == [1 + 5, 1 + 2, 1 + 6]


def test_rows_ahead_are_those_that_the_step_has() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16, num_blocks=8, max_num_seqs=4)
    scheduler.add(make_request(2, max_tokens=50))
    run_pass(scheduler, scheduler.schedule())
    scheduler.add(make_request(3, max_tokens=2))
    assert scheduler.rows_ahead() == RowsAhead(prompts=4, spare=11)
    run_pass(scheduler, scheduler.schedule())
    assert scheduler.rows_ahead() == RowsAhead(prompts=0, spare=14)
    scheduler.add(make_request(30, max_tokens=2))
    scheduler.schedule()  # the pool has no room for that one
    assert scheduler.rows_ahead() == RowsAhead(prompts=0, spare=14)


def test_finish_is_legal_in_every_state_and_frees_everything() -> None:
    scheduler = make_scheduler(num_blocks=4, max_num_seqs=1)
    running, waiting = make_request(8, max_tokens=4), make_request(8, max_tokens=4)
    scheduler.add(running)
    scheduler.add(waiting)
    run_pass(scheduler, scheduler.schedule())
    scheduler.finish(waiting)
    scheduler.finish(running)
    scheduler.finish(running)  # twice is once
    assert scheduler.live() == []
    assert scheduler.kv.pool.num_available == 4


def test_prompt_logprobs_take_small_chunks() -> None:
    scheduler = make_scheduler(num_blocks=256, max_num_batched_tokens=512)
    scheduler.add(make_request(300, max_tokens=1, prompt_logprobs=0))
    assert scheduler.schedule()[0].num_rows == 128


@pytest.mark.parametrize("what", ["logprobs", "background"])
def test_who_goes_on_at_the_others_cost_computes_no_more_at_once_than_else(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "MAX_LOGPROB_CHUNK", 5)
    monkeypatch.setattr(scheduler_module, "MAX_BACKGROUND_CHUNK", 5)
    scheduler = make_scheduler()
    request = make_request(40, prompt_logprobs=0 if what == "logprobs" else None)
    request.is_background = what == "background"
    scheduler.add(request)
    run_pass(scheduler, scheduler.schedule())
    assert request.num_computed_tokens == 5
    assert rows(scheduler._unblock()) == {request.request_id: 5}
