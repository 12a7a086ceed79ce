"""The options of `overwinter serve`, declared once.

One field of `ServeOptions` is a flag, an environment variable, a key of the TOML file, a line of
`--print-config` and a row of the README's table. Whatever the source, a value passes through the
same `Kind.parse`, so that the sources cannot come to disagree about what a value means.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MASK = "********"
ENV_PREFIX = "OVERWINTER_"

UNITS = {
    "GiB": 1 << 30,
    "MiB": 1 << 20,
    "KiB": 1 << 10,
    "GB": 10**9,
    "MB": 10**6,
    "KB": 10**3,
}


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of value: how it is read from text and written as TOML."""

    metavar: str
    parse: Callable[[str], Any]  # raises ValueError; its message completes "--flag ..."
    toml_types: tuple[type, ...]
    render: Callable[[Any], str]


@dataclass(frozen=True, slots=True)
class Option:
    """What the declaration of one option says beyond its type and default."""

    kind: Kind
    help: str
    group: str
    metavar: str
    default_text: str  # as the help and the README show it
    many: bool = False
    secret: bool = False
    optional: bool = False  # None is a value: "nothing", spelt as the empty string


def parse_size(text: str) -> int:
    """Bytes of `text`: `1GiB`, `512 MB`, `1.5GiB`, or a bare number of bytes."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", text.strip())
    units = {unit.lower(): size for unit, size in UNITS.items()}
    if match is None or (match[2] and match[2].lower() not in units):
        raise ValueError(f"takes a size such as 512MiB or 2GB, not {text!r}")
    scale = units[match[2].lower()] if match[2] else 1
    whole, _, fraction = match[1].partition(".")
    if fraction and scale == 1:
        raise ValueError(f"takes a whole number of bytes, not {text!r}")
    # Integers throughout: a float would round sizes above 2**53 bytes.
    return int(whole) * scale + int(fraction or "0") * scale // int("1" + "0" * len(fraction))


def format_size(size: int) -> str:
    """The shortest exact spelling of `size` bytes that `parse_size` reads back."""
    for unit, scale in UNITS.items():
        if size and size % scale == 0:
            return f"{size // scale}{unit}"
    return str(size)


def quote(text: str) -> str:
    """`text` as a TOML basic string."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _parse_text(text: str) -> str:
    if not text:
        raise ValueError("must not be empty")
    return text


def _parse_path(text: str) -> Path:
    if not text:
        raise ValueError("takes a directory, not an empty string")
    return Path(text).expanduser()


def _parse_switch(text: str) -> bool:
    words = {"true": True, "1": True, "yes": True, "on": True}
    words |= {"false": False, "0": False, "no": False, "off": False}
    if text.lower() not in words:
        raise ValueError(f"takes true or false, not {text!r}")
    return words[text.lower()]


def _parse_seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"takes a number of seconds from 0 up, not {text!r}")
    return value


def _parse_share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"takes a number from 0 to 1, not {text!r}")
    return value


def integer(low: int, high: int | None = None) -> Kind:
    def parse(text: str) -> int:
        value = int(text) if re.fullmatch(r"[+-]?[0-9]+", text) else None
        if value is None or value < low or (high is not None and value > high):
            span = f"from {low} up" if high is None else f"from {low} to {high}"
            raise ValueError(f"takes a whole number {span}, not {text!r}")
        return value

    return Kind("N", parse, (int, str), str)


def choice(*words: str) -> Kind:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(f"takes one of {', '.join(words)}, not {text!r}")
        return text

    return Kind("|".join(words), parse, (str,), quote)


def matching(pattern: str, what: str, metavar: str) -> Kind:
    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"takes {what}, not {text!r}")
        return text

    return Kind(metavar, parse, (str,), quote)


TEXT = Kind("TEXT", _parse_text, (str,), quote)
PATH = Kind("DIR", _parse_path, (str,), lambda value: quote(str(value)))
SWITCH = Kind("", _parse_switch, (bool,), lambda value: "true" if value else "false")
SECONDS = Kind("SECONDS", _parse_seconds, (int, float, str), lambda value: f"{value:g}")
SHARE = Kind("SHARE", _parse_share, (int, float, str), lambda value: repr(float(value)))
SIZE = Kind("SIZE", parse_size, (int, str), lambda value: quote(format_size(value)))

MODEL = "Model"
NETWORK = "Network"
COMPUTE = "Compute and KV memory"
LIMITS = "Limits"
TIERS = "KV tiers"
SPECULATION = "Speculation"
OPERATION = "Operation"
GROUPS = (MODEL, NETWORK, COMPUTE, LIMITS, TIERS, SPECULATION, OPERATION)


def option(
    kind: Kind,
    group: str,
    default: Any,
    help: str,
    *,
    metavar: str | None = None,
    default_text: str | None = None,
    many: bool = False,
    secret: bool = False,
) -> Any:
    """A dataclass field carrying its `Option`. `default` may be a function without arguments."""
    optional = default is None and not secret
    if default_text is None:
        default_text = "" if default in (None, ()) or kind is SWITCH else _plain(kind, default)
    described = Option(
        kind=kind,
        help=help,
        group=group,
        metavar=kind.metavar if metavar is None else metavar,
        default_text=default_text,
        many=many,
        secret=secret,
        optional=optional,
    )
    if callable(default):
        return field(default_factory=default, metadata={"option": described})
    return field(default=default, metadata={"option": described})


def _plain(kind: Kind, value: Any) -> str:
    return kind.render(value).strip('"')


def user_cache_dir() -> Path:
    """Where this user's caches live: `$XDG_CACHE_HOME/overwinter`, else `~/.cache/overwinter`."""
    base = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification says to ignore relative paths.
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return root / "overwinter"


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Everything `overwinter serve` can be told. Sizes are bytes, times seconds."""

    model: str | None = option(
        TEXT,
        MODEL,
        None,
        "HF directory, .gguf file or hub id.",
        metavar="MODEL",
        default_text="SmolLM2-135M-Instruct",
    )
    served_model_name: tuple[str, ...] = option(
        TEXT,
        MODEL,
        (),
        "Name that requests use; repeat it for aliases, the first one is shown.",
        metavar="NAME",
        many=True,
        default_text="MODEL as given",
    )
    cache_dir: Path = option(
        PATH,
        MODEL,
        user_cache_dir,
        "Converted models and built kernels.",
        default_text="$XDG_CACHE_HOME/overwinter",
    )

    host: str = option(
        TEXT, NETWORK, "127.0.0.1", "Address to listen on; 0.0.0.0 for all.", metavar="HOST"
    )
    port: int = option(integer(0, 65535), NETWORK, 8000, "Port to listen on; 0 takes a free one.")
    api_key: tuple[str, ...] = option(
        TEXT,
        NETWORK,
        (),
        "Key that clients must send; repeat it for several.",
        metavar="KEY",
        many=True,
        secret=True,
        default_text="no key",
    )
    admin_key: str | None = option(
        TEXT,
        NETWORK,
        None,
        "Key for /cache/*.",
        metavar="KEY",
        secret=True,
        default_text="--api-key, else loopback only",
    )

    device: str = option(choice("auto", "cpu", "cuda"), COMPUTE, "auto", "Where the model runs.")
    dtype: str = option(
        choice("auto", "bfloat16", "float16", "float32"),
        COMPUTE,
        "auto",
        "bfloat16, float16 or float32; auto: bfloat16 where the processor has it, else float32.",
        metavar="TYPE",
    )
    threads: int | None = option(
        integer(1), COMPUTE, None, "Compute threads.", default_text="one per core"
    )
    max_model_len: int | None = option(
        integer(2),
        COMPUTE,
        None,
        "Longest prompt plus answer, in tokens.",
        default_text="the model's",
    )
    block_size: int = option(integer(1, 1024), COMPUTE, 16, "Tokens per KV block.")
    kv_memory: int | None = option(
        SIZE,
        COMPUTE,
        None,
        "Device memory for KV; not together with --kv-blocks.",
        default_text="1GiB",
    )
    kv_blocks: int | None = option(
        integer(1), COMPUTE, None, "The same as a number of blocks.", default_text="by --kv-memory"
    )

    max_num_seqs: int = option(integer(1), LIMITS, 64, "Sequences running at once.")
    max_num_batched_tokens: int = option(integer(1), LIMITS, 512, "Tokens computed per step.")
    max_queue: int = option(
        integer(1), LIMITS, 256, "Sequences waiting; beyond it requests get 503."
    )
    request_timeout: float = option(
        SECONDS, LIMITS, 0.0, "Longest time for one request; 0: no limit."
    )

    cpu_tier: int = option(SIZE, TIERS, 1 << 30, "Main memory for KV; 0: no CPU tier.")
    disk_tier: Path | None = option(
        PATH, TIERS, None, "Directory for KV that outlives the process.", default_text="none"
    )
    disk_tier_size: int = option(SIZE, TIERS, 10 << 30, "Most bytes the disk tier may occupy.")
    disk_tier_ttl: float = option(
        SECONDS, TIERS, 0.0, "Forget what lies unused on disk for longer; 0: never."
    )
    disk_tier_optional: bool = option(
        SWITCH, TIERS, False, "Serve without the disk tier if it cannot be opened."
    )
    offload_prompt_only: bool = option(SWITCH, TIERS, False, "Keep prompts, not generated tokens.")
    transcript_cache: str = option(
        choice("on", "off"),
        TIERS,
        "on",
        "Read chats with the token ids that were really generated.",
    )
    load_policy: str = option(
        choice("auto", "always", "never"),
        TIERS,
        "auto",
        "auto loads unless recomputing is measured to be cheaper.",
    )

    verify_loads: float = option(
        SHARE,
        TIERS,
        0.0,
        "Share of loaded blocks, 0 to 1, that are computed anew in idle time and compared.",
    )

    speculative: str = option(
        TEXT,
        SPECULATION,
        "ngram",
        "Drafter for speculative decoding: text so far, a smaller model, a class of yours.",
        metavar="off|ngram|draft:MODEL|MODULE:CLASS",
    )
    speculative_tokens: int = option(
        integer(1, 64), SPECULATION, 31, "Tokens drafted per request and step at most."
    )
    speculative_depth: str = option(
        choice("auto", "fixed"),
        SPECULATION,
        "auto",
        "auto drafts as many tokens as are measured to pay, fixed always the most.",
    )

    drain_timeout: float = option(
        SECONDS, OPERATION, 30.0, "How long running requests may finish after SIGTERM."
    )
    metrics_prefix: str = option(
        matching("[A-Za-z_][A-Za-z0-9_]*", "letters, digits and underscores", "NAME"),
        OPERATION,
        "vllm",
        "Prefix of the metrics' names.",
    )
    log_level: str = option(
        choice("debug", "info", "warning", "error"), OPERATION, "info", "Least severe level logged."
    )
    log_format: str = option(choice("text", "json"), OPERATION, "text", "Form of a log line.")
    seed: int | None = option(
        integer(0, 2**64 - 1),
        OPERATION,
        None,
        "Makes unseeded requests repeatable.",
        default_text="random",
    )


@dataclass(frozen=True, slots=True)
class NamedOption:
    """One option with its names in every source."""

    name: str  # field of ServeOptions
    option: Option

    @property
    def key(self) -> str:
        return self.name.replace("_", "-")

    @property
    def flag(self) -> str:
        return "MODEL" if self.name == "model" else f"--{self.key}"

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.upper()


OPTIONS: tuple[NamedOption, ...] = tuple(
    NamedOption(f.name, f.metadata["option"]) for f in dataclasses.fields(ServeOptions)
)
BY_NAME = {named.name: named for named in OPTIONS}

# Flags that steer the start itself and so are no settings.
CONFIG_HELP = "Read settings from this TOML file."
PRINT_CONFIG_HELP = "Print the resulting settings as TOML, keys masked, and exit."
VERSION_HELP = "Print the version and exit."


def flag_table() -> str:
    """The README's table of flags, in Markdown."""
    lines = ["| flag | default | |", "|---|---|---|"]
    for named in OPTIONS:
        described = named.option
        positional = named.name == "model"
        value = "" if positional or not described.metavar else f" {described.metavar}"
        escaped = value.replace("|", "\\|")
        default = described.default_text
        lines.append(f"| `{named.flag}{escaped}` | {default} | {described.help} |")
    for flag, text in (
        ("--config FILE", CONFIG_HELP),
        ("--print-config", PRINT_CONFIG_HELP),
        ("--version", VERSION_HELP),
    ):
        lines.append(f"| `{flag}` | | {text} |")
    return "\n".join(lines)
