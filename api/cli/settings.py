"""Where settings come from: a flag, over the environment, over the TOML file, over the default."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from api.cli.errors import UsageError
from api.cli.options import BY_NAME, ENV_PREFIX, MASK, OPTIONS, NamedOption, ServeOptions
from engine.config import GIB

# What a flag carries when cyclopts hands it over.
FlagValue = str | bool | Sequence[str]

CONFIG_VARIABLE = ENV_PREFIX + "CONFIG"


def resolve(
    flags: Mapping[str, FlagValue], environ: Mapping[str, str], config: Path | None
) -> ServeOptions:
    """Settings from all sources; `flags` holds only what was given on the command line.

    Raises `UsageError` naming the flag, variable or key at fault.
    """
    variables = _environment(environ)
    if config is None and environ.get(CONFIG_VARIABLE):
        config = Path(environ[CONFIG_VARIABLE])
    file = _file(config) if config is not None else {}
    values: dict[str, Any] = {}
    for source in (file, variables, _flags(flags)):
        if source.get("kv_memory") is not None and source.get("kv_blocks") is not None:
            raise UsageError("--kv-memory and --kv-blocks exclude each other: give one of them")
        # Two spellings of one setting: the nearer source replaces either.
        if "kv_memory" in source or "kv_blocks" in source:
            values.pop("kv_memory", None)
            values.pop("kv_blocks", None)
        values.update(source)
    if values.get("kv_memory") is None and values.get("kv_blocks") is None:
        values["kv_memory"] = GIB
    return ServeOptions(**values)


def _flags(flags: Mapping[str, FlagValue]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, raw in flags.items():
        named = BY_NAME[name]
        if isinstance(raw, bool):
            values[name] = raw
        elif isinstance(raw, str):
            values[name] = _parse(named, raw, named.flag)
        else:
            values[name] = tuple(_parse(named, text, named.flag) for text in raw)
    return values


def _environment(environ: Mapping[str, str]) -> dict[str, Any]:
    known = {named.variable: named for named in OPTIONS}
    values: dict[str, Any] = {}
    for variable, raw in sorted(environ.items()):
        if not variable.startswith(ENV_PREFIX) or variable == CONFIG_VARIABLE:
            continue
        named = known.get(variable)
        if named is None:
            raise UsageError(
                f"unknown environment variable {variable}"
                + _suggestion(variable, [*known, CONFIG_VARIABLE], prefix=ENV_PREFIX)
            )
        if named.option.many:
            texts = [text.strip() for text in raw.split(",")]
            values[named.name] = tuple(_parse(named, text, variable) for text in texts)
        else:
            values[named.name] = _parse(named, raw, variable)
    return values


def _file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as handle:
            document = tomllib.load(handle)
    except OSError as error:
        raise UsageError(f"--config {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path} is not valid TOML: {error}") from error
    values: dict[str, Any] = {}
    for key, raw in document.items():
        name = key.replace("-", "_")
        named = BY_NAME.get(name)
        if named is None:
            keys = [candidate.key for candidate in OPTIONS]
            raise UsageError(
                f"unknown key {key!r} in {path}{_suggestion(key.replace('_', '-'), keys)}"
            )
        where = f"{key!r} in {path}"
        if name in values:
            raise UsageError(f"{where} is given twice, with - and with _: keep one of them")
        values[name] = _from_toml(named, raw, where)
    return values


def _from_toml(named: NamedOption, raw: Any, where: str) -> Any:
    if not named.option.many:
        return _scalar(named, raw, where)
    if not isinstance(raw, list):
        raise UsageError(f"{where} takes an array")
    return tuple(_scalar(named, item, where) for item in raw)


def _scalar(named: NamedOption, raw: Any, where: str) -> Any:
    kinds = named.option.kind.toml_types
    # bool is an int to Python; `port = true` must not mean port 1.
    if not isinstance(raw, kinds) or (isinstance(raw, bool) and bool not in kinds):
        names = {int: "a number", float: "a number", str: "a string", bool: "true or false"}
        expected = " or ".join(dict.fromkeys(names[kind] for kind in kinds))
        raise UsageError(f"{where} takes {expected}, not {raw!r}")
    return _parse(named, str(raw), where)


def _parse(named: NamedOption, text: str, where: str) -> Any:
    if named.option.optional and not text:
        return None
    try:
        return named.option.kind.parse(text)
    except ValueError as error:
        raise UsageError(f"{where} {error}") from error


def _suggestion(word: str, candidates: Iterable[str], prefix: str = "") -> str:
    """`; did you mean X?`, or nothing. `prefix`, common to all, must not count as likeness."""
    bare = [candidate.removeprefix(prefix) for candidate in candidates]
    close = difflib.get_close_matches(word.removeprefix(prefix), bare, n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


def format_config(options: ServeOptions) -> str:
    """`options` as TOML that `--config` accepts. Unset options are comments, keys are masked."""
    lines: list[str] = []
    for named in OPTIONS:
        value = getattr(options, named.name)
        described = named.option
        render = described.kind.render
        if value is None or value == ():
            lines.append(f"# {named.key} is not set")
        elif described.many:
            shown = [MASK] * len(value) if described.secret else value
            lines.append(f"{named.key} = [{', '.join(render(item) for item in shown)}]")
        else:
            lines.append(f"{named.key} = {render(MASK if described.secret else value)}")
    return "\n".join(lines) + "\n"


def check_keys(options: ServeOptions) -> None:
    """Refuses to serve with the mask of `--print-config` as a key: everybody knows that one."""
    for name, keys in (("api_key", options.api_key), ("admin_key", (options.admin_key,))):
        if MASK in keys:
            named = BY_NAME[name]
            raise UsageError(
                f"{named.flag} is the mask that --print-config prints: put the key in its place, "
                f"or give it with {named.flag} or {named.variable}"
            )
