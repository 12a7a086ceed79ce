"""The real planner, core and tiers around a ghost device, every instant of it scripted.

Nothing here has a thread or a clock of its own: I/O jobs wait until `run_job` runs them, in any
order and with any error; passes run inside `step`. What a real engine leaves to luck is thus a
choice of the caller's, and the same choices always lead to the same end.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.block_hash import root_hash
from engine.core import EngineCore, LiveRequest
from engine.draft_depth import DraftDepth
from engine.drafter import DraftContext
from engine.kv_cache_manager import KVCacheManager
from engine.kv_groups import KVGroup
from engine.load_policy import LoadChooser, LoadPlan
from engine.outputs import FinishReason, RequestOutput
from engine.prefix_match import PrefixHit
from engine.request import Request, RequestState
from engine.sampling_params import SamplingParams
from engine.scheduler import ScheduledRequest, Scheduler, SchedulerLimits
from engine.sessions import Sessions
from engine.speculation import Speculation
from engine.step import StepInput, StepOutput
from offload import lane as lane_module
from offload import manager as manager_module
from offload.block_file import BlockCorruptError
from offload.cpu_tier import CpuTier
from offload.disk_tier import DiskTier
from offload.io_threads import Job, Urgency
from offload.manager import OffloadManager
from offload.side_store import SideStore
from offload.tier import (
    BlockMeta,
    Entry,
    OffloadError,
    Reservation,
    Tier,
    WriteResult,
)
from tests.engine.ghost_kv import (
    SLOT_BYTES,
    STOP_ID,
    VOCAB_SIZE,
    GhostDevice,
    Truth,
    ages,
    digest_parts,
)

FINGERPRINT = bytes(range(32))


@dataclass(frozen=True)
class Shape:
    """Of an engine: blocks, seats, rows, tiers. `windows[g]` is the span of KV group g."""

    num_blocks: int = 12
    block_size: int = 4
    windows: tuple[int | None, ...] = (None,)
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 12
    cpu_blocks: int = 3
    disk_bytes: int = 1 << 20
    prompt_only: bool = False
    max_drafts: int = 3


class ScriptedThreads:
    """In place of `IoThreads`: a job runs when the script says so, and not before."""

    queue: list[tuple[ScriptedThreads, Job]]  # where those made from now on put their jobs

    def __init__(self, name: str, count: int, wake: Callable[[], None]) -> None:
        self.name = name
        self.jobs = ScriptedThreads.queue
        self.hung = False
        self._finished: deque[Job] = deque()

    def submit(self, run: Callable[[], Any], urgency: Urgency, done: Callable[[Job], None]) -> Job:
        job = Job(run, urgency, done)
        self.jobs.append((self, job))
        return job

    def run(self, job: Job, error: Exception | None) -> None:
        job.started = time.monotonic()
        if not job.cancelled:
            try:
                if error is not None:
                    raise error
                job.result = job.run()
            except AssertionError:
                raise  # what a checked tier found is no fault of the medium
            except Exception as caught:
                job.error = caught
        job.finished = True
        self._finished.append(job)

    def take_finished(self) -> list[Job]:
        finished, self._finished = list(self._finished), deque()
        return finished

    @property
    def busy(self) -> bool:
        return bool(self._finished) or any(owner is self for owner, _ in self.jobs)

    def stalled(self, seconds: float) -> bool:
        return self.hung

    def saves_stalled(self, seconds: float) -> bool:
        return self.hung

    def close(self, timeout: float) -> bool:
        return True


class CheckedDisk(DiskTier):
    """A disk tier that is told what a block has to hold when it is written and when it is read."""

    truth: Truth

    def write(self, reservation: Reservation, meta: BlockMeta, payload: memoryview) -> WriteResult:
        key = reservation.entry.key
        assert digest_parts(payload) == self.truth.content(key), "written under a wrong key"
        assert meta == self.truth.meta(key), "a wrong description"
        return super().write(reservation, meta, payload)

    def read(self, entry: Entry, into: memoryview) -> BlockMeta:
        meta = super().read(entry, into)
        assert digest_parts(into) == self.truth.content(entry.key), "a wrong block was verified"
        assert meta == self.truth.meta(entry.key), "a wrong description was verified"
        return meta


class InlineExecutor(Executor):
    """Runs each call where it is submitted; what `meanwhile` holds starts during the call."""

    def __init__(self, tasks: set[asyncio.Task[Any]]) -> None:
        self.meanwhile: list[Coroutine[Any, Any, Any]] = []
        self._tasks = tasks  # what it starts

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        for work in self.meanwhile:
            # Before the caller is told of the result: the loop runs what was made first.
            self._tasks.add(asyncio.get_running_loop().create_task(work))
        self.meanwhile.clear()
        return future


class GhostDrafter:
    """Knows the target's next tokens and gets each wrong where `is_wrong` says so."""

    failures: dict[str, int]
    tells_likelihoods = False

    def __init__(self, truth: Truth) -> None:
        self.truth = truth
        self.failures = {}
        self.requests: dict[str, Request] = {}
        self.is_wrong: Callable[[int], bool] = lambda position: False
        self.num_drafts = 0

    async def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        return [self._guess(context) for context in contexts]

    def _guess(self, context: DraftContext) -> list[int]:
        tokens, drafts = list(context.token_ids), []
        for number in range(self.num_drafts):
            if number >= context.max_tokens:
                break
            digests = self.truth.digests(self.requests[context.request_id], tokens)
            token = self.truth.next_token(digests[-1])
            if self.is_wrong(len(tokens)):
                token = (token + 1) % VOCAB_SIZE
            tokens.append(token)
            drafts.append(token)
        return drafts

    def finish(self, context: DraftContext, *, teaches: bool) -> None:
        del self.requests[context.request_id]


class NoText:
    """In place of a detokenizer: nothing is text."""

    def push(self, token_id: int) -> tuple[str, str | None]:
        return "", None

    def flush(self) -> str:
        return ""


@dataclass(eq=False)
class Told:
    """A request and everything its stream was told."""

    request: Request
    salt: str | None
    resets_before: int
    events: list[RequestOutput] = field(default_factory=list)
    evictions_at_end: int = 0
    num_steps_at_end: int = 0
    committed: int = 0  # positions that a replay finds while nothing is evicted

    @property
    def reason(self) -> FinishReason | None:
        return self.events[-1].finish_reason if self.events else None

    @property
    def tokens(self) -> list[int]:
        """What the client has: its prompt and what came."""
        came = [token for event in self.events for token in event.token_ids]
        return [*self.request.prompt_token_ids, *came]


class GhostEngine:
    """One engine in one directory; `restart` makes it another one there."""

    def __init__(self, shape: Shape, directory: Path) -> None:
        self.shape = shape
        self.directory = directory
        self.loop = asyncio.new_event_loop()
        self.truth = Truth(shape.block_size, len(shape.windows))
        self.jobs: list[tuple[ScriptedThreads, Job]] = []
        self.told: dict[str, Told] = {}
        self.num_resets = 0
        # Ages below these may not be found: in this process, and in the next. A reset that was not
        # reported as durable binds only this one.
        self.oldest = self.oldest_after_restart = 0
        self.oldest_below = 0  # the same for the newest slot of a block in a tier
        self.num_arrivals = 0
        self.num_steps = 0
        self.num_recomputed = 0  # blocks that admissions from now on compute beside their loads
        self.num_faults = 0
        self.num_rotten = 0  # stored blocks damaged by the script
        self.tasks: set[asyncio.Task[Any]] = set()
        self._plan: list[ScheduledRequest] = []
        self._build()

    # --- parts ------------------------------------------------------------------------------

    def _build(self, age: int = 0) -> None:
        shape = self.shape
        ScriptedThreads.queue = self.jobs
        self.is_partly_barred = False
        self.device = GhostDevice(self.truth, shape.num_blocks, shape.windows)
        self.device.age = age
        self.num_steps_alive = 0
        self.executor = InlineExecutor(self.tasks)
        self.drafter = GhostDrafter(self.truth)
        self.offload = OffloadManager(
            self._open_tiers(),
            block_bytes=shape.block_size * SLOT_BYTES,
            staging_bytes=6 * shape.block_size * SLOT_BYTES,
            write_deadline=1e9,
            survey_seconds=1e9,
        )
        self.kv = KVCacheManager(
            shape.num_blocks,
            shape.block_size,
            self.offload,
            groups=[KVGroup(index, window) for index, window in enumerate(shape.windows)],
            offload_prompt_only=shape.prompt_only,
        )
        limits = SchedulerLimits(shape.max_num_seqs, shape.max_num_batched_tokens)
        self.scheduler = Scheduler(limits, self.kv, self._plan_loads)
        plain_schedule = self.scheduler.schedule

        def schedule() -> list[ScheduledRequest]:
            self._plan = plain_schedule()
            return self._plan

        self.scheduler.schedule = schedule  # type: ignore[method-assign]
        self.core = EngineCore(
            scheduler=self.scheduler,
            kv=self.kv,
            offload=self.offload,
            runner=self,  # type: ignore[arg-type]
            torch_thread=self.executor,
            chooser=LoadChooser("always", shape.block_size, self.offload),
            speculation=Speculation(
                self.drafter,  # type: ignore[arg-type]
                DraftDepth(shape.max_drafts, adaptive=False),
                shape.max_drafts,
            ),
            load_deadline=1e9,
            sessions=Sessions(SideStore.open(None, max_bytes=1 << 20)),
        )

    def _open_tiers(self) -> list[Tier]:
        shape, tiers = self.shape, []
        block_bytes = shape.block_size * SLOT_BYTES
        self.cpu: CpuTier | None = None
        self.disk: CheckedDisk | None = None
        if shape.cpu_blocks:
            self.cpu = CpuTier(shape.cpu_blocks * block_bytes, block_bytes=block_bytes)
            tiers.append(self.cpu)
        if shape.disk_bytes:
            opened = CheckedDisk.open(
                self.directory,
                fingerprint=FINGERPRINT,
                block_bytes=block_bytes,
                capacity_bytes=shape.disk_bytes,
            )
            assert isinstance(opened, CheckedDisk)
            opened.truth = self.truth
            self.disk = opened
            tiers.append(opened)
        return tiers

    def _plan_loads(self, hit: PrefixHit, num_competing: int) -> LoadPlan:
        """Recompute `num_recomputed` blocks of what could be loaded, load the rest meanwhile."""
        return LoadPlan(min(hit.num_device + self.num_recomputed, hit.num_held))

    def execute(self, step: StepInput) -> StepOutput:
        """As `ModelRunner.execute`."""
        self.device.copy(step)
        for copy in step.copies_in:
            assert min(ages(copy.source)) >= self.oldest, "loaded what a reset had dropped"
        if not step.sequences:
            return StepOutput()
        self._check_private()
        return self.device.forward(step, self._plan)

    @property
    def capacity_tokens(self) -> int:
        """What one request may have at most."""
        return self.kv.capacity_tokens(1 << 10)

    # --- what a script can do ---------------------------------------------------------------

    @property
    def live(self) -> list[Request]:
        return self.scheduler.live()

    def arrive(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        salt: str | None = None,
        priority: int = 0,
        may_stop: bool = False,
        prompt_logprobs: bool = False,
    ) -> Told:
        self.num_arrivals += 1
        request = Request(
            request_id=f"r{self.num_arrivals}",
            prompt_token_ids=list(prompt),
            params=SamplingParams(
                max_tokens=max_tokens, prompt_logprobs=0 if prompt_logprobs else None
            ),
            max_tokens=max_tokens,
            stop_ids=frozenset([STOP_ID] if may_stop else []),
            seed=0,
            root_hash=root_hash(FINGERPRINT, salt),
            arrival_order=self.num_arrivals,
            priority=priority,
        )
        told = Told(request, salt, self.num_resets)
        self.told[request.request_id] = told
        self.drafter.requests[request.request_id] = request
        self.truth.admit(request, salt)

        def emit(output: RequestOutput) -> None:
            assert told.reason is None, "an event after the terminal one"
            told.events.append(output)
            if output.finish_reason is not None:
                self._ended(told)

        self.core.add(LiveRequest(request, NoText(), emit))  # type: ignore[arg-type]
        return told

    def _ended(self, told: Told) -> None:
        request = told.request
        told.evictions_at_end = self.kv.pool.num_evicted
        told.num_steps_at_end = self.num_steps
        num_cached, num_prompt = request.cached.total, request.num_prompt_tokens
        assert num_cached % self.shape.block_size == 0
        assert num_cached <= (num_prompt - 1) // self.shape.block_size * self.shape.block_size
        assert told.tokens == request.token_ids, "the stream differs from the request"
        digests = self.truth.digests(request, told.tokens)
        drawn = [self.truth.next_token(digest) for digest in digests[num_prompt - 1 : -1]]
        assert told.tokens[num_prompt:] == drawn, "not what the target says"
        if told.reason in (FinishReason.STOP, FinishReason.LENGTH):
            told.committed = _final(request)
            self.truth.learn(request)
            self.truth.commit(request, told.committed)
            if request.wants_prompt_logprobs:
                told_logprobs = [
                    entry and entry.token_id
                    for event in told.events
                    for entry in event.prompt_logprobs or []
                ]
                assert told_logprobs == [None, *request.prompt_token_ids[1:]]

    def abort(self, request: Request) -> None:
        told = self.told[request.request_id]
        told.committed = min(request.num_computed_tokens, _final(request))
        self.core.abort(request.request_id)
        assert told.reason is FinishReason.ABORT
        self.check()

    def step(
        self, num_drafts: int = 0, is_wrong: Callable[[int], bool] = lambda position: False
    ) -> bool:
        """One round of the core, and every law after it."""
        self.num_steps += 1
        self.num_steps_alive += 1
        self.drafter.num_drafts, self.drafter.is_wrong = num_drafts, is_wrong
        did_something = self.loop.run_until_complete(self.core.step())
        for work in self.executor.meanwhile:  # there was nothing to compute
            self._spawn(work)
        self.executor.meanwhile.clear()
        for scheduled in self._plan:
            request = scheduled.request
            self.truth.learn(request)
            if request.state is RequestState.RUNNING:
                self.truth.commit(request, min(request.num_computed_tokens, _final(request)))
        self.check()
        return did_something

    def run_job(self, index: int, error: Exception | None = None) -> None:
        threads, job = self.jobs.pop(index % len(self.jobs))
        self.num_faults += error is not None
        threads.run(job, error)

    def rot(self, which: int, at: int) -> None:
        """A bit of a stored block flips."""
        files = sorted(path for path in self.directory.rglob("*") if self._is_block(path))
        if not files:
            return
        victim = files[which % len(files)]
        content = bytearray(victim.read_bytes())
        content[at % len(content)] ^= 1
        victim.write_bytes(content)
        self.num_rotten += 1

    @staticmethod
    def _is_block(path: Path) -> bool:
        return len(path.name) >= 64 and path.is_file() and path.stat().st_size > 0

    def fail_pass(self) -> None:
        """The next forward pass raises."""
        self.device.fail_next = True

    def expire_loads(self) -> None:
        """Every load under way is late."""
        for request in self.scheduler.waiting_for_loads():
            request.load_deadline = 0.0

    def reset(self, tiers: Sequence[str], *, during_pass: bool = False) -> None:
        """As `AsyncEngine.cache_reset`, from another task; `during_pass` with the next step."""
        if during_pass:
            self.executor.meanwhile.append(self._reset(tiers, True))
            return
        self._spawn(self._reset(tiers, False))
        self.check()

    async def _reset(self, tiers: Sequence[str], during_pass: bool) -> None:
        self.num_resets += 1
        names = self.tier_names()
        # What lies on the device at a reset of the tiers alone is not stored there again.
        if "device" not in tiers or names == set(tiers):
            self.is_partly_barred = names != set(tiers)
        plain = self.shape.windows == (None,) and not self.shape.prompt_only
        if names - {"device"} <= set(tiers) and plain and not during_pass:
            # What was whole by now may not come below again. What a pass is just completing may,
            # and so may what a later request makes worth storing that was not before.
            self.device.age += 1
            self.oldest_below = self.device.age
        if names == set(tiers):
            self.device.age += during_pass
            self.oldest = self.oldest_below = self.device.age
        age = self.oldest
        if "device" in tiers:
            self.kv.reset(self.scheduler.live())
        await self.offload.reset([tier for tier in tiers if tier != "device"])
        self.oldest_after_restart = max(age, self.oldest_after_restart)

    def tier_names(self) -> set[str]:
        return {"device", *self.offload.stats()}

    def flush(self) -> None:
        """As `AsyncEngine.cache_flush`; its rounds are those that the script plays."""

        async def pump() -> None:
            await asyncio.sleep(0)

        self._spawn(self.offload.flush(pump))
        self.check()

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = self.loop.create_task(work)
        self.tasks.add(task)
        self.loop.run_until_complete(asyncio.sleep(0))

    def settle(self) -> None:
        """Everything that waits for I/O gets it; every request runs to its end."""
        for _ in range(300):
            while self.jobs:
                self.run_job(0)
            did_something = self.step()
            self.loop.run_until_complete(asyncio.sleep(0))
            tasks_left = [task for task in self.tasks if not task.done()]
            busy = did_something or self.jobs or self.live or tasks_left
            if not busy and self.offload.idle():
                break
        else:
            raise AssertionError("it does not come to rest")
        for task in self.tasks:
            with contextlib.suppress(OffloadError):  # a reset that the medium refused
                task.result()
        self.tasks.clear()

    def kill(self) -> None:
        """The process is gone: what it held is lost, what it wrote is on disk."""
        self.loop.run_until_complete(self._cancel_tasks())
        for work in self.executor.meanwhile:
            work.close()
        self.jobs.clear()
        self.told = {i: told for i, told in self.told.items() if told.reason is not None}
        if self.disk is not None:
            self.disk.close()

    async def _cancel_tasks(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.tasks.clear()

    def restart(self) -> None:
        self.kill()
        self.num_resets += 1  # what was cached is not any more
        self.oldest = self.oldest_below = self.oldest_after_restart
        self._build(self.device.age)
        self.check()

    def close(self) -> None:
        self.kill()
        self.loop.close()

    # --- laws -------------------------------------------------------------------------------

    def check(self) -> None:
        """Conservation laws, and that every slot somebody may read holds what it should."""
        self.core.check()
        for request in self.live:
            self._check_request(request)
        self._check_device_map()
        self._check_memory_tier()

    def _check_request(self, request: Request) -> None:
        """What the next row attends to is there, complete and its own."""
        num_computed = request.num_computed_tokens
        assert num_computed <= request.num_tokens
        if request.state is RequestState.WAITING:
            assert num_computed == 0
            return
        digests = self.truth.digests(request, request.token_ids)
        for group, table in enumerate(request.block_tables):
            for position in range(self.device.first_seen(group, num_computed), num_computed):
                assert self.device.holds(group, table, position, digests[position]), (
                    f"{request.request_id}: position {position} of group {group} counts as"
                    " computed and does not hold its KV"
                )

    def _check_device_map(self) -> None:
        for key, block_id in self.kv.pool._cached.items():
            block = self.device.memory[block_id]
            assert digest_parts(block) == self.truth.content(key), "cached under a wrong key"
            assert key.block_hash in self.truth.committed, "cached beyond the committed length"
            assert min(ages(block)) >= self.oldest, "a reset did not reach a cached block"

    def _check_memory_tier(self) -> None:
        if self.cpu is None:
            return
        for key in self.cpu.present():
            entry = self.cpu.pin(key)
            block = self.cpu.slot(entry)
            self.cpu.unpin(entry)
            assert digest_parts(block) == self.truth.content(key), "kept under a wrong key"
            assert min(ages(block)) >= self.oldest, "a reset did not reach a block in memory"
            assert max(ages(block)) >= self.oldest_below, "a reset did not reach a block in memory"

    def _check_private(self) -> None:
        """What a pass is about to write, nobody else may read or find."""
        size, pool = self.shape.block_size, self.kv.pool
        cached = {pool.lookup(key) for key in pool.known()}
        for scheduled in self._plan:
            begin = scheduled.request.num_computed_tokens
            last = begin + scheduled.num_rows - 1
            for table in scheduled.request.block_tables:
                for block_id in table[begin // size : last // size + 1]:
                    assert pool.ref_count(block_id) == 1, "a shared block is written"
                    assert block_id not in cached, "a cached block is written"

    def check_disk(self) -> None:
        """Read everything that the disk tier says it has."""
        if self.disk is None:
            return
        into = memoryview(bytearray(self.shape.block_size * SLOT_BYTES))
        for key in self.disk.present():
            entry = self.disk.pin(key)
            try:
                self.disk.read(entry, into)
            except BlockCorruptError:
                assert self.num_rotten, "a damaged block, and nobody damaged one"
                continue
            finally:
                self.disk.unpin(entry)
            assert min(ages(into)) >= self.oldest, "a reset did not reach a block on disk"
            assert max(ages(into)) >= self.oldest_below, "a reset did not reach a block on disk"


def _final(request: Request) -> int:
    """Positions whose token is final and was, or will be, an input."""
    return request.num_tokens - 1 if request.num_output_tokens else request.num_prompt_tokens


EIO = OSError(errno.EIO, "planted")
ENOSPC = OSError(errno.ENOSPC, "planted")


def patch_threads(monkeypatch: Any) -> None:
    """From now on engines have scripted threads, never sleep and never wait for the medium."""
    monkeypatch.setattr(lane_module, "IoThreads", ScriptedThreads)
    monkeypatch.setattr(manager_module, "_PATIENCE", 0.0)


__all__ = ["EIO", "ENOSPC", "GhostEngine", "Shape", "Told", "patch_threads"]
