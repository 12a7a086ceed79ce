"""The commands and their flags. What they do is imported when they run, so that help is quick."""

from __future__ import annotations

import inspect
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import cyclopts
from cyclopts import App, Group, Parameter

import api
from api.cli import options as table
from api.cli.errors import EXIT_FAILURE, EXIT_USAGE, CommandError, UsageError, complain
from api.cli.settings import FlagValue, check_keys, format_config, resolve
from engine.errors import StartupError

DEFAULT_URL = "http://127.0.0.1:8000"

SERVE_HELP = (
    "Serve a model over OpenAI-style HTTP.\n\n"
    "Every flag may also stand in the environment, as OVERWINTER_<FLAG> "
    "(OVERWINTER_MAX_NUM_SEQS=8; lists comma-separated), or in a TOML file given with --config "
    "(max-num-seqs = 8; lists as arrays). A flag wins over the environment, the environment over "
    "the file. Sizes take KiB MiB GiB KB MB GB; bare numbers are bytes."
)


def _serve(*positional: str | None, **flags: Any) -> int:
    config: str | None = flags.pop("config", None)
    print_config: bool = flags.pop("print_config", False)
    show_version: bool = flags.pop("version", False)
    if show_version:
        print(api.__version__)
        return 0
    given = cast(dict[str, FlagValue], flags)
    if positional and positional[0] is not None:
        given["model"] = positional[0]
    options = resolve(given, os.environ, None if config is None else Path(config))
    if print_config:
        print(format_config(options), end="")
        return 0
    check_keys(options)
    from api.cli.serve import serve

    return serve(options)


def _serve_signature() -> inspect.Signature:
    """The signature of `_serve` as the table of options has it."""
    groups = {
        name: Group(name, sort_key=number) for number, name in enumerate(table.GROUPS, start=1)
    }
    parameters = []
    for named in table.OPTIONS:
        described = named.option
        shown = described.help
        if described.default_text:
            shown = f"{shown} [{described.default_text}]"
        annotation: Any = str | None
        if described.many:
            annotation = list[str] | None
        elif described.kind is table.SWITCH:
            annotation = bool | None
        positional = named.name == "model"
        parameter = Parameter(
            name="MODEL" if positional else named.flag,
            help=shown,
            group=groups[described.group],
            metavar=None if positional else described.metavar or None,
            show_default=False,
            negative_iterable=(),
            consume_multiple=False,
            allow_leading_hyphen=False,
            env_var=(),
        )
        parameters.append(
            inspect.Parameter(
                named.name,
                inspect.Parameter.POSITIONAL_ONLY if positional else inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[annotation, parameter],
            )
        )
    for name, annotation, shown in (
        ("config", str | None, table.CONFIG_HELP),
        ("print_config", bool, table.PRINT_CONFIG_HELP),
        ("version", bool, table.VERSION_HELP),
    ):
        parameter = Parameter(
            name=f"--{name.replace('_', '-')}",
            metavar="FILE" if name == "config" else None,
            help=shown,
            group=groups[table.OPERATION],
            show_default=False,
            negative="",
        )
        parameters.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=False if annotation is bool else None,
                annotation=Annotated[annotation, parameter],
            )
        )
    return inspect.Signature(parameters)


def _chat(
    *,
    url: Annotated[str, Parameter(help="Server to talk to.")] = DEFAULT_URL,
    model: Annotated[str | None, Parameter(help="Model name; else the first one served.")] = None,
    system: Annotated[str | None, Parameter(help="System message.")] = None,
    max_tokens: Annotated[int | None, Parameter(help="Longest answer, in tokens.")] = None,
    temperature: Annotated[float | None, Parameter(help="Sampling temperature.")] = None,
    api_key: Annotated[
        str | None, Parameter(help="Key; else the first of OVERWINTER_API_KEY.")
    ] = None,
) -> int:
    """Talk to a server in the terminal: streams, and says what each answer found in the cache."""
    from api.cli.chat import ChatOptions, chat

    return chat(
        ChatOptions(
            url=url,
            model=model,
            system=system,
            max_tokens=max_tokens,
            temperature=temperature,
            api_key=api_key or _environment_key(),
        )
    )


def _bench(
    *,
    url: Annotated[str, Parameter(help="Server to measure.")] = DEFAULT_URL,
    model: Annotated[str | None, Parameter(help="Model name; else the first one served.")] = None,
    concurrency: Annotated[int, Parameter(help="Conversations at once.")] = 8,
    num_requests: Annotated[int, Parameter(help="Requests altogether.")] = 32,
    input_tokens: Annotated[int, Parameter(help="New prompt tokens of each request.")] = 128,
    output_tokens: Annotated[int, Parameter(help="Tokens generated by each request.")] = 64,
    turns: Annotated[int, Parameter(help="Requests in one conversation.")] = 1,
    seed: Annotated[int, Parameter(help="Makes the prompts repeatable.")] = 0,
    cache_salt: Annotated[
        str | None, Parameter(help="Cache to share with earlier runs; else a fresh one per run.")
    ] = None,
    json: Annotated[
        Path | None, Parameter(help="Write the figures and every request here.")
    ] = None,
    api_key: Annotated[
        str | None, Parameter(help="Key; else the first of OVERWINTER_API_KEY.")
    ] = None,
) -> int:
    """Measure a running server: latencies, throughput, and cached tokens by tier."""
    from api.cli.bench import BenchOptions, bench

    return bench(
        BenchOptions(
            url=url,
            model=model,
            concurrency=concurrency,
            num_requests=num_requests,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            turns=turns,
            seed=seed,
            cache_salt=cache_salt,
            json_path=json,
            api_key=api_key or _environment_key(),
        )
    )


Directory = Annotated[
    Path, Parameter(help="Directory of a disk tier.", show_default=False, name="DIR")
]


def _store_ls(
    directory: Directory,
    /,
    *,
    fingerprint: Annotated[str | None, Parameter(help="Only blocks of models so named.")] = None,
) -> int:
    """List the blocks in a disk tier, those unused longest first."""
    from api.cli.store import store_ls

    return store_ls(directory, fingerprint=fingerprint)


def _store_stat(directory: Directory, /) -> int:
    """Sum up what a disk tier holds, by model fingerprint."""
    from api.cli.store import store_stat

    return store_stat(directory)


def _store_verify(directory: Directory, /) -> int:
    """Read every block of a disk tier and check it; 1 if any is bad."""
    from api.cli.store import store_verify

    return store_verify(directory)


def _store_gc(
    directory: Directory,
    /,
    *,
    keep_fingerprint: Annotated[
        list[str] | None,
        Parameter(help="Remove the blocks of all other models, too; may be repeated."),
    ] = None,
    max_age: Annotated[
        float | None, Parameter(help="Remove blocks unused for so many seconds, too.")
    ] = None,
    dry_run: Annotated[bool, Parameter(help="Only say what would be removed.")] = False,
) -> int:
    """Remove what no server can use: leftovers, damaged blocks, older formats."""
    from api.cli.store import store_gc

    return store_gc(
        directory, keep_fingerprint=keep_fingerprint or (), max_age=max_age, dry_run=dry_run
    )


def _environment_key() -> str | None:
    keys = os.environ.get(table.ENV_PREFIX + "API_KEY", "")
    return keys.split(",")[0].strip() or None


def build_app() -> App:
    """The command line as a tree of cyclopts commands; each returns its exit code."""
    app = App(
        name="overwinter",
        help="Async LLM inference engine whose KV memory outlives the request, the process and "
        "the power cut.",
        version=api.__version__,
        version_flags=["--version"],
        default_parameter=Parameter(negative="", negative_iterable=()),
        help_format="plaintext",
        result_action="return_value",
    )
    # cyclopts reads the signature (and, by name, annotations of the function itself, so the two
    # share no parameter names); Python calls the function.
    _serve.__signature__ = _serve_signature()  # type: ignore[attr-defined]
    app.command(
        _serve,
        name="serve",
        sort_key=1,
        help=SERVE_HELP,
        version_flags=(),
        default_parameter=Parameter(negative=None),
    )
    app.command(_chat, name="chat", version_flags=())
    app.command(_bench, name="bench", version_flags=())
    store = App(name="store", help="Look into a disk tier, and tend it.", version_flags=())
    for name, command in (
        ("ls", _store_ls),
        ("stat", _store_stat),
        ("verify", _store_verify),
        ("gc", _store_gc),
    ):
        store.command(command, name=name, version_flags=())
    app.command(store)
    return app


def run(arguments: Sequence[str]) -> int:
    """Runs one command and returns its exit code; errors are told on stderr."""
    try:
        outcome = build_app()(list(arguments), exit_on_error=False, print_error=False)
    except cyclopts.CycloptsError as error:
        message = str(error)
        if isinstance(error, cyclopts.UnusedCliTokensError):
            message = f"unexpected argument {' '.join(error.unused_tokens or ())!r}."
        complain(f"{message} See overwinter --help.")
        return EXIT_USAGE
    except (UsageError, StartupError) as error:
        complain(error)
        return EXIT_USAGE
    except CommandError as error:
        complain(error)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # Whoever read the output (head, a pager) has seen enough. Python would complain once more
        # when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    return outcome if isinstance(outcome, int) else 0


def main() -> NoReturn:
    """Entry point of the `overwinter` command."""
    sys.exit(run(sys.argv[1:]))


__all__ = ["build_app", "main", "run"]
