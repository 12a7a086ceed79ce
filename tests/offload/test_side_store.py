"""Small records: bounded in memory, whole in the file, and no fault of the file is anybody's."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from api.cli.store import store_gc, store_stat, store_verify
from offload import side_file, side_store
from offload.disk_tier import DiskTier
from offload.side_file import Change, SideFile, physical_bytes
from offload.side_store import SideStore
from offload.store_scan import side_path
from tests.offload.harness import BLOCK_BYTES, FINGERPRINT
from tests.offload.harness import physical_bytes as bytes_on_disk

ROOT = Path(__file__).parents[2]
A, B = b"a" * 32, b"b" * 32
OVERHEAD = 128
Open = Callable[..., SideStore]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return side_path(tmp_path, FINGERPRINT)


@pytest.fixture
def open_side(path: Path) -> Iterator[Open]:
    stores: list[SideStore] = []

    def open_(where: Path | None = path, max_bytes: int = 1 << 20, **options: Any) -> SideStore:
        store = SideStore.open(where, max_bytes=max_bytes, **options)
        stores.append(store)
        return store

    yield open_
    for store in stores:
        store.close()
        store.check()


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_record_is_found_under_its_table_space_and_key_alone(
    open_side: Open, path: Path, in_memory: bool
) -> None:
    store = open_side(None if in_memory else path)
    store.put("t", A, b"1", b"one")
    store.put("t", A, b"2", b"two")
    store.put("t", A, b"1", b"uno")
    assert store.get("t", A, b"1") == b"uno"
    assert store.get("t", B, b"1") is None
    assert store.get("u", A, b"1") is None
    assert store.items("t", A) == [(b"2", b"two"), (b"1", b"uno")]
    assert store.spaces("t") == [A]
    store.delete("t", A, b"2")
    assert store.items("t", A) == [(b"1", b"uno")]


async def test_what_was_flushed_is_there_again(open_side: Open) -> None:
    store = open_side()
    store.put("t", A, b"k", b"v" * 5000)
    store.put("t", A, b"gone", b"v")
    store.delete("t", A, b"gone")
    assert await store.flush()
    assert store.stats().pending == 0
    assert open_side().items("t", A) == [(b"k", b"v" * 5000)]


def test_the_least_recently_used_makes_way(open_side: Open) -> None:
    cost = 1 + 32 + 1 + 100 + OVERHEAD
    store = open_side(max_bytes=3 * cost)
    evicted: list[bytes] = []
    store.on_evicted("t", lambda space, key: evicted.append(space[:1] + key))
    for key in (b"1", b"2", b"3"):
        store.put("t", A, key, b"x" * 100)
    assert store.get("t", A, b"1") is not None
    store.put("t", A, b"4", b"x" * 100)
    assert evicted == [b"a2"]
    assert (store.stats().records, store.stats().bytes) == (3, 3 * cost)
    store.put("t", A, b"5", b"x" * 3 * cost)  # larger than everything: not kept, nobody evicted
    assert (evicted, store.get("t", A, b"5")) == ([b"a2"], None)
    store.close()
    assert sorted(open_side().items("t", A)) == [(key, b"x" * 100) for key in (b"1", b"3", b"4")]
    # A smaller store takes the newest of them.
    smaller = open_side(max_bytes=2 * cost)
    assert [key for key, _ in smaller.items("t", A)] == [b"3", b"4"]


async def test_a_space_forgotten_stays_forgotten(open_side: Open) -> None:
    store = open_side()
    for space in (A, B):
        store.put("t", space, b"1", b"one")
    assert await store.flush()
    store.put("t", A, b"2", b"two")  # still on its way when its space goes
    assert store.delete_space(A) == 2
    store.put("t", A, b"3", b"three")
    assert await store.flush()
    again = open_side()
    assert again.items("t", A) == [(b"3", b"three")]
    assert again.items("t", B) == [(b"1", b"one")]
    assert again.clear() == 2
    assert await again.flush()
    assert open_side().spaces("t") == []


WRITER = """
import sys, time
from pathlib import Path
from offload.side_store import SideStore

store = SideStore.open(Path(sys.argv[1]), max_bytes=1 << 18)
for number in range(1 << 30):
    value = number.to_bytes(4, "little") * 50
    store.put("t", b"a" * 32, str(number % 700).encode(), value)
    if number % 50 == 0:
        deadline = time.monotonic() + 20
        while store.stats().pending:
            time.sleep(0.0005)
            assert time.monotonic() < deadline
        print(number, flush=True)
"""


def test_a_killed_writer_leaves_whole_records_and_all_that_were_written(
    open_side: Open, path: Path
) -> None:
    for num_lines in (2, 8):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        written = [int(process.stdout.readline()) for _ in range(num_lines)][-1]
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        store = open_side()
        assert store.stats().failures == 0
        numbers = {int.from_bytes(value[:4], "little") for _, value in store.items("t", A)}
        assert numbers >= set(range(max(0, written - 300), written + 1))
        assert all(value == value[:4] * 50 for _, value in store.items("t", A))
        assert side_file.problem(path) is None
        store.close()


@pytest.mark.parametrize("damage", [b"no database at all", b""])
def test_a_damaged_file_is_set_aside(open_side: Open, path: Path, damage: bytes) -> None:
    store = open_side()
    store.put("t", A, b"k", b"v" * 20_000)
    store.close()
    content = path.read_bytes()
    path.write_bytes(damage or content[:8192] + b"\xff" * 12_000 + content[20_192:])
    again = open_side()
    assert again.items("t", A) == []
    assert again.stats().failures >= 1
    again.put("t", A, b"k", b"new")
    again.close()
    assert Path(f"{path}.bad").exists()
    assert open_side().items("t", A) == [(b"k", b"new")]


def test_a_damaged_record_is_absent(open_side: Open, path: Path) -> None:
    store = open_side()
    store.put("t", A, b"good", b"v")
    store.put("t", A, b"bad", b"v")
    store.close()
    with sqlite3.connect(path) as database:
        database.execute("UPDATE records SET value = X'77' WHERE key = ?", (b"bad",))
    database.close()
    assert side_file.problem(path) == "1 of 2 records damaged"
    again = open_side()
    assert again.items("t", A) == [(b"good", b"v")]
    assert again.stats().failures == 1
    again.close()
    assert side_file.problem(path) is None


async def test_a_path_that_cannot_be_written_costs_nothing_but_the_restart(
    open_side: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_store, "_RETRY_SECONDS", 0.01)
    blocked = tmp_path / "file" / "x.side"
    (tmp_path / "file").write_bytes(b"")
    store = open_side(blocked)
    store.put("t", A, b"k", b"v")
    assert not await store.flush()
    assert store.get("t", A, b"k") == b"v"
    assert store.stats().failures >= 2
    (tmp_path / "file").unlink()  # the fault clears: writing resumes
    (tmp_path / "file").mkdir()
    assert await asyncio.wait_for(_until_flushed(store), 10)
    assert open_side(blocked).items("t", A) == [(b"k", b"v")]


async def _until_flushed(store: SideStore) -> bool:
    while not await store.flush():
        await asyncio.sleep(0.005)
    return True


class Clock:
    """Stands still until it is moved; seconds since the epoch."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def contents(path: Path) -> bytes:
    """Every byte beside the blocks, a set-aside file's included."""
    return b"".join(file.read_bytes() for file in path.parent.glob(f"{path.name}*"))


async def test_what_was_not_used_for_longer_than_the_ttl_is_none(
    open_side: Open, path: Path
) -> None:
    clock = Clock()
    store = open_side(ttl_seconds=100, clock=clock)
    gone: list[bytes] = []
    store.on_evicted("t", lambda space, key: gone.append(key))
    for key in (b"used", b"left"):
        store.put("t", A, key, b"secret of " + key)
    clock.now += 60
    assert store.get("t", A, b"used") == b"secret of used"  # and that is on record
    clock.now += 40
    assert len(store.items("t", A)) == 2  # as long as that, not longer
    clock.now += 1
    assert store.items("t", A) == [(b"used", b"secret of used")]
    assert store.get("t", A, b"left") is None
    assert gone == [b"left"]
    assert await store.flush()
    assert b"secret of left" not in contents(path)
    assert open_side(ttl_seconds=100, clock=clock).items("t", A) == [(b"used", b"secret of used")]
    # Without anybody asking for any of it.
    clock.now += 101
    assert await store.flush()
    assert (gone, store.stats().records) == ([b"left", b"used"], 0)
    assert b"secret" not in contents(path)


def test_of_many_that_expire_at_once_none_is_served(open_side: Open) -> None:
    clock = Clock()
    store = open_side(None, ttl_seconds=100, clock=clock)
    for number in range(200):
        store.put("t", A, b"%d" % number, b"v")
    clock.now += 101
    assert store.get("t", A, b"199") is None
    assert 0 < store.stats().records < 199  # the others go little by little
    assert store.items("t", A) == []


async def test_what_expired_while_nobody_served_is_gone_from_the_file(
    open_side: Open, path: Path
) -> None:
    clock = Clock()
    store = open_side(clock=clock)
    store.put("t", A, b"old", b"secret of old")
    clock.now += 50
    store.put("t", A, b"new", b"secret of new")
    store.close()
    Path(f"{path}.bad").write_bytes(b"secret")
    os.utime(f"{path}.bad", (clock.now, clock.now))
    clock.now += 51
    again = open_side(ttl_seconds=100, clock=clock)
    assert again.items("t", A) == [(b"new", b"secret of new")]
    again.close()  # its thread has seen to the file
    assert b"secret of old" not in contents(path)
    assert Path(f"{path}.bad").exists()
    clock.now += 50
    open_side(ttl_seconds=100, clock=clock).close()
    assert b"secret" not in contents(path)


async def test_an_idle_store_looks_at_its_file_now_and_then(open_side: Open, path: Path) -> None:
    clock = Clock()
    store = open_side(ttl_seconds=8, clock=clock)  # looks every second
    store.put("t", A, b"k", b"secret")
    assert await store.flush()
    clock.now += 9
    async with asyncio.timeout(20):
        while b"secret" in contents(path):
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("what", ["everything", "a space"])
async def test_a_reset_takes_what_was_set_aside_as_damaged(
    open_side: Open, path: Path, what: str
) -> None:
    store = open_side()
    store.put("t", A, b"k", b"secret" * 2000)
    store.close()
    path.write_bytes(b"no database" + path.read_bytes())
    again = open_side()
    assert b"secret" in contents(path)
    again.clear() if what == "everything" else again.delete_space(B)
    assert await again.flush()
    assert b"secret" not in contents(path)


async def test_a_volatile_table_is_in_memory_alone(open_side: Open, path: Path) -> None:
    before = open_side()
    before.put("ids", A, b"old", b"secret of old")
    before.close()
    assert b"secret of old" in contents(path)
    store = open_side(volatile=["ids"])
    assert store.items("ids", A) == []
    store.put("ids", A, b"new", b"secret of new")
    store.put("hashes", A, b"k", b"v")
    assert await store.flush()
    assert store.get("ids", A, b"new") == b"secret of new"
    assert b"secret" not in contents(path)
    assert open_side().spaces("ids") == []
    assert open_side().items("hashes", A) == [(b"k", b"v")]
    assert store.delete_space(A) == 2
    assert store.get("ids", A, b"new") is None


@pytest.mark.parametrize("what", ["a space", "everything", "a record"])
async def test_a_flush_waits_for_the_change_that_replaced_its_own(
    open_side: Open, path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The same is forgotten twice, the second time while the first is on its way."""
    store = open_side()
    store.put("t", A, b"k", b"secret")
    assert await store.flush()
    entered, gates = threading.Semaphore(0), [threading.Event(), threading.Event()]
    waiting, plain = list(gates), SideFile.apply

    def apply(self: SideFile, changes: list[Change]) -> None:
        if waiting and changes:
            entered.release()
            waiting.pop(0).wait(30)
        plain(self, changes)

    monkeypatch.setattr(SideFile, "apply", apply)

    def forget() -> None:
        if what == "a record":
            store.put("t", A, b"k", b"harmless")
        else:
            store.clear() if what == "everything" else store.delete_space(A)

    store.put("t", B, b"busy", b"v")
    await asyncio.to_thread(entered.acquire)  # the thread has a batch, what follows is another
    forget()
    first = asyncio.create_task(store.flush())
    await asyncio.sleep(0)
    forget()
    gates[0].set()
    await asyncio.to_thread(entered.acquire)
    # The first batch is in the file, the second is not: nobody has been told anything.
    assert not first.done()
    assert b"secret" in contents(path)
    assert len(store._tickets) == 1
    gates[1].set()
    assert await asyncio.wait_for(first, 20)
    assert b"secret" not in contents(path)


async def test_two_on_one_file(open_side: Open) -> None:
    one, other = open_side(), open_side()
    one.put("t", A, b"1", b"one")
    other.put("t", A, b"2", b"two")
    assert await one.flush()
    assert await other.flush()
    assert sorted(open_side().items("t", A)) == [(b"1", b"one"), (b"2", b"two")]


async def test_the_files_stay_under_what_they_were_promised_whoever_writes(
    open_side: Open, path: Path, tmp_path: Path
) -> None:
    limit = 64 << 10
    stores = [open_side(max_bytes=limit) for _ in range(20)]
    most = 0
    for store in stores:  # each within its bounds, all together far beyond the file's
        for number in range(70):
            store.put("t", A, f"{id(store)} {number}".encode(), os.urandom(900))
        assert await store.flush()
        most = max(most, bytes_on_disk(tmp_path))
    assert most <= physical_bytes(limit)
    assert oct(path.stat().st_mode)[-3:] == "600"
    assert sum(store.stats().failures for store in stores) == 0
    newest = stores[-1].items("t", A)
    assert set(newest) <= set(open_side(max_bytes=limit).items("t", A)) | set(newest[:20])


def test_a_link_is_not_followed(open_side: Open, path: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.write_bytes(b"")
    path.symlink_to(target)
    store = open_side()
    store.put("t", A, b"k", b"v")
    store.close()
    assert target.read_bytes() == b""


def test_the_disk_tier_keeps_room_for_it_and_the_store_commands_know_it(
    open_side: Open, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def used_bytes(side_bytes: int) -> int:
        tier = DiskTier.open(
            tmp_path,
            fingerprint=FINGERPRINT,
            block_bytes=BLOCK_BYTES,
            capacity_bytes=64 << 20,
            side_bytes=side_bytes,
        )
        tier.close()
        assert not tier.usage().skipped
        return tier._used_bytes

    empty = used_bytes(0)
    assert used_bytes(1 << 16) == empty + (1 << 16)
    before = bytes_on_disk(tmp_path)
    store = open_side()
    store.put("t", A, b"k", b"v" * 20_000)
    store.close()
    occupied = bytes_on_disk(tmp_path) - before
    assert occupied > 20_000
    assert used_bytes(0) == empty + occupied
    assert store_stat(tmp_path) == 0
    assert "side records" in capsys.readouterr().out
    assert store_verify(tmp_path) == 0
    told = capsys.readouterr()
    assert (told.out, told.err) == ("0 good, 0 bad\n", "")
    assert store_gc(tmp_path) == 0
    assert path.exists()
    assert store_gc(tmp_path, keep_fingerprint=["0000"]) == 2
    (tmp_path / ("0" * 64)).mkdir()
    assert store_gc(tmp_path, keep_fingerprint=["0000"]) == 0
    assert not path.exists()
