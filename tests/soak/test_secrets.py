"""Sixty-four conversations, each told a secret, under churn through all tiers of a real server.

They share a system prompt and no salt, so only the right KV keeps them apart. The pool, the CPU
tier and the disk each hold a fraction of them; caches are reset and the server is killed and
started anew meanwhile. No answer may hold another conversation's secret, a sample of answers is
compared with cold ones, nothing answers 5xx, the directory stays under its cap, and at the end no
gauge is left. Twenty minutes, with the default model where it is installed:

    SOAK_SECONDS=120 SOAK_MODEL=tiny make soak TEST_ARGS="tests/soak/test_secrets.py -s"
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.cli.store import store_verify
from engine.model_source import default_model_path
from tests.api.command import PATIENCE, Command
from tests.offload.harness import physical_bytes
from tests.running_engine import LOGPROB_TOLERANCE

NUM_CONVERSATIONS = 64
NUM_CLIENTS = 8
TURNS = 5
SECONDS_BETWEEN_KILLS = 75.0  # a start takes half a minute on a busy machine
SYSTEM = "You are a helpful assistant. You remember exactly what the user tells you."
SMALL_TALK = [
    "Tell me about bees in winter.",
    "What can one cook with potatoes?",
    "Write one sentence about the sea.",
    "Why is the sky blue?",
    "Name three rivers.",
]
ASK_BACK = "What is my secret code? Answer with the code alone."


@dataclass(frozen=True)
class Setting:
    """A model with the sizes that make it churn."""

    model: Path
    cache: Path
    arguments: tuple[str, ...]
    disk_bytes: int
    speaks: bool  # its answers mean something


@dataclass
class Conversation:
    """What has been said; one client at a time."""

    secret: str
    messages: list[dict[str, str]] = field(default_factory=list)
    busy: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> None:
        told = f"My secret code is {self.secret}. Please repeat: my secret code is {self.secret}."
        self.messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": told},
        ]


class Soak:
    """The server, its clients, and who disturbs them."""

    def __init__(self, setting: Setting, store: Path, seconds: float) -> None:
        self.setting = setting
        self.store = store
        self.rng = random.Random(0)
        words = ["amber", "cedar", "falcon", "granite", "harbor", "meadow", "orchid", "walnut"]
        secrets = [
            f"{word}-{number}-{other}"
            for number, word, other in zip(
                self.rng.sample(range(1000, 9999), NUM_CONVERSATIONS),
                words * 8,
                self.rng.choices(words, k=NUM_CONVERSATIONS),
                strict=True,
            )
        ]
        self.conversations = [Conversation(secret) for secret in secrets]
        self.counts: Counter[str] = Counter()
        self.most_bytes = 0
        self.failed = threading.Event()
        self._counting = threading.Lock()
        self._server_changes = threading.Lock()
        self._lives = 0
        self._start()
        self.deadline = time.monotonic() + seconds

    # --- the server -------------------------------------------------------------------------

    def _start(self) -> None:
        setting = self.setting
        self.server = Command(
            *(setting.model, "--port", "0", "--dtype", "float32", "--cache-dir", setting.cache),
            *("--disk-tier", self.store, "--disk-tier-size", setting.disk_bytes),
            *("--load-policy", "always", *setting.arguments),
        )
        self.url = self.server.ready()
        self._lives += 1

    def _kill(self) -> None:
        with self._server_changes:
            self.server.close()
            self._start()
        self.count("kills")

    @property
    def _is_over(self) -> bool:
        return time.monotonic() > self.deadline or self.failed.is_set()

    def count(self, what: str, number: int = 1) -> None:
        with self._counting:
            self.counts[what] += number

    # --- clients ----------------------------------------------------------------------------

    def client(self, number: int) -> None:
        """Turn after turn of whatever conversation nobody is at."""
        rng = random.Random(number)
        try:
            while not self._is_over:
                conversation = rng.choice(self.conversations)
                if not conversation.busy.acquire(blocking=False):
                    continue
                try:
                    self._turn(conversation, rng)
                finally:
                    conversation.busy.release()
        except BaseException:
            self.failed.set()
            raise

    def _turn(self, conversation: Conversation, rng: random.Random) -> None:
        messages = conversation.messages
        if not messages or len(messages) > 2 * TURNS:
            conversation.begin()
            messages = conversation.messages
        else:
            asks_back = len(messages) > 4 and rng.random() < 0.5
            question = ASK_BACK if asks_back else rng.choice(SMALL_TALK)
            messages.append({"role": "user", "content": question})
        answer = self._ask(messages, None)
        text = answer["choices"][0]["message"]["content"]
        for other in self.conversations:
            if other is not conversation:
                assert other.secret not in text, f"{other.secret} told to {conversation.secret}"
        if messages[-1]["content"] == ASK_BACK or len(messages) == 2:
            self.count("asked back")
            self.count("recalled", conversation.secret in text)
        if rng.random() < 0.25:
            self._compare(answer, self._ask(messages, f"cold-{rng.random()}"))
        messages.append({"role": "assistant", "content": text})

    def _ask(self, messages: list[dict[str, str]], salt: str | None) -> Any:
        body = {
            "messages": messages,
            "max_tokens": 24,
            "temperature": 0,
            "logprobs": True,
            "cache_salt": salt,
        }
        while True:
            life = self._lives
            try:
                with httpx.Client(base_url=self.url, timeout=PATIENCE) as http:
                    response = http.post("/v1/chat/completions", json=body)
            except httpx.TimeoutException as error:
                raise AssertionError(f"no answer in {PATIENCE:.0f} s; {self._sight()}") from error
            except httpx.TransportError:
                with self._server_changes:  # until the one who kills it has started it again
                    assert self._lives > life, "the server is gone, and nobody killed it"
                self.count("retried")
                continue
            assert response.status_code == 200, response.text
            answer = response.json()
            self.count("answers")
            details = answer["usage"]["prompt_tokens_details"]
            self.count("prompt tokens", answer["usage"]["prompt_tokens"])
            for tier, tokens in details["cached_tokens_by_tier"].items():
                self.count(f"{tier} tokens", tokens)
            return answer

    def _sight(self) -> str:
        """What can be seen of a server that does not answer."""
        with httpx.Client(base_url=self.url, timeout=10) as http:
            metrics = http.get("/metrics").text.splitlines()
        gauges = [line for line in metrics if "num_requests" in line or "usage_perc" in line]
        return "\n".join([*gauges, *self.server.lines[-20:]])

    def _compare(self, warm: Any, cold: Any) -> None:
        """Equal logprobs, up to a near tie of the two most likely tokens."""
        self.count("compared")
        ours = warm["choices"][0]["logprobs"]["content"]
        theirs = cold["choices"][0]["logprobs"]["content"]
        for one, other in zip(ours, theirs, strict=False):
            assert abs(one["logprob"] - other["logprob"]) <= 2 * LOGPROB_TOLERANCE
            if one["token"] != other["token"]:
                self.count("near ties")
                return
        assert len(ours) == len(theirs)

    # --- who disturbs -----------------------------------------------------------------------

    def disturb(self) -> None:
        """Resets, flushes and kills, a few a minute, until the time is up."""
        next_kill = 0.0
        try:
            while not self._is_over:
                pause = time.monotonic() + self.rng.uniform(4, 14)
                while time.monotonic() < pause and not self._is_over:
                    time.sleep(0.1)
                what = self.rng.choice(["reset", "flush", "flush", "kill"])
                if what == "kill":
                    if time.monotonic() > next_kill:
                        self._kill()
                        next_kill = time.monotonic() + SECONDS_BETWEEN_KILLS
                    continue
                tiers = self.rng.choice([None, ["device"], ["device", "cpu"], ["disk"]])
                body = {"tiers": tiers} if what == "reset" and tiers else {}
                with httpx.Client(base_url=self.url, timeout=PATIENCE) as http:
                    response = http.post(f"/cache/{what}", json=body)
                assert response.status_code == 200, response.text
                self.count({"reset": "resets", "flush": "flushes"}[what])
        except BaseException:
            self.failed.set()
            raise

    def watch(self) -> None:
        """The directory's physical size, all the time."""
        while not self._is_over:
            self.most_bytes = max(self.most_bytes, physical_bytes(self.store))
            time.sleep(0.25)

    # --- the whole --------------------------------------------------------------------------

    def run(self) -> None:
        try:
            with ThreadPoolExecutor(NUM_CLIENTS + 2) as pool:
                jobs = [pool.submit(self.client, number) for number in range(NUM_CLIENTS)]
                jobs += [pool.submit(self.disturb), pool.submit(self.watch)]
            # The first to fail stops the others, whose errors may only follow from its own.
            for error in filter(None, (job.exception() for job in reversed(jobs))):
                raise error
            self._check_gauges()
            assert self.server.stop() == 0
        finally:
            self.server.close()
        print(f"\n{dict(sorted(self.counts.items()))}, at most {self.most_bytes} bytes on disk")

    def _check_gauges(self) -> None:
        wanted = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        deadline = time.monotonic() + PATIENCE  # what idle time computes ahead holds blocks, too
        while True:
            with httpx.Client(base_url=self.url, timeout=PATIENCE) as http:
                lines = http.get("/metrics").text.splitlines()
            values = [
                float(line.rsplit(" ", 1)[1])
                for line in lines
                if not line.startswith("#") and any(f"{name}{{" in line for name in wanted)
            ]
            assert len(values) == len(wanted)
            if not any(values):
                return
            assert time.monotonic() < deadline, f"gauges of an idle server: {values}"
            time.sleep(0.2)


@pytest.fixture
def setting(tiny_llama: Path, kernel_cache: Path) -> Setting:
    real = default_model_path()
    if real is None or os.environ.get("SOAK_MODEL") == "tiny":
        arguments = ("--block-size", "4", "--kv-blocks", "400", "--cpu-tier", "512KiB")
        return Setting(tiny_llama, kernel_cache, arguments, 24 << 20, speaks=False)
    arguments = ("--kv-blocks", "200", "--cpu-tier", "96MiB")
    return Setting(real, kernel_cache, arguments, 384 << 20, speaks=True)


@pytest.mark.soak
def test_no_secret_is_told_to_another(setting: Setting, tmp_path: Path) -> None:
    seconds = float(os.environ.get("SOAK_SECONDS", "1200"))
    soak = Soak(setting, tmp_path / "kv", seconds)
    soak.run()
    assert soak.most_bytes <= setting.disk_bytes
    assert store_verify(tmp_path / "kv") == 0
    assert soak.counts["compared"] > 0
    assert soak.counts["device tokens"] > 0
    assert soak.counts["cpu tokens"] + soak.counts["disk tokens"] > 0
    if setting.speaks:  # or the search for secrets would find none in anybody's answers
        assert soak.counts["recalled"] > 0
