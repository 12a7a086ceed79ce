"""What is told of a block that was found bad: a log line, and a file with all that reproduces it.

The file lies in `quarantine` in the cache directory, readable by its owner only, because token ids
are what somebody wrote. No salt is in it: the root's hash stands for the salt. The bad bytes are
gone with the stored block; their digest tells whether an attempt to reproduce it came to the same.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
from pathlib import Path
from typing import Any

from engine.load_audit import AuditFailure

logger = logging.getLogger(__name__)

DIRECTORY = "quarantine"
MAX_FILES = 64  # the latest; a broken machine may go on producing them
MAX_LOGGED_TOKENS = 64


class AuditReporter:
    """Writes reports into `cache_dir`, one after another on a daemon thread of its own: a disk that
    hangs stops neither the engine nor the end of its process."""

    def __init__(self, cache_dir: Path, fingerprint: bytes) -> None:
        self._directory = cache_dir / DIRECTORY
        self._fingerprint = fingerprint.hex()
        self._waiting: queue.Queue[AuditFailure] = queue.Queue(MAX_FILES)
        self._thread: threading.Thread | None = None

    def report(self, failure: AuditFailure) -> None:
        """Returns at once. Never raises for a file that cannot be written: then the log has it
        all."""
        try:
            self._waiting.put_nowait(failure)
        except queue.Full:  # the disk does not move
            self._tell(self._record(failure), None)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="audit-report", daemon=True)
            self._thread.start()

    def wait(self, timeout: float) -> bool:
        """Until everything is told, for so many seconds; whether it is. Blocks."""
        with self._waiting.all_tasks_done:
            return self._waiting.all_tasks_done.wait_for(
                lambda: not self._waiting.unfinished_tasks, timeout
            )

    def _work(self) -> None:
        while True:
            record = self._record(self._waiting.get())
            try:
                name = f"{record['block_hash']}.{record['group']}.json"
                self._tell(record, self._write(record, name))
            finally:
                self._waiting.task_done()

    def _tell(self, record: dict[str, Any], path: Path | None) -> None:
        token_ids = record["token_ids"]
        is_short = len(token_ids) <= MAX_LOGGED_TOKENS or path is None
        shown = {**record, "token_ids": token_ids if is_short else f"{len(token_ids)} in the file"}
        logger.error(
            "a loaded block is not what computing it anew gives; it is quarantined with what may"
            " follow from it. Its own bytes or a block before it were bad when it was stored, or"
            " memory is failing. %s%s",
            " ".join(f"{name}={value}" for name, value in shown.items()),
            f" file={path}" if path else "",
        )

    def _record(self, failure: AuditFailure) -> dict[str, Any]:
        sample, comparison = failure.sample, failure.comparison
        worst = comparison.worst
        num_tokens = (sample.index + 1) * sample.block_size
        return {
            "block_hash": sample.key.block_hash.hex(),
            "group": sample.key.group,
            "index": sample.index,
            "tier": sample.tier,
            "layer": worst.layer,
            "part": worst.part,
            "head": worst.head,
            "slot": worst.slot,
            "error": worst.error,
            "threshold": failure.threshold,
            "fingerprint": self._fingerprint,
            "root_hash": sample.root_hash.hex(),
            "sha256": comparison.digest,
            "computed_sha256": comparison.computed_digest,
            "stored_at": failure.locations,
            "dropped_from_device": failure.num_dropped,
            "token_ids": list(sample.token_ids[:num_tokens]),
        }

    def _write(self, record: dict[str, Any], name: str) -> Path | None:
        path = self._directory / name
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._drop_oldest()
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
            with open(os.open(path, flags, 0o600), "w", encoding="ascii") as file:
                json.dump(record, file)
        except OSError as error:
            logger.warning("%s cannot be written: %s", path, error.strerror)
            return None
        return path

    def _drop_oldest(self) -> None:
        files = sorted(self._directory.glob("*.json"), key=lambda file: file.stat().st_mtime)
        for file in files[: max(0, len(files) - MAX_FILES + 1)]:
            file.unlink(missing_ok=True)
