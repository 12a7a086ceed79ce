"""Weight files are whole, and their digests are remembered exactly as long as they are true."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
from pathlib import Path

import pytest

from engine.errors import StartupError
from engine.weight_files import DigestMemo, weight_files
from tests.tiny_models import settle


def write_weights(path: Path, size: int = 100) -> Path:
    header = json.dumps({"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))
    return path


def test_single_file(tmp_path: Path) -> None:
    path = write_weights(tmp_path / "model.safetensors")
    assert weight_files(tmp_path) == [path]


def test_shards_are_read_from_the_index_in_order(tmp_path: Path) -> None:
    names = ["b.safetensors", "a.safetensors"]
    for name in names:
        write_weights(tmp_path / name)
    write_weights(tmp_path / "unlisted.safetensors")
    index = {"weight_map": {"x": names[0], "y": names[1], "z": names[0]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_files(tmp_path) == [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "damaged"), (b"\xff" * 16, "damaged"), (struct.pack("<Q", 2) + b"{}x", "cut off")],
)
def test_damaged_file_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(StartupError, match=message):
        weight_files(tmp_path)


@pytest.mark.parametrize("change", [-1, 1])
def test_wrong_length_is_refused_with_both_numbers(change: int, tmp_path: Path) -> None:
    path = write_weights(tmp_path / "model.safetensors")
    size = path.stat().st_size
    os.truncate(path, size + change)
    with pytest.raises(StartupError, match=f"{size + change} bytes of {size}"):
        weight_files(tmp_path)


def test_no_weights_or_a_missing_shard_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"no model\.safetensors"):
        weight_files(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "gone.safetensors"}}))
    with pytest.raises(StartupError, match=r"gone\.safetensors cannot be read"):
        weight_files(tmp_path)
    index.write_text("[]")
    with pytest.raises(StartupError, match="damaged"):
        weight_files(tmp_path)


def hashed(memo: DigestMemo, path: Path) -> tuple[str, bool]:
    """The digest, and whether the file was read for it."""
    phases: list[str] = []
    digest = memo.digest(path, lambda phase, _: phases.append(phase))
    return digest, "hashing" in phases


def test_digest_is_remembered_across_processes(tmp_path: Path) -> None:
    path, cache = write_weights(tmp_path / "w"), tmp_path / "cache" / "digests.json"
    expected = hashlib.sha256(path.read_bytes()).hexdigest()
    settle(path)
    assert hashed(DigestMemo(cache), path) == (expected, True)
    assert hashed(DigestMemo(cache), path) == (expected, False)


def test_a_changed_file_is_hashed_again(tmp_path: Path) -> None:
    path, cache = write_weights(tmp_path / "w"), tmp_path / "digests.json"
    settle(path)
    before, _ = hashed(DigestMemo(cache), path)
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # as a careless copy would
    after, was_read = hashed(DigestMemo(cache), path)
    assert was_read
    assert after == hashlib.sha256(content).hexdigest() != before


def test_a_replaced_file_is_hashed_again(tmp_path: Path) -> None:
    path, cache = write_weights(tmp_path / "w"), tmp_path / "digests.json"
    settle(path)
    hashed(DigestMemo(cache), path)
    other = tmp_path / "other"
    other.write_bytes(path.read_bytes())
    os.replace(other, path)
    assert hashed(DigestMemo(cache), path)[1]


def test_a_file_just_written_is_not_remembered(tmp_path: Path) -> None:
    # Within the same tick of the clock it could change once more without a trace.
    path, cache = write_weights(tmp_path / "w"), tmp_path / "digests.json"
    future = time.time() + 3600
    os.utime(path, (future, future))
    assert hashed(DigestMemo(cache), path)[1]
    assert hashed(DigestMemo(cache), path)[1]
    assert not cache.exists()


def test_a_broken_memo_only_costs_time(tmp_path: Path) -> None:
    path, cache = write_weights(tmp_path / "w"), tmp_path / "digests.json"
    settle(path)
    for content in ("{not json", "[]", '{"x": 3}'):
        cache.write_text(content)
        assert hashed(DigestMemo(cache), path)[1]
        assert not hashed(DigestMemo(cache), path)[1]


def test_an_unwritable_memo_only_costs_time(tmp_path: Path) -> None:
    path = write_weights(tmp_path / "w")
    settle(path)
    (tmp_path / "file").write_text("")
    cache = tmp_path / "file" / "digests.json"
    assert hashed(DigestMemo(cache), path) == hashed(DigestMemo(cache), path)


def test_missing_file_is_a_startup_error(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot read"):
        hashed(DigestMemo(tmp_path / "digests.json"), tmp_path / "absent")
