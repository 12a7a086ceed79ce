import dataclasses
import re
from pathlib import Path

import pytest

from api.cli.options import (
    OPTIONS,
    ServeOptions,
    flag_table,
    format_size,
    parse_size,
    quote,
    user_cache_dir,
)

README = Path(__file__).parents[2] / "README.md"

CONTRACT = {
    "--host",
    "--port",
    "--served-model-name",
    "--api-key",
    "--admin-key",
    "--cache-dir",
    "--device",
    "--dtype",
    "--threads",
    "--max-model-len",
    "--block-size",
    "--kv-memory",
    "--kv-blocks",
    "--max-num-seqs",
    "--max-num-batched-tokens",
    "--max-queue",
    "--cpu-tier",
    "--disk-tier",
    "--disk-tier-size",
    "--disk-tier-ttl",
    "--disk-tier-optional",
    "--offload-prompt-only",
    "--transcript-cache",
    "--load-policy",
    "--verify-loads",
    "--speculative",
    "--speculative-tokens",
    "--speculative-depth",
    "--drain-timeout",
    "--request-timeout",
    "--metrics-prefix",
    "--log-level",
    "--log-format",
    "--seed",
}


def test_the_flags_are_those_of_the_contract():
    assert [named.flag for named in OPTIONS if named.flag not in CONTRACT] == ["MODEL"]
    assert len(OPTIONS) == len(CONTRACT) + 1


def test_defaults_are_those_of_the_contract():
    options = ServeOptions()
    assert (options.host, options.port) == ("127.0.0.1", 8000)
    assert (options.device, options.dtype) == ("auto", "auto")
    assert options.block_size == 16
    assert (options.max_num_seqs, options.max_num_batched_tokens) == (64, 512)
    assert options.max_queue == 256
    assert (options.cpu_tier, options.disk_tier) == (1 << 30, None)
    assert options.disk_tier_size == 10 << 30
    assert (options.load_policy, options.speculative) == ("auto", "ngram")
    assert (options.speculative_tokens, options.speculative_depth) == (31, "auto")
    assert options.verify_loads == 0.0
    assert (options.drain_timeout, options.request_timeout) == (30.0, 0.0)
    assert (options.metrics_prefix, options.log_level, options.log_format) == (
        "vllm",
        "info",
        "text",
    )


def test_settings_cannot_change_after_construction():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ServeOptions().port = 1


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1KiB", 1024),
        ("3MiB", 3 << 20),
        ("2GiB", 2 << 30),
        ("1KB", 1000),
        ("5MB", 5_000_000),
        ("7GB", 7_000_000_000),
        ("512 MiB", 512 << 20),
        ("1gib", 1 << 30),
        ("1.5GiB", 3 << 29),
        ("0.001KB", 1),
        ("9007199254740993KiB", 9007199254740993 * 1024),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "1G", "-1", "GiB", "1.5", "1e9", "1 TiB", "٣"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [(1 << 30, "1GiB"), (1536 << 20, "1536MiB"), (10**9, "1GB"), (1025, "1025"), (0, "0")],
)
def test_sizes_are_written_as_they_are_read(size, text):
    assert format_size(size) == text
    assert parse_size(text) == size


def test_quoting_is_toml():
    assert quote('a"b\\c\nd\x7fé😀') == '"a\\"b\\\\c\\nd\\u007fé😀"'


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ("/somewhere", Path("/somewhere/overwinter")),
        ("relative", Path.home() / ".cache" / "overwinter"),
        (None, Path.home() / ".cache" / "overwinter"),
    ],
)
def test_the_users_cache(monkeypatch, variable, expected):
    if variable is None:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", variable)
    assert user_cache_dir() == expected
    assert ServeOptions().cache_dir == expected


def test_the_readme_has_the_table_of_flags():
    assert flag_table() in README.read_text(encoding="utf-8")
