"""`overwinter store` on a directory with everything in it."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from api.cli.store import store_gc, store_ls, store_stat, store_verify
from offload.disk_tier import DiskTier
from offload.store_scan import block_name
from tests.offload.harness import BLOCK_BYTES, FINGERPRINT, Planner, key, named, physical_bytes

OTHER = b"o" * 32


def fill(path: Path, fingerprint: bytes, numbers: range) -> None:
    tier = DiskTier.open(
        path, fingerprint=fingerprint, block_bytes=BLOCK_BYTES, capacity_bytes=1 << 24
    )
    planner = Planner(tier)
    for number in numbers:
        planner.commit(number)
    planner.settle()
    tier.close()


def path_of(store: Path, number: int, fingerprint: bytes = FINGERPRINT) -> Path:
    return store / fingerprint.hex() / "/".join(block_name(named(number)))


def files(store: Path) -> set[Path]:
    return {path for path in store.rglob("*") if path.is_file() and path.name != ".ledger"}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    fill(path, FINGERPRINT, range(4))
    fill(path, OTHER, range(2))
    return path


def test_ls_names_every_block_oldest_use_first(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.utime(path_of(store, 2), (1e9, 1e9))
    assert store_ls(store) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["FINGERPRINT", "HASH", "GROUP", "SIZE", "LAST", "USED"]
    assert len(lines) == 7
    assert lines[1].split()[:5] == [
        FINGERPRINT.hex()[:12],
        key(2).block_hash.hex(),
        "0",
        "12.0",
        "KiB",
    ]
    assert store_ls(store, fingerprint=OTHER.hex()[:8]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_stat_accounts_for_every_byte(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (store / "stray").write_bytes(b"x" * 10000)
    assert store_stat(store) == 0
    out = capsys.readouterr().out
    assert re.search(rf"{FINGERPRINT.hex()} +4 +48\.0 KiB", out)
    assert re.search(rf"{OTHER.hex()} +2 +24\.0 KiB", out)
    assert re.search(r"foreign files +1 +12\.0 KiB", out)
    assert f"{physical_bytes(store) / 1024:.1f} KiB" in out.splitlines()[-1]


def test_verify_reads_every_record(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert store_verify(store) == 0
    assert capsys.readouterr().out == "6 good, 0 bad\n"
    raw = bytearray(path_of(store, 1).read_bytes())
    raw[5000] ^= 1
    path_of(store, 1).write_bytes(raw)
    path_of(store, 2).write_bytes(path_of(store, 3).read_bytes())
    path_of(store, 0, OTHER).write_bytes(b"")
    assert store_verify(store) == 1
    out = capsys.readouterr().out
    assert out.endswith("3 good, 3 bad\n")
    assert re.search(rf"{path_of(store, 1).name} +payload: checksum differs", out)
    assert re.search(rf"{path_of(store, 2).name} +key: holds {key(3).block_hash.hex()}", out)
    assert re.search(rf"{path_of(store, 0).name} +size: 0 bytes", out)


def test_verify_of_something_else_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("no block")
    assert store_verify(tmp_path) == 0
    told = capsys.readouterr()
    assert told.out == "0 good, 0 bad\n"
    assert "is it a --disk-tier directory?" in told.err


def test_a_reader_who_has_seen_enough_is_no_fault_of_the_directory(store: Path) -> None:
    command = f"{sys.executable} -m api store ls {store} | true"
    shell = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False
    )
    assert (shell.returncode, shell.stderr) == (0, "")


def test_gc_removes_what_is_bad_and_spares_the_rest(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path_of(store, 1).write_bytes(b"damaged")
    older = bytearray(path_of(store, 2).read_bytes())
    older[8] = 0
    path_of(store, 2).write_bytes(older)
    orphan, live = (store / FINGERPRINT.hex() / f".tmp.{n}.x.1" for n in (1, 2))
    orphan.touch()
    trash = store / ".trash.1.x.1" / "ab"
    trash.mkdir(parents=True)
    (trash / "block").write_bytes(b"x")
    (store / "stray").touch()
    before = files(store)
    with live.open("w") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        before.add(live)
        assert store_gc(store, dry_run=True) == 0
        assert "WOULD REMOVE" in capsys.readouterr().out
        assert files(store) == before
        assert store_gc(store) == 0
    gone = {path_of(store, 1), path_of(store, 2), orphan, trash / "block"}
    assert before - files(store) == gone
    assert not trash.parent.exists()
    assert not path_of(store, 1).parent.exists()
    assert store_verify(store) == 0


def test_gc_by_fingerprint_and_age(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert store_gc(store, keep_fingerprint=["0000"]) == 2
    assert "no fingerprint starts with '0000'" in capsys.readouterr().err
    assert len(files(store)) == 6
    assert store_gc(store, keep_fingerprint=[FINGERPRINT.hex()[:6]]) == 0
    assert len(files(store)) == 4
    assert not (store / OTHER.hex()).exists()
    two_days_ago = time.time() - 2 * 86400
    os.utime(path_of(store, 3), (two_days_ago, two_days_ago))
    capsys.readouterr()
    assert store_gc(store, max_age=86400) == 0
    assert "not used for 2.0 d" in capsys.readouterr().out
    assert files(store) == {path_of(store, number) for number in range(3)}


@pytest.mark.parametrize("command", [store_ls, store_stat, store_verify, store_gc])
def test_a_directory_that_is_none_is_told(
    command: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(command)
    assert command(tmp_path / "nowhere") == 2
    assert "nowhere: No such file or directory; name the directory" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert command(tmp_path / "file") == 2


def test_it_never_imports_torch() -> None:
    script = "import sys, api.cli.store; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
