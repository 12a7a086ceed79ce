"""The disk tier's promises: found again, bounded, verified, shared."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from offload.block_file import BlockCorruptError
from offload.disk_tier import DiskTier
from offload.store_scan import block_name
from offload.tier import BlockState, RoomTakenError, TierFullError, TierOpenError, WriteResult
from tests.offload.harness import (
    BLOCK_BYTES,
    FINGERPRINT,
    RECORD_BYTES,
    content,
    key,
    meta,
    named,
    physical_bytes,
    root,
)

OpenDisk = Callable[..., DiskTier]
OTHER = b"o" * 32


def save(tier: DiskTier, number: int) -> WriteResult:
    reservation = tier.reserve(key(number), meta(number))
    assert reservation is not None
    result = tier.write(reservation, meta(number), memoryview(content(number)))
    assert tier.settle(reservation, result) is (result.error is None)
    tier.check()
    return result


def load(tier: DiskTier, number: int) -> bytes:
    into = bytearray(BLOCK_BYTES)
    entry = tier.pin(key(number))
    try:
        assert tier.read(entry, memoryview(into)) == meta(number)
    finally:
        tier.unpin(entry)
    return bytes(into)


def survey(tier: DiskTier) -> None:
    tier.absorb(tier.survey(tier.begin_survey()))
    tier.check()


def path_of(store: Path, number: int, fingerprint: bytes = FINGERPRINT) -> Path:
    return store / fingerprint.hex() / "/".join(block_name(named(number)))


def test_names_and_modes(open_disk: OpenDisk, store: Path) -> None:
    save(open_disk(), 1)
    digits = key(1).block_hash.hex()
    path = (
        store
        / FINGERPRINT.hex()
        / digits[:2]
        / f"{digits}.0.{root().hex()[:16]}.{key(0).block_hash.hex()[:16]}.kv"
    )
    assert path.stat().st_size == RECORD_BYTES
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for folder in (store, path.parent, path.parent.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [p.name for p in (store / FINGERPRINT.hex()).iterdir()] == [digits[:2]]


def test_what_was_saved_is_found_again_by_order_of_use(open_disk: OpenDisk) -> None:
    tier = open_disk()
    for number in range(4):
        save(tier, number)
        time.sleep(0.01)
    tier.touch(key(0))
    survey(tier)  # records it
    again = open_disk()
    assert again.present() == [key(1), key(2), key(3), key(0)]
    assert again.usage().num_bytes == 4 * RECORD_BYTES
    assert load(again, 2) == content(2)


def test_the_cap_holds_physically_at_every_step(open_disk: OpenDisk, store: Path) -> None:
    capacity = 20 * RECORD_BYTES
    tier = open_disk(capacity)
    rng = random.Random(1)
    sizes = []
    for _ in range(200):
        number = rng.randrange(60)
        if tier.state(key(number)) is BlockState.PRESENT:
            tier.touch(key(number))
            assert load(tier, number) == content(number)
            continue
        reservation = tier.reserve(key(number), meta(number))
        assert reservation is not None
        sizes.append(physical_bytes(store))
        result = tier.write(reservation, meta(number), memoryview(content(number)))
        sizes.append(physical_bytes(store))
        assert tier.settle(reservation, result)
        tier.check()
        assert tier._used_bytes == physical_bytes(store)
    assert max(sizes) <= capacity
    assert max(sizes) > capacity * 0.7


@pytest.mark.parametrize("seed", range(3))
def test_the_cap_holds_whatever_order_saves_in_flight_run_in(
    seed: int, open_disk: OpenDisk, store: Path
) -> None:
    capacity = 16 * RECORD_BYTES
    tier = open_disk(capacity)
    rng = random.Random(seed)
    flights = []
    for number in range(150):
        reservation = tier.reserve(key(number), meta(number))
        if reservation is not None:
            flights.append((number, reservation))
        while flights and (reservation is None or rng.random() < 0.4):
            flown, done = flights.pop(rng.randrange(len(flights)))
            if rng.random() < 0.1:  # refused before it began: the victims stay
                assert not tier.settle(done, WriteResult(OSError("no")))
                continue
            result = tier.write(done, meta(flown), memoryview(content(flown)))
            assert physical_bytes(store) <= capacity
            assert tier.settle(done, result)
            reservation = done
        tier.check()


def test_a_block_that_never_fits_is_refused_at_once(open_disk: OpenDisk, store: Path) -> None:
    tier = open_disk(12 * RECORD_BYTES)
    (store / "movie.mkv").write_bytes(b"x" * (11 * RECORD_BYTES))
    survey(tier)
    with pytest.raises(TierFullError, match="occupied by what may not be evicted"):
        tier.reserve(key(1), meta(1))
    assert tier.usage().skipped == {"foreign": 1}
    (store / "movie.mkv").unlink()
    survey(tier)
    save(tier, 1)


def test_pinned_blocks_are_not_evicted(open_disk: OpenDisk) -> None:
    tier = open_disk(8 * RECORD_BYTES + 4096)
    number = 0
    while tier.usage().evicted_blocks == 0:
        save(tier, number)
        number += 1
    pins = [tier.pin(held) for held in tier.present()]
    assert tier.reserve(key(99), meta(99)) is None  # later, when a pin goes
    tier.unpin(pins[1])
    reservation = tier.reserve(key(99), meta(99))
    assert reservation is not None
    assert [entry.key for entry in reservation.evicted] == [pins[1].key]
    assert tier.state(pins[1].key) is BlockState.EVICTING
    with pytest.raises(ValueError, match="evicting"):
        tier.reserve(pins[1].key, meta(1))


@pytest.mark.parametrize("damage", ["first", "middle", "last", "page", "swap", "cut", "version"])
def test_damage_is_found_at_the_read(damage: str, open_disk: OpenDisk, store: Path) -> None:
    tier = open_disk()
    save(tier, 1)
    save(tier, 2)
    path = path_of(store, 1)
    raw = bytearray(path.read_bytes())
    if damage == "swap":
        raw = bytearray(path_of(store, 2).read_bytes())
    elif damage == "page":
        raw[8192:12288] = bytes(4096)
    elif damage == "cut":
        del raw[-4096:]
    elif damage == "version":
        raw[8] = 9
    else:
        raw[{"first": 0, "middle": len(raw) // 2, "last": len(raw) - 1}[damage]] ^= 4
    path.write_bytes(raw)
    with pytest.raises(BlockCorruptError):
        load(tier, 1)
    entry = tier.pin(key(1))
    tier.unpin(entry)
    epoch = tier.condemn(entry)
    assert epoch == 0
    assert tier.state(key(1)) is BlockState.EVICTING
    tier.removed(entry, tier.remove(entry, epoch))
    assert not path.exists()
    save(tier, 1)
    assert load(tier, 1) == content(1)


def test_odd_files_are_skipped_counted_and_left(open_disk: OpenDisk, store: Path) -> None:
    tier = open_disk()
    for number in (1, 2, 3):
        save(tier, number)
    path_of(store, 2).write_bytes(b"")
    path_of(store, 3).write_bytes(path_of(store, 3).read_bytes()[:-1])
    root = store / FINGERPRINT.hex()
    odd = [
        store / "README",
        root / "notes.txt",
        path_of(store, 1).with_name("x.kv"),
        path_of(store, 1).with_name(path_of(store, 1).name.upper()),
        path_of(store, 1).parent / "deeper" / "file",
    ]
    odd[-1].parent.mkdir()
    for path in odd:
        path.write_bytes(b"?")
    again = open_disk()
    assert again.present() == [key(1)]
    assert again.usage().skipped["size"] == 2
    assert again.usage().skipped["foreign"] >= 5
    assert all(path.exists() for path in (*odd, path_of(store, 2), path_of(store, 3)))
    assert again._used_bytes >= physical_bytes(store)
    save(again, 2)  # replaces the empty file
    assert load(again, 2) == content(2)


def test_blocks_of_format_1_are_counted_and_make_way(open_disk: OpenDisk, store: Path) -> None:
    folder = path_of(store, 1).parent
    folder.mkdir(parents=True)
    old = folder / f"{key(1).block_hash.hex()}.0.kv"
    old.write_bytes(bytes(RECORD_BYTES))
    os.utime(old, (1e9, 1e9))
    (store / f"{FINGERPRINT.hex()}.side").write_bytes(bytes(5000))
    tier = open_disk(16 * RECORD_BYTES)
    assert tier.present() == []
    assert tier.usage().skipped == {"version": 1}
    assert tier._used_bytes == physical_bytes(store)
    for number in range(1, 20):
        save(tier, number)
    assert not old.exists()
    assert tier.state(key(1)) is BlockState.ABSENT  # by then it was the oldest
    assert (store / f"{FINGERPRINT.hex()}.side").exists()


def test_a_name_that_lies_about_its_chain_is_no_block(open_disk: OpenDisk, store: Path) -> None:
    tier = open_disk()
    save(tier, 1)
    path = path_of(store, 1)
    liar = path.with_name(block_name(named(1)._replace(root_tag=b"somebody"))[1])
    shutil.copy(path, liar)
    survey(tier)
    assert load(tier, 1) == content(1)
    assert tier.usage().skipped == {"name": 1}
    path.unlink()
    again = open_disk()
    with pytest.raises(BlockCorruptError, match="another chain"):
        load(again, 1)


def test_chains_are_known_from_names_and_records(open_disk: OpenDisk, store: Path) -> None:
    tier = open_disk()
    for number in (1, 2, 3):
        save(tier, number)
    again = open_disk()
    for one in (tier, again):
        assert one.children(key(1).block_hash) == [key(2)]
        assert one.children(root()) == []
        entry = one.pin(key(2))
        one.unpin(entry)
        assert (entry.root_tag, entry.parent_tag) == (root()[:8], key(1).block_hash[:8])
        assert one.read_meta(key(2)) == meta(2)
        assert one.read_meta(key(9)) is None
    raw = bytearray(path_of(store, 2).read_bytes())
    raw[190] ^= 1
    path_of(store, 2).write_bytes(raw)
    assert again.read_meta(key(2)) is None
    path_of(store, 3).unlink()
    assert again.read_meta(key(3)) is None


def test_symbolic_links_are_not_followed(open_disk: OpenDisk, store: Path, tmp_path: Path) -> None:
    tier = open_disk()
    save(tier, 1)
    save(tier, 2)
    outside = tmp_path / "outside"
    path_of(store, 1).rename(outside)
    path_of(store, 1).symlink_to(outside)
    with pytest.raises(OSError, match="symbolic link") as caught:
        load(tier, 1)
    assert caught.value.errno == errno.ELOOP
    assert open_disk().state(key(1)) is BlockState.ABSENT

    folder = path_of(store, 2).parent
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"Not a directory|symbolic link"):
        load(tier, 2)
    assert open_disk().present() == []
    link = tmp_path / "link"
    link.symlink_to(store)
    with pytest.raises(TierOpenError, match="no symbolic link"):
        open_disk(path=link)


def test_temporaries_of_the_dead_are_reclaimed_and_of_the_living_spared(
    open_disk: OpenDisk, store: Path
) -> None:
    open_disk()
    root = store / FINGERPRINT.hex()
    orphan, live = root / ".tmp.1.dead.1", root / f".tmp.{os.getpid()}.other.1"
    orphan.write_bytes(b"x" * 5000)
    with live.open("wb") as writer:
        writer.write(b"x" * 5000)
        writer.flush()
        fcntl.flock(writer, fcntl.LOCK_EX)
        tier = open_disk()
        assert not orphan.exists()
        assert live.exists()
        assert tier._used_bytes == physical_bytes(store)
    survey(tier)
    assert not live.exists()


def test_another_server_opening_in_mid_save_spares_the_temporary(
    open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_disk()
    steps: list[str] = []

    def watch(step: str) -> None:
        real = getattr(os, step)

        def call(*args: object, **options: object) -> object:
            if step not in steps:
                steps.append(step)
                open_disk()  # reclaims what dead writers left
            return real(*args, **options)

        monkeypatch.setattr(os, step, call)

    for step in ("writev", "fdatasync"):
        watch(step)
    assert save(tier, 1).error is None
    assert steps == ["writev", "fdatasync"]
    assert load(tier, 1) == content(1)


@pytest.mark.parametrize("other", [FINGERPRINT, OTHER])
def test_two_tiers_on_one_directory(other: bytes, open_disk: OpenDisk, store: Path) -> None:
    capacity = 24 * RECORD_BYTES
    ours, theirs = open_disk(capacity), open_disk(capacity, other)
    for number in range(8):
        save(ours, number)
        save(theirs, number)
    survey(ours)
    survey(theirs)
    for number in range(8):
        assert load(ours, number) == load(theirs, number) == content(number)
    for number in range(100, 130):  # eviction by one
        save(ours, number)
        survey(theirs)
        assert physical_bytes(store) <= capacity
    for number in range(8):  # never breaks the other
        try:
            assert load(theirs, number) == content(number)
        except (KeyError, FileNotFoundError):
            continue
    survey(theirs)
    for held in theirs.present():
        entry = theirs.pin(held)
        theirs.read(entry, memoryview(bytearray(BLOCK_BYTES)))
        theirs.unpin(entry)
    if other == FINGERPRINT:
        assert set(theirs.present()) == set(ours.present())  # what one saves, both have
    else:
        assert not set(theirs.present()) & {key(number) for number in range(100, 130)}


def test_an_old_fingerprint_makes_way(open_disk: OpenDisk, store: Path) -> None:
    capacity = 16 * RECORD_BYTES
    old = open_disk(capacity, OTHER)
    for number in range(20):
        save(old, number)
    time.sleep(0.02)
    tier = open_disk(capacity)
    for number in range(20):
        save(tier, number)
        assert physical_bytes(store) <= capacity
    assert tier.usage().blocks >= 8
    assert tier.usage().evicted_blocks <= 20 - tier.usage().blocks
    assert open_disk(capacity, OTHER).usage().blocks == 0


def test_what_another_server_has_just_used_is_spared(open_disk: OpenDisk, store: Path) -> None:
    theirs = open_disk(16 * RECORD_BYTES, OTHER)
    save(theirs, 1)
    save(theirs, 2)
    time.sleep(0.02)
    tier = open_disk(16 * RECORD_BYTES)
    os.utime(path_of(store, 1, OTHER))
    results = []
    while not results or results[-1].error is None:
        number = 10 + len(results)
        assert number < 40, "everything of theirs was evicted"
        reservation = tier.reserve(key(number), meta(number))
        assert reservation is not None
        results.append(tier.write(reservation, meta(number), memoryview(content(number))))
        tier.settle(reservation, results[-1])
    error = results[-1].error
    assert isinstance(error, RoomTakenError)
    assert path_of(store, 1, OTHER).exists()


def test_a_reset_is_durable_and_of_this_fingerprint_only(open_disk: OpenDisk, store: Path) -> None:
    other = open_disk(fingerprint=OTHER)
    save(other, 5)
    tier = open_disk()
    for number in range(3):
        save(tier, number)
    in_flight = tier.reserve(key(7), meta(7))
    assert in_flight is not None
    assert tier.drop_all() == 3
    assert tier.present() == []
    tier.wipe()
    assert open_disk().present() == []
    assert open_disk(fingerprint=OTHER).present() == [key(5)]
    late = tier.write(in_flight, meta(7), memoryview(content(7)))
    assert isinstance(late.error, FileNotFoundError)
    assert not tier.settle(in_flight, late)
    survey(tier)
    assert {path.name for path in store.iterdir()} == {".ledger", FINGERPRINT.hex(), OTHER.hex()}
    assert tier._used_bytes == physical_bytes(store)
    save(tier, 1)
    assert open_disk().present() == [key(1)]


def test_a_save_overtaken_by_a_reset_in_mid_write_ends_out_of_reach(
    open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_disk()
    reservation = tier.reserve(key(1), meta(1))
    assert reservation is not None
    fdatasync = os.fdatasync

    def overtake(fd: int) -> None:
        fdatasync(fd)
        tier.drop_all()
        tier.wipe()

    monkeypatch.setattr(os, "fdatasync", overtake)
    result = tier.write(reservation, meta(1), memoryview(content(1)))
    assert not tier.settle(reservation, result)
    survey(tier)
    assert tier.present() == []
    assert open_disk().present() == []


def test_a_failed_wipe_never_brings_old_blocks_back(
    open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_disk()
    save(tier, 1)
    tier.drop_all()

    def refuse(*args: object, **options: object) -> None:
        raise OSError(errno.EROFS, "read-only")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        with pytest.raises(OSError, match="read-only"):
            tier.wipe()
    survey(tier)
    assert tier.present() == []
    save(tier, 2)
    assert tier.present() == [key(2)]


def test_a_removed_store_is_made_again(open_disk: OpenDisk, store: Path) -> None:
    tier = open_disk()
    save(tier, 1)
    subprocess.run(["rm", "-r", str(store)], check=True)
    with pytest.raises(FileNotFoundError):
        load(tier, 1)
    save(tier, 2)
    assert path_of(store, 2).exists()
    assert stat.S_IMODE(store.stat().st_mode) == 0o700
    survey(tier)
    assert tier.present() == [key(2)]


@pytest.mark.parametrize("step", ["open", "writev", "fdatasync", "rename"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_an_error_at_any_step_leaves_nothing(
    step: str, number: int, open_disk: OpenDisk, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_disk()
    real = getattr(os, step)

    def fail(*args: object, **options: object) -> object:
        if step == "open" and not str(args[0]).startswith(".tmp."):
            return real(*args, **options)
        raise OSError(number, "injected")

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        result = save(tier, 1)
    assert isinstance(result.error, OSError)
    assert result.error.errno == number
    assert [path.name for path in store.rglob("*") if path.is_file()] == [".ledger"]
    assert set(store.iterdir()) == {store / ".ledger", store / FINGERPRINT.hex()}
    save(tier, 1)
    assert load(tier, 1) == content(1)


def test_a_short_write_is_continued(open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_disk()
    monkeypatch.setattr(os, "writev", lambda fd, views: os.write(fd, bytes(views[0][:1000])))
    save(tier, 1)
    monkeypatch.undo()
    preadv = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, views, offset: preadv(fd, [views[0][:1000]], offset)
    )
    assert load(tier, 1) == content(1)


@pytest.mark.parametrize("where", ["below a file", "read-only", "link"])
def test_a_store_that_cannot_be_opened_is_told(where: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    paths = {"below a file": tmp_path / "file" / "x", "link": tmp_path / "link"}
    path = paths.get(where, Path("/proc/self/store"))
    with pytest.raises(TierOpenError) as caught:
        DiskTier.open(path, fingerprint=FINGERPRINT, block_bytes=4096, capacity_bytes=1 << 20)
    message = str(caught.value)
    assert str(path) in message
    assert "; " in message
    assert "\n" not in message


def test_a_cap_below_one_block_is_told(store: Path) -> None:
    with pytest.raises(TierOpenError, match="give it at least 36864"):
        DiskTier.open(store, fingerprint=FINGERPRINT, block_bytes=BLOCK_BYTES, capacity_bytes=20000)
    DiskTier.open(
        store, fingerprint=FINGERPRINT, block_bytes=BLOCK_BYTES, capacity_bytes=36864
    ).close()


def test_a_fresh_store_is_private_and_an_old_one_keeps_its_mode(
    open_disk: OpenDisk, store: Path, tmp_path: Path
) -> None:
    store.mkdir(mode=0o755)
    open_disk()
    assert stat.S_IMODE(store.stat().st_mode) == 0o700  # it was empty, so it is ours
    used = tmp_path / "used"
    used.mkdir(mode=0o755)
    (used / "file").write_text("")
    open_disk(path=used)
    assert stat.S_IMODE(used.stat().st_mode) == 0o755


def test_opening_looks_at_names_and_stat_alone(
    open_disk: OpenDisk, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_disk()
    root = store / FINGERPRINT.hex()
    for number in range(600):
        folder, name = block_name(named(number))
        (root / folder).mkdir(exist_ok=True)
        with (root / folder / name).open("wb") as file:
            file.truncate(RECORD_BYTES)
    calls: list[str] = []

    def watch(step: str) -> None:
        real = getattr(os, step)

        def call(path: object, *args: object, **options: object) -> object:
            calls.append(f"{step} {path}")
            return real(path, *args, **options)

        monkeypatch.setattr(os, step, call)

    for step in ("open", "stat", "scandir", "listdir"):
        watch(step)
    tier = open_disk()
    assert tier.usage().blocks == 600
    assert not [call for call in calls if ".kv" in call]
    num_folders = len(list(root.iterdir()))
    assert len(calls) <= 2 * num_folders + 30  # each directory opened and read once
