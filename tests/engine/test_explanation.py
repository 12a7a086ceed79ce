"""What is said of each block that a request would not hit, and that it is true."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.block_hash import root_hash
from engine.explanation import MAX_SALTS, Explainer, SaltsSeen
from engine.kv_groups import KVGroup
from engine.load_policy import LoadPlan
from engine.request import Request
from offload.disk_tier import DiskTier
from offload.tier import BlockHash
from tests.engine.planned_engine import BLOCK_BYTES, PlannedEngine, cpu, saved
from tests.engine.planning import BLOCK_SIZE, FINGERPRINT, make_request
from tests.offload.harness import FaultyTier

PROMPT = list(range(100, 121))  # five whole blocks and a token
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"

OpenDisk = Callable[..., DiskTier]


@pytest.fixture
def open_disk(tmp_path: Path) -> Iterator[OpenDisk]:
    tiers: list[DiskTier] = []

    def open_(fingerprint: bytes = FINGERPRINT) -> DiskTier:
        tier = DiskTier.open(
            tmp_path / "store",
            fingerprint=fingerprint,
            block_bytes=BLOCK_BYTES,
            capacity_bytes=1 << 24,
        )
        tiers.append(tier)
        return tier

    yield open_
    for tier in tiers:
        tier.close()


class Explained(PlannedEngine):
    """One that answers."""

    async def store(self, tokens: Sequence[int] = PROMPT, salt: str | None = None) -> Request:
        return await self.serve(make_request(tokens, max_tokens=1, salt=salt))

    async def explain(
        self,
        tokens: Sequence[int] = PROMPT,
        salt: str | None = None,
        *,
        salts: SaltsSeen | None = None,
        is_admin: bool = False,
        **params: Any,
    ) -> dict[str, Any]:
        explainer = Explainer(self.scheduler, FINGERPRINT, salts or SaltsSeen())
        request = make_request(tokens, salt=salt, **params)
        before = self.scheduler.live()
        answer = await explainer.explain(request, salt, is_admin=is_admin)
        assert self.scheduler.live() == before  # it ran nothing
        self.kv.check(before)
        return answer

    async def reasons(self, *args: Any, **fields: Any) -> list[str | None]:
        return [block["reason"] for block in (await self.explain(*args, **fields))["blocks"]]


def only_reason(reasons: list[str | None]) -> str:
    """The one that all blocks have."""
    (reason,) = set(reasons)
    assert reason is not None
    return reason


@pytest.mark.parametrize("salt", [None, "s"])
async def test_what_would_hit_is_what_does_over_tiers_salts_and_lengths(
    open_disk: OpenDisk, salt: str | None
) -> None:
    disk = open_disk()
    await Explained([disk]).store(PROMPT, salt)
    engine = Explained([cpu(8), disk])
    await engine.store(PROMPT[:9], salt)  # two blocks from disk to memory and device
    engine.kv.reset([])
    sources = set()
    for length in (17, 8, 21, 12, 20, 13, 16, 9, 5, 4, 1):
        for tokens in (PROMPT[:length], [*PROMPT[: length - 1], 9]):
            answer = await engine.explain(tokens, salt)
            request = await engine.store(tokens, salt)
            assert answer["would_hit_tokens"] == request.cached.total
            assert answer["prompt_tokens"] == length
            assert len(answer["blocks"]) == length // BLOCK_SIZE
            used = [block for block in answer["blocks"] if block["reason"] is None]
            assert len(used) * BLOCK_SIZE == request.cached.total
            sources |= {block["tiers"][0] for block in used}
    assert sources == {"device", "cpu", "disk"}


async def test_every_tier_that_holds_a_block_is_named(open_disk: OpenDisk) -> None:
    engine = Explained([cpu(8), open_disk()])
    request = await engine.store()
    answer = await engine.explain()
    assert answer["blocks"][0] == {
        "index": 0,
        "hash": request.block_hashes[0].hex(),
        "tiers": ["device", "cpu", "disk"],
        "reason": None,
    }


async def test_of_a_full_hit_the_last_block_is_computed_again() -> None:
    engine = Explained([])
    await engine.store()
    *used, last = await engine.reasons(PROMPT[:20])
    assert used == [None] * 4
    assert last == "held, but at least one token is always computed"


async def test_never_stored() -> None:
    engine = Explained([])
    await engine.store()
    assert await engine.reasons([7] * 9) == ["never stored"] * 2


@pytest.mark.parametrize("position", [8, 9, 11, 13, 19])
@pytest.mark.parametrize("where", ["device", "disk"])
async def test_tokens_that_differ(open_disk: OpenDisk, where: str, position: int) -> None:
    engine = Explained([open_disk()])
    await engine.store()
    await engine.store([*PROMPT[:8], *[3] * 12])  # another branch, farther off
    if where == "disk":
        engine.kv.reset([])
    changed = [*PROMPT[:position], 5, *PROMPT[position + 1 :]]
    reasons = await engine.reasons(changed)
    index = position // BLOCK_SIZE
    assert reasons[:index] == [None] * index
    assert reasons[index] == f"tokens differ from the nearest stored prefix at position {position}"
    assert reasons[index + 1 :] == ["never stored"] * (4 - index)


async def test_what_shares_not_even_its_first_token_is_no_neighbour() -> None:
    engine = Explained([])
    await engine.store()
    assert (await engine.reasons([5, *PROMPT[1:]]))[0] == "never stored"
    assert (await engine.reasons([PROMPT[0], *[5] * 7]))[0] == (
        "tokens differ from the nearest stored prefix at position 1"
    )


async def test_neighbours_are_sought_under_the_callers_salt_alone() -> None:
    """How far somebody else's prompt agrees with a guess is what a salt keeps secret."""
    engine = Explained([])
    await engine.store(PROMPT, "theirs")
    guess = [*PROMPT[:6], 5, *PROMPT[7:]]
    for salt in (None, "mine"):
        assert only_reason(await engine.reasons(guess, salt)) == "never stored"
        assert only_reason(await engine.reasons(PROMPT, salt)) == "never stored"


async def test_other_salts_are_told_to_an_administrator_alone() -> None:
    engine = Explained([])
    await engine.store(PROMPT, "theirs")
    await engine.store(PROMPT[:9])
    salts = SaltsSeen()
    salts.note("theirs")
    assert only_reason(await engine.reasons(salt="mine", salts=salts)) == "never stored"
    told = await engine.reasons(salt="mine", salts=salts, is_admin=True)
    assert told == ["stored under another cache_salt"] * 5
    assert "theirs" not in str(told)
    unseen = await engine.reasons(salt="mine", is_admin=True)  # none is among those asked about
    assert unseen == ["stored under another cache_salt"] * 2 + ["never stored"] * 3
    own = await engine.reasons(salt="theirs", salts=salts, is_admin=True)
    assert own == [None] * 5


def test_the_salts_remembered_are_bounded_and_the_latest() -> None:
    salts = SaltsSeen()
    for number in range(MAX_SALTS + 2):
        salts.note(str(number))
    salts.note(None)
    others = salts.others("5")
    assert len(others) == MAX_SALTS  # its own left out, no salt put in
    assert others[:2] == [None, str(MAX_SALTS + 1)]
    assert "1" not in others
    assert "5" not in others


async def test_evicted_from_the_device_and_then_from_memory() -> None:
    engine = Explained([cpu(5)], num_blocks=8)
    await engine.store()
    await engine.store([9] * 32)
    reason = (await engine.reasons())[4]
    assert re.fullmatch(rf"evicted from device at {TIME}; evicted from cpu at {TIME}", reason or "")


async def test_a_hole_in_the_chain_and_what_is_held_behind_it() -> None:
    engine = Explained([])
    request = await engine.store()
    block_id = engine.kv.pool.lookup(engine.kv.keys([request.block_hashes[1]])[0])
    assert block_id is not None
    engine.kv.pool.forget(block_id)
    reasons = await engine.reasons()
    assert reasons[0] is None
    assert re.fullmatch(f"reset in device at {TIME}", reasons[1] or "")
    assert set(reasons[2:]) == {"held, but a block before it is missing"}


async def test_reset(open_disk: OpenDisk) -> None:
    engine = Explained([cpu(8), open_disk()])
    await engine.store()
    engine.kv.reset([])
    await engine.kv.offload.reset(["cpu", "disk"])
    reason = only_reason(await engine.reasons())
    assert [part.split(" at ")[0] for part in reason.split("; ")] == [
        "reset in device",
        "reset in cpu",
        "reset in disk",
    ]


async def test_failed_verification(open_disk: OpenDisk, tmp_path: Path) -> None:
    disk = open_disk()
    await Explained([disk]).store()
    for path in (tmp_path / "store").rglob("*.kv"):
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    engine = Explained([cpu(8), disk])
    answer = await engine.explain()
    assert answer["would_hit_tokens"] == 20  # nobody has looked yet
    root = engine.kv.keys([BlockHash(bytes.fromhex(answer["blocks"][0]["hash"]))])
    assert engine.kv.offload.promote(root[0]) is not None
    await saved(engine.scheduler)
    reasons = await engine.reasons()
    assert re.fullmatch(f"failed verification in disk at {TIME}", reasons[0] or "")
    assert set(reasons[1:]) == {"held, but a block before it is missing"}


async def test_a_save_that_failed(open_disk: OpenDisk) -> None:
    disk = FaultyTier(open_disk())
    disk.faults["write"] = OSError(28, "ENOSPC")
    engine = Explained([disk])
    await engine.store()
    engine.kv.reset([])
    assert re.match(f"save to disk failed at {TIME}", (await engine.reasons())[0] or "")


@pytest.mark.parametrize("salt", [None, "s"])
async def test_another_fingerprint(open_disk: OpenDisk, salt: str | None) -> None:
    """The same tokens under the same salt, of a model that is no longer served."""
    other = b"x" * 32
    stranger = Explained([open_disk(fingerprint=other)])
    request = make_request(PROMPT[:13], max_tokens=1, salt=salt)
    request.root_hash = root_hash(other, salt)
    await stranger.serve(request)
    engine = Explained([open_disk()])
    name = other.hex()[:16]
    told = await engine.reasons(PROMPT, salt)
    assert told == [f"stored under another fingerprint, {name}"] * 3 + ["never stored"] * 2
    assert only_reason(await engine.reasons(PROMPT, "another")) == "never stored"


async def test_what_would_be_computed_by_choice() -> None:
    engine = Explained([cpu(8)])
    await engine.store()
    engine.kv.reset([])
    engine.scheduler._plan_loads = lambda hit, num_competing: LoadPlan(2)
    answer = await engine.explain()
    faster = "held, but computing it is faster than loading it (--load-policy)"
    assert [block["reason"] for block in answer["blocks"]] == [faster] * 2 + [None] * 3
    assert answer["would_hit_tokens"] == 12
    request = await engine.store()
    assert request.cached.total == 12


async def test_a_prompt_whose_logprobs_are_wanted_hits_nothing() -> None:
    engine = Explained([])
    await engine.store()
    answer = await engine.explain(prompt_logprobs=0)
    assert answer["would_hit_tokens"] == 0
    assert only_reason([block["reason"] for block in answer["blocks"]]) == (
        "held, but log-probabilities of the prompt want every position computed"
    )


async def test_a_window_that_is_gone() -> None:
    groups = (KVGroup(0), KVGroup(1, window=5))
    engine = Explained([], groups=groups)
    request = await engine.store()
    for index in (3, 4):
        _, in_window = engine.kv.keys([request.block_hashes[index]])
        block_id = engine.kv.pool.lookup(in_window)
        if block_id is not None:
            engine.kv.pool.forget(block_id)
    answer = await engine.explain()
    again = await engine.store()
    assert answer["would_hit_tokens"] == again.cached.total < 20
    assert answer["blocks"][4]["reason"] == "held, but a sliding window before it is not"


async def test_it_is_cancelled_without_a_trace(open_disk: OpenDisk) -> None:
    disk = FaultyTier(open_disk())
    await Explained([disk]).store()
    engine = Explained([disk])
    disk.hanging.add("read_meta")
    task = asyncio.create_task(engine.explain([*PROMPT[:9], 5, *PROMPT[10:]]))
    while "read_meta" not in disk.calls:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    disk.release.set()
    engine.kv.check([])
    assert engine.kv.offload.idle()
