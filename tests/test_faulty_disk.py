"""The whole server over a disk that fails, fills up and hangs: no failed request, no wrong answer.

The faults are real errors of real system calls, made by a small library that the server preloads.
"""

from __future__ import annotations

import concurrent.futures
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.command import PATIENCE, Command
from tests.running_engine import LOGPROB_TOLERANCE
from tests.test_kill import complete, logprobs_of

BLOCK_SIZE = 4


class Disk:
    """A directory of the server's, and the faults planted in it."""

    def __init__(self, folder: Path) -> None:
        self.store = folder / "kv"
        self.control = folder / "faults"
        self.plant()
        library = folder / "faulty_files.so"
        source = Path(__file__).with_name("faulty_files.c")
        command = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, source]
        subprocess.run([*command, "-ldl"], check=True)
        self.environ = {
            "LD_PRELOAD": str(library),
            "FAULTY_DIR": str(self.store),
            "FAULTY_CONTROL": str(self.control),
        }

    def plant(self, *faults: str) -> None:
        """From now on these and no others: "write EIO", "read hang" ..."""
        fresh = self.control.with_suffix(".new")
        fresh.write_text("".join(f"{fault}\n" for fault in faults))
        fresh.rename(self.control)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


@pytest.fixture
def server(
    disk: Disk, tiny_llama: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Command]:
    for name, value in disk.environ.items():
        monkeypatch.setenv(name, value)
    command = Command(
        *(tiny_llama, "--port", "0", "--threads", "1", "--dtype", "float32"),
        *("--block-size", BLOCK_SIZE, "--kv-blocks", "64", "--cpu-tier", "0"),
        *("--cache-dir", kernel_cache, "--disk-tier", disk.store, "--load-policy", "always"),
        *("--drain-timeout", "1"),
    )
    for name in disk.environ:
        monkeypatch.delenv(name)
    try:
        yield command
    finally:
        disk.plant()
        command.close()


def disk_stats(http: httpx.Client) -> Any:
    return http.get("/cache/stats").json()["tiers"]["disk"]


def test_faults_one_after_the_other_and_sigterm_in_the_last(server: Command, disk: Disk) -> None:
    prompts = [[3 + (step * i) % 370 for i in range(61)] for step in (17, 23)]
    truths: dict[int, Any] = {}
    url = server.ready()

    def load(seed: float) -> int:
        """Each prompt, and after it a new one, so that the device has lost it when it returns."""
        hits = 0
        with httpx.Client(base_url=url, timeout=PATIENCE) as http:
            for number, prompt in enumerate(prompts):
                answer = complete(http, prompt)
                truth = truths.setdefault(number, answer)
                pairs = zip(logprobs_of(answer), logprobs_of(truth), strict=True)
                assert max(abs(a - b) for a, b in pairs) <= LOGPROB_TOLERANCE
                details = answer["usage"]["prompt_tokens_details"]
                hits += details["cached_tokens_by_tier"]["disk"] > 0
                complete(http, prompt[::-1], salt=str((seed, number)))
        return hits

    def load_twice() -> int:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            return sum(pool.map(load, (random.random(), random.random())))

    load(0.0)
    with httpx.Client(base_url=url, timeout=PATIENCE) as http:
        assert http.post("/cache/flush").json()["failed"] == {"disk": 0}
        assert load_twice() > 0
        for fault in ("write EIO", "write ENOSPC", "open EMFILE", "read EIO", "write hang"):
            before = disk_stats(http)
            disk.plant(fault)
            load_twice()
            disk.plant()
            if fault == "read EIO":
                assert disk_stats(http)["failed_blocks"] > before["failed_blocks"]
            deadline = time.monotonic() + PATIENCE
            while disk_stats(http)["pending_saves"] or not stored(http, before):
                assert time.monotonic() < deadline, f"saving does not resume after {fault}"
                time.sleep(0.05)
        assert load_twice() > 0
        disk.plant("read hang", "write hang")
        for number in range(2):
            complete(http, prompts[0][::-1], salt=f"last {number}")  # nobody waits for the writes
        waiting = threading.Thread(target=ask_in_vain, args=(url, prompts[1]))
        waiting.start()
        assert disk_stats(http)["pending_saves"] >= 3  # all that may hang do
    assert server.stop() == 0
    waiting.join()


def stored(http: httpx.Client, before: Any) -> bool:
    """Whether saves succeed again, those that failed included."""
    return bool(disk_stats(http)["saved_blocks"] > before["saved_blocks"])


def ask_in_vain(url: str, prompt: list[int]) -> None:
    """Its blocks cannot be read; it ends with the server, or is computed."""
    with httpx.Client(base_url=url, timeout=PATIENCE) as http:
        try:
            http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2})
        except httpx.TransportError:
            return
