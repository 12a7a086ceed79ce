"""The README's examples run as they stand there, with the default model."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from engine.drafter import DraftContext

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PATIENCE = 300.0  # seconds; the first start converts the model


def example(marker):
    """The Python block of the README that contains `marker`."""
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if marker in b]
    return block


@pytest.fixture(scope="module")
def environ(tmp_path_factory):
    """A home directory of its own, so that the examples start from empty caches."""
    home = tmp_path_factory.mktemp("home")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OVERWINTER_", "XDG_"))}
    return kept | {"HOME": str(home)}


def python(script, environ):
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_python_example(environ):
    assert "Paris" in python(example("AsyncEngine"), environ)


def test_the_drafter_of_the_example_guesses_the_phrase_and_nothing_else():
    names = {}
    exec(example("PhraseDrafter"), names)
    drafter = names["PhraseDrafter"](vocab_size=49152, max_tokens=31)
    phrase = [504, 3575, 282, 4649, 314, 7042, 30]
    beginnings = [[9, *phrase[:known]] for known in range(4)]
    contexts = [DraftContext("r", tokens, 4, None) for tokens in beginnings]
    assert drafter.propose(contexts) == [[], phrase[1:5], phrase[2:6], phrase[3:7]]
    drafter.finish("r")


def is_ready(url):
    try:
        return httpx.get(f"{url}/ready", timeout=PATIENCE).status_code == 200
    except httpx.ConnectError:
        return False


@pytest.fixture
def url(environ):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "api", "serve", "--port", str(port), "--kv-memory", "256MiB"]
    process = subprocess.Popen(command, cwd=ROOT, env=environ, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + PATIENCE
        url = f"http://127.0.0.1:{port}"
        while not is_ready(url):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield url
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()


def test_the_openai_and_the_curl_example(environ, url):
    script = example("from openai import OpenAI").replace("http://127.0.0.1:8000", url)
    assert "Paris" in python(script, environ)
    (body,) = re.findall(r"curl \S+/v1/chat/completions .*? -d '(.*?)'", README, re.DOTALL)
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(
        f"{url}/v1/chat/completions", content=body, headers=headers, timeout=PATIENCE
    )
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]


def test_every_file_that_is_linked_exists():
    links = re.findall(r"\]\((?!https?://)([^)#]+)", README)
    assert "docs/design.md" in links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_no_figure_is_missing():
    assert re.findall(r"@[A-Z_]+@", README) == []
