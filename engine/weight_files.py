"""The safetensors files of a model directory: which they are, that they are whole, their digests.

The content digest of every file is part of the model's fingerprint. Hashing takes seconds per
gigabyte, so digests are remembered in the cache directory by path, size, times and inode.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
import time
from pathlib import Path
from typing import Any

from engine.errors import StartupError
from engine.model_info import ProgressFn

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# Timestamps tick coarsely: a file changed twice within a tick looks the same both times. A digest
# is remembered only if the file had been left alone this long (seconds) before it was read.
_SETTLED = 0.1
_CHUNK = 1 << 22  # bytes per read


def weight_files(directory: Path) -> list[Path]:
    """The directory's safetensors files, each present and of the length its header says.

    Raises:
        StartupError: none, one missing, or one cut off or damaged.
    """
    index = directory / INDEX
    if index.is_file():
        try:
            names = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise StartupError(f"{index} is damaged ({error}); download it again") from error
    elif (directory / SINGLE).is_file():
        names = [SINGLE]
    else:
        raise StartupError(
            f"{directory} has no model.safetensors; only safetensors weights are served,"
            " convert others with transformers' save_pretrained"
        )
    files = [directory / name for name in names]
    for path in files:
        check_length(path)
    return files


def check_length(path: Path) -> None:
    """Raise StartupError unless `path` is a safetensors file of the length its header says."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (header_length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(header_length, size)))
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
    except OSError as error:
        raise StartupError(
            f"weights {path} cannot be read ({error.strerror}); download the model again"
        ) from error
    except (struct.error, ValueError, LookupError, TypeError, AttributeError) as error:
        raise StartupError(f"weights {path} are damaged; download the model again") from error
    expected = 8 + header_length + max(ends, default=0)
    if size != expected:
        raise StartupError(
            f"weights {path} are cut off: {size} bytes of {expected}; download the model again"
        )


class DigestMemo:
    """sha256 of files, remembered between starts in one small JSON file.

    A lost or concurrent update costs one hashing, never a wrong digest.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries = self._read()

    def _read(self) -> dict[str, Any]:
        try:
            entries = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return entries if isinstance(entries, dict) else {}

    def digest(self, path: Path, progress: ProgressFn) -> str:
        """The hexadecimal sha256 of a file's content; percentages go to phase "hashing".

        Raises:
            StartupError: the file cannot be read.
        """
        try:
            with path.open("rb") as file:
                before = os.fstat(file.fileno())
                identity = _identity(before)
                known = self._entries.get(str(path.resolve()))
                if isinstance(known, dict) and known.get("identity") == identity:
                    return str(known["sha256"])
                started = time.time()
                hasher = hashlib.sha256()
                done = 0
                while chunk := file.read(_CHUNK):
                    hasher.update(chunk)
                    done += len(chunk)
                    progress("hashing", 100 * done / max(before.st_size, 1))
                after = os.fstat(file.fileno())
        except OSError as error:
            raise StartupError(f"cannot read {path}: {error.strerror}; check the disk") from error
        if _identity(after) != identity:
            raise StartupError(f"{path} changed while it was read; start again when it is whole")
        sha256 = hasher.hexdigest()
        if started - max(before.st_mtime, before.st_ctime) > _SETTLED:
            self._remember(str(path.resolve()), {"identity": identity, "sha256": sha256})
        return sha256

    def _remember(self, key: str, entry: dict[str, Any]) -> None:
        self._entries = {**self._read(), key: entry}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=self._path.parent, delete=False, encoding="utf-8"
            ) as file:
                json.dump(self._entries, file, indent=1)
            os.replace(file.name, self._path)
        except OSError:
            return  # a cache that cannot be written only makes the next start slower


def _identity(status: os.stat_result) -> list[int]:
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev]
