"""A guarded drafter can do no harm."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from engine import guarded_drafter
from engine.drafter import DraftContext, Drafter
from engine.guarded_drafter import DrafterThread, GuardedDrafter
from tests import drafters

VOCAB_SIZE = 100
LONG = 30.0  # seconds; never waited for


def context(*token_ids: int, max_tokens: int = 3, request_id: str = "r") -> DraftContext:
    return DraftContext(request_id, token_ids, max_tokens, salt=None)


@pytest.fixture
def continuations(monkeypatch):
    monkeypatch.setattr(drafters, "CONTINUATIONS", {})
    drafters.know([1, 2], [10, 11, 12, 13, 99])


def make(drafter_class: type, **arguments) -> GuardedDrafter:
    drafter = drafter_class(vocab_size=VOCAB_SIZE, max_tokens=3)
    arguments = {"deadline": LONG, "thread": DrafterThread(), **arguments}
    return GuardedDrafter(drafter, vocab_size=VOCAB_SIZE, **arguments)


@contextlib.asynccontextmanager
async def guarded(drafter_class: type, **arguments) -> AsyncIterator[GuardedDrafter]:
    guard = make(drafter_class, **arguments)
    try:
        yield guard
    finally:
        guard.close()


def answering(answer: Callable[..., object]) -> type:
    """A drafter class whose `propose` is `answer`."""

    class Answering:
        def __init__(self, *, vocab_size: int, max_tokens: int) -> None:
            pass

        def propose(self, contexts):
            return answer(contexts)

        def finish(self, request_id):
            pass

    return Answering


async def drained(guard: GuardedDrafter) -> None:
    """Until the drafter's thread has done all it was asked for."""
    done = threading.Event()
    guard._thread.post(done.set)
    assert await asyncio.to_thread(done.wait, LONG)


async def test_good_drafts_pass_through(continuations):
    drafters.know([7], [8])
    async with guarded(drafters.OracleDrafter) as guard:
        contexts = [context(1, 2), context(1, 2, 10, 11, 12, max_tokens=2), context(7)]
        assert await guard.propose(contexts) == [[10, 11, 12], [13, 99], [8]]
        assert guard.failures == {}


async def test_no_contexts_no_call():
    async with guarded(drafters.RaisingDrafter) as guard:
        assert await guard.propose([]) == []
        assert guard.failures == {}


async def test_raising_costs_its_drafts_and_a_counter(caplog):
    async with guarded(drafters.RaisingDrafter) as guard:
        assert await guard.propose([context(1), context(2)]) == [[], []]
        assert await guard.propose([context(1)]) == [[]]
        guard.finish(context(request_id="r"))
        await drained(guard)
        assert guard.failures == {"raised": 3}
    assert len(caplog.records) == 1  # not one per step
    assert "RaisingDrafter" in caplog.text
    assert "this drafter always raises" in caplog.text


async def test_even_an_exit_does_not_end_the_thread():
    def leave(contexts):
        raise SystemExit(1)

    async with guarded(answering(leave)) as guard:
        assert await guard.propose([context(1)]) == [[]]
        assert await guard.propose([context(1)]) == [[]]
        assert guard.failures == {"raised": 2}


async def test_each_kind_of_nonsense_has_its_counter():
    async with guarded(drafters.NonsenseDrafter) as guard:
        for _ in drafters.NonsenseDrafter.KINDS:
            assert await guard.propose([context(1)]) == [[]]
        assert guard.failures == {
            "wrong_length": 1,
            "wrong_type": 3,
            "too_many": 1,
            "out_of_vocabulary": 1,
        }


@pytest.mark.parametrize(
    ("drafts", "kept", "failures"),
    [
        ([0, 99], [0, 99], {}),
        ((0, 99), [0, 99], {}),
        ([np.int64(5)], [5], {}),
        ([], [], {}),
        ([1, 2, 3], [1, 2, 3], {}),
        ([1, 2, 3, 4], [], {"too_many": 1}),
        ([100], [], {"out_of_vocabulary": 1}),
        ([5, -1], [], {"out_of_vocabulary": 1}),
        ([5.0], [], {"wrong_type": 1}),
        ([True], [], {"wrong_type": 1}),
        ([None], [], {"wrong_type": 1}),
        ("12", [], {"wrong_type": 1}),
        (None, [], {"wrong_type": 1}),
        ({1: 2}, [], {"wrong_type": 1}),
    ],
)
async def test_bad_drafts_of_one_request_leave_the_others_theirs(drafts, kept, failures):
    async with guarded(answering(lambda contexts: [drafts, [6]])) as guard:
        assert await guard.propose([context(1), context(2)]) == [kept, [6]]
        assert guard.failures == failures
        assert all(type(token_id) is int for token_id in kept)


async def test_drafts_are_copies():
    mine = [[1]]
    async with guarded(answering(lambda contexts: mine)) as guard:
        drafts = await guard.propose([context(1)])
        mine[0].append(2)
        assert drafts == [[1]]


async def test_a_stuck_call_is_left_alone_until_it_returns(continuations):
    now = 0.0
    async with guarded(drafters.SlowDrafter, deadline=0.02, clock=lambda: now) as guard:
        slow = guard._drafter
        assert await guard.propose([context(1, 2)]) == [[]]
        assert guard.failures == {"slow": 1}
        now = 1e9
        assert await guard.propose([context(1, 2)]) == [[]]
        assert guard.failures == {"slow": 1, "stuck": 1}
        assert slow.entered == 1
        slow.release.set()
        await drained(guard)
        guard._deadline = LONG
        assert await guard.propose([context(1, 2)]) == [[10, 11, 12]]
        assert slow.entered == 2
        assert guard.failures == {"slow": 1, "stuck": 1}


async def test_the_pause_after_late_calls_doubles_and_halves_with_timely_ones(continuations):
    now = 0.0

    async def late_call() -> None:
        slow.release.clear()
        guard._deadline = 0.005
        assert await guard.propose([context(1, 2)]) == [[]]
        slow.release.set()
        guard._deadline = LONG
        await drained(guard)

    async def paused_until(moment: float) -> None:
        nonlocal now
        entered = slow.entered
        now = moment - 0.001
        assert await guard.propose([context(1, 2)]) == [[]]
        assert slow.entered == entered
        now = moment

    async with guarded(drafters.SlowDrafter, clock=lambda: now) as guard:
        slow = guard._drafter
        for pause in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0):
            await late_call()
            await paused_until(now + pause)
        assert await guard.propose([context(1, 2)]) == [[10, 11, 12]]
        await late_call()  # half of it, doubled
        await paused_until(now + 60.0)
        for _ in range(7):  # 30, 15, 7.5, ... and none at last
            assert await guard.propose([context(1, 2)]) == [[10, 11, 12]]
        await late_call()
        await paused_until(now + 1.0)
        assert await guard.propose([context(1, 2)]) == [[10, 11, 12]]
        assert guard.failures == {"slow": 10, "stuck": 10}


async def test_cancellation_leaves_one_call_running(continuations):
    async with guarded(drafters.SlowDrafter) as guard:
        slow = guard._drafter
        task = asyncio.create_task(guard.propose([context(1, 2)]))
        assert await asyncio.to_thread(slow.has_entered.wait, LONG)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await guard.propose([context(1, 2)]) == [[]]
        assert (slow.entered, guard.failures) == (1, {"stuck": 1})
        slow.release.set()
        await drained(guard)
        assert await guard.propose([context(1, 2)]) == [[10, 11, 12]]


async def test_one_thread_does_everything():
    threads = set()

    class Watching(drafters.OracleDrafter):
        def propose(self, contexts):
            threads.add(threading.current_thread())
            return [[] for _ in contexts]

        def finish(self, request_id):
            threads.add(threading.current_thread())
            super().finish(request_id)

    async with guarded(Watching) as guard:
        await guard.propose([context(1)])
        guard.finish(context(request_id="a"))
        guard.finish(context(request_id="b"))
        await guard.propose([context(1)])
        assert guard._drafter.finished == ["a", "b"]
    (thread,) = threads
    assert thread.daemon  # a stuck drafter must not keep the process
    thread.join(LONG)
    assert not thread.is_alive()


class Learning(drafters.OracleDrafter):
    """Writes down what it is called with, and where."""

    def __init__(self, **sizes) -> None:
        super().__init__(**sizes)
        self.calls: list[tuple[str, object]] = []
        self.threads = set()

    def propose(self, contexts):
        self.threads.add(threading.current_thread())
        return super().propose(contexts)

    def remember(self, context):
        self.calls.append(("remember", context.token_ids))
        if context.request_id == "bad":
            raise RuntimeError("planted")

    def finish(self, request_id):
        self.threads.add(threading.current_thread())
        self.calls.append(("finish", request_id))


async def test_one_that_learns_is_told_all_tokens_before_the_finish():
    async with guarded(Learning, thread=None) as guard:
        guard.finish(context(1, 2, 3, request_id="a"))
        guard.finish(context(4, request_id="bad"))
        assert guard._drafter.calls == [
            ("remember", (1, 2, 3)),
            ("finish", "a"),
            ("remember", (4,)),
            ("finish", "bad"),  # told even if it failed to learn
        ]
        assert guard.failures == {"raised": 1}


async def test_without_a_thread_it_is_called_where_it_is_asked(continuations):
    async with guarded(Learning, thread=None) as guard:
        assert await guard.propose([context(1, 2)]) == [[10, 11, 12]]
        guard.finish(context(1, 2))
        assert guard._drafter.threads == {threading.current_thread()}


class Likely(Learning):
    """Sure of everything."""

    told: object = (1.5, 0.5)

    def likelihoods(self):
        return self.told


async def test_likelihoods_come_with_the_drafts_of_one_that_is_called_in_place(continuations):
    async with guarded(Likely, thread=None) as guard:
        assert guard.tells_likelihoods
        drafts = guard.propose_likely([context(1, 2), context(1, 2, 10)])
        assert drafts == [([10, 11, 12], 1.0), ([11, 12, 13], 0.5)]
        guard._drafter.told = [0.5]
        assert guard.propose_likely([context(1, 2), context(1, 2, 10)]) is None
        assert guard.failures == {"raised": 1}
        assert guard.propose_likely([]) is None
    async with guarded(Likely) as elsewhere:
        assert not elsewhere.tells_likelihoods
    async with guarded(Learning, thread=None) as plain:
        assert not plain.tells_likelihoods


async def test_calls_may_be_posted_to_an_executor_and_have_no_deadline(continuations):
    with ThreadPoolExecutor(1) as executor:
        async with guarded(Learning, thread=None, post=executor.submit, deadline=0.0) as guard:
            assert await guard.propose([context(1, 2)]) == [[10, 11, 12]]
            guard.finish(context(1, 2))
            (thread,) = await asyncio.get_running_loop().run_in_executor(
                executor, lambda: guard._drafter.threads
            )
            assert thread is not threading.current_thread()
            assert guard.failures == {}


async def test_finishes_behind_a_stuck_call_are_bounded(monkeypatch, continuations):
    monkeypatch.setattr(guarded_drafter, "MAX_PENDING_FINISHES", 2)
    async with guarded(drafters.SlowDrafter, deadline=0.01) as guard:
        await guard.propose([context(1, 2)])
        for request_id in "abcd":
            guard.finish(context(request_id=request_id))
        assert guard.failures == {"slow": 1, "unfinished": 2}
        guard._drafter.release.set()
        await drained(guard)
        assert guard._drafter.finished == ["a", "b"]


async def test_after_close_nothing_is_called():
    guard = make(drafters.RaisingDrafter)
    guard.close()
    assert await guard.propose([context(1)]) == [[]]
    guard.finish(context(request_id="r"))
    assert guard.failures == {}
    assert guard._thread._thread is None


def test_a_loop_that_closed_meanwhile_hurts_nobody(continuations):
    guard = make(drafters.SlowDrafter, deadline=0.01)
    assert asyncio.run(guard.propose([context(1, 2)])) == [[]]
    guard._drafter.release.set()
    guard.close()
    guard._thread._thread.join(LONG)
    assert not guard._thread._thread.is_alive()


# --- the drafters that other tests lean on


def propose(drafter_class: type[drafters.OracleDrafter], *token_ids: int, **arguments) -> list[int]:
    drafter: Drafter = drafter_class(vocab_size=VOCAB_SIZE, max_tokens=3)
    return drafter.propose([context(*token_ids, **arguments)])[0]


def test_oracle_knows_and_always_wrong_never_does(continuations):
    assert propose(drafters.OracleDrafter, 1, 2, 10) == [11, 12, 13]
    assert propose(drafters.AlwaysWrongDrafter, 1, 2, 10) == [12, 13, 14]
    assert propose(drafters.AlwaysWrongDrafter, 1, 2, 10, 11, 12, 13) == [0]  # 99 + 1 wraps
    assert propose(drafters.OracleDrafter, 1, 2, 10, max_tokens=1) == [11]


@pytest.mark.parametrize("token_ids", [(1,), (1, 2, 11), (3,)])
def test_an_unknown_sequence_raises(continuations, token_ids):
    with pytest.raises(LookupError, match="no known continuation"):
        propose(drafters.OracleDrafter, *token_ids)


def test_random_acceptance_is_a_coin_per_position(monkeypatch):
    monkeypatch.setattr(drafters, "CONTINUATIONS", {})
    truth = [position % 90 for position in range(1000)]
    drafters.know([5], truth)
    drafter = drafters.RandomAcceptanceDrafter(vocab_size=VOCAB_SIZE, max_tokens=1000)
    (whole,) = drafter.propose([context(5, max_tokens=1000)])
    right = [draft == token_id for draft, token_id in zip(whole, truth, strict=True)]
    assert 550 < sum(right) < 650
    assert all(d in (t, t + 1) for d, t in zip(whole, truth, strict=True))
    (later,) = drafter.propose([context(5, *truth[:400], max_tokens=3)])
    assert later == whole[400:403]


def test_continuations_reach_another_process_by_file(tmp_path, monkeypatch):
    monkeypatch.setattr(drafters, "CONTINUATIONS", {})
    path = tmp_path / "known.json"
    path.write_text("[[[1], [2, 3]]]")
    monkeypatch.setenv(drafters.CONTINUATIONS_VARIABLE, str(path))
    assert propose(drafters.OracleDrafter, 1) == [2, 3]
