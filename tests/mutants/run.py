"""Shows that every mutation of `mutations.toml` makes its tests fail: `make mutants`.

    mutation    a fault planted in one file: an exact snippet and what replaces it
    caught      each test named for it fails, and not because nothing could be imported any more
    survived    one of them passes all the same: that test proves nothing here

The tree is copied to a scratch directory, all named tests are run once as it is, and then each
mutation has a copy of its own. Importing torch and transformers takes longer than most of the
tests, so one parent imports whatever others wrote, nothing of ours, and forks a child per run.
The parent computes nothing with torch: a fork of its threads would hang.

    python tests/mutants/run.py [--only ID ...] [--jobs N]
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import gc
import importlib
import json
import os
import py_compile
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MUTATIONS = Path(__file__).with_name("mutations.toml")
TREES = ("engine", "api", "offload", "tests", "docs", "benchmarks")
FILES = ("pyproject.toml", "README.md", "Makefile")

# What the tests import of others, so that a child finds it in memory.
WARM = [
    "torch",
    "transformers",
    "tokenizers",
    "safetensors.torch",
    "gguf",
    "accelerate",
    "numpy",
    "jinja2",
    "fastapi",
    "uvicorn",
    "httpx",
    "openai",
    "orjson",
    "prometheus_client",
    "cyclopts",
    "rich",
    "xxhash",
    "hypothesis",
    "hypothesis.strategies",
    "pytest_asyncio",
    "transformers.masking_utils",
    "transformers.integrations.sdpa_attention",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gemma3.modeling_gemma3",
]

UNMUTATED_SECONDS = 400.0
MUTATION_SECONDS = 90.0
# A mutant that cannot even be imported, or that names what is not there, tells nothing of a test.
BROKEN = ("ImportError", "ModuleNotFoundError", "SyntaxError", "NameError", "IndentationError")


@dataclass(frozen=True)
class Mutation:
    """`old` stands exactly once in `file`; with `new` in its place every one of `tests` fails."""

    id: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    may_hang: bool = False  # a run that never ends counts as caught


def load_mutations(path: Path = MUTATIONS) -> list[Mutation]:
    """Raises ValueError for an id given twice or a mutation that changes or tests nothing."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["mutation"]
    mutations = [Mutation(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]
    ids = [mutation.id for mutation in mutations]
    for mutation in mutations:
        if ids.count(mutation.id) > 1:
            raise ValueError(f"mutation {mutation.id} is there twice")
        if mutation.old == mutation.new or not mutation.tests:
            raise ValueError(f"mutation {mutation.id} changes nothing or names no test")
    return mutations


def mutated(mutation: Mutation, root: Path) -> str:
    """The text of the file with the fault in it. ValueError unless `old` stands there once."""
    text = (root / mutation.file).read_text(encoding="utf-8")
    count = text.count(mutation.old)
    if count != 1:
        raise ValueError(
            f"mutation {mutation.id}: its old snippet stands {count} times in {mutation.file}"
        )
    return text.replace(mutation.old, mutation.new)


# --- one run, in a child ----------------------------------------------------------------------


class Recorder:
    """A pytest plugin: how every test ended, and what could not be collected."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}  # node id -> passed | failed | broken
        self.reasons: dict[str, str] = {}  # node id -> exception, for a person
        self.uncollected: list[str] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.uncollected.append(f"{report.nodeid}: {report.longreprtext[-400:]}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report = yield
        node = item.nodeid
        if call.excinfo is not None and self.outcomes.get(node) != "failed":
            name = call.excinfo.type.__name__
            self.outcomes[node] = "broken" if name in BROKEN else "failed"
            self.reasons[node] = f"{call.when}: {name}: {str(call.excinfo.value)[:200]}"
        elif call.when == "call":
            self.outcomes.setdefault(node, "passed")
        return report


def run_tests(tree: Path, tests: Sequence[str], scratch: Path) -> dict[str, Any]:
    """Run pytest here, in a process that is thrown away afterwards; what `Recorder` saw."""
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.environ["TMPDIR"] = str(scratch)
    os.environ["NOSHRINK"] = "1"  # that it fails is asked, not the shortest way to it
    tempfile.tempdir = str(scratch)
    sys.dont_write_bytecode = True
    sys.path[:] = [str(tree), *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
    recorder = Recorder()
    options = ["-q", "-p", "no:cacheprovider", "--no-header", "--tb=short", "--rootdir", str(tree)]
    options += ["-c", str(tree / "pyproject.toml"), "--basetemp", str(scratch / "tmp")]
    # Plugins were imported by the parent, for speed; they have no assertions of ours.
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    status = pytest.main([*options, *tests], plugins=[recorder])
    packages = [sys.modules[name] for name in ("engine", "offload") if name in sys.modules]
    assert all(str(package.__file__).startswith(str(tree)) for package in packages)
    return {
        "status": int(status),
        "outcomes": recorder.outcomes,
        "reasons": recorder.reasons,
        "uncollected": recorder.uncollected,
    }


# --- many runs, from the parent ---------------------------------------------------------------


@dataclass
class Run:
    """One child: tests on a copy of the tree, one file of it changed or none."""

    name: str
    tests: Sequence[str]
    timeout: float
    change: tuple[str, str] | None = None  # file and its text
    pid: int = 0
    started: float = 0.0
    seconds: float = 0.0
    result: dict[str, Any] = field(default_factory=dict)  # empty: it was killed or it crashed
    log: str = ""


class ForkServer:
    """Copies `tree` for each run and forks for it, `jobs` at a time."""

    def __init__(self, tree: Path, scratch: Path, jobs: int) -> None:
        self._tree = tree
        self._scratch = scratch
        self._jobs = jobs

    def run_all(self, runs: Iterable[Run], done: Callable[[Run], None]) -> None:
        """Every run to its end; `done` is told of each as it ends."""
        waiting, active = deque(runs), list[Run]()
        try:
            while waiting or active:
                while waiting and len(active) < self._jobs:
                    active.append(self._start(waiting.popleft()))
                time.sleep(0.02)
                for run in [run for run in active if self._has_ended(run)]:
                    active.remove(run)
                    self._collect(run)
                    done(run)
        finally:
            for run in active:
                os.killpg(run.pid, signal.SIGKILL)

    def _start(self, run: Run) -> Run:
        place = self._scratch / run.name
        shutil.copytree(self._tree, place / "tree")
        if run.change is not None:
            (place / "tree" / run.change[0]).write_text(run.change[1], encoding="utf-8")
        run.started = time.monotonic()
        sys.stdout.flush()
        run.pid = os.fork()
        if run.pid == 0:
            _child(place, run.tests)
        with contextlib.suppress(PermissionError):
            os.setpgid(run.pid, run.pid)  # the child does so too: whoever comes first
        return run

    def _has_ended(self, run: Run) -> bool:
        if os.waitpid(run.pid, os.WNOHANG)[0]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)  # what it left behind
            return True
        if time.monotonic() - run.started > run.timeout:
            os.killpg(run.pid, signal.SIGKILL)
            os.waitpid(run.pid, 0)
            return True
        return False

    def _collect(self, run: Run) -> None:
        place = self._scratch / run.name
        run.seconds = time.monotonic() - run.started
        with contextlib.suppress(OSError, ValueError):
            run.result = json.loads((place / "result.json").read_text())
        with contextlib.suppress(OSError):
            run.log = (place / "log").read_text(errors="replace")
        shutil.rmtree(place, ignore_errors=True)


def _child(place: Path, tests: Sequence[str]) -> None:
    """Never returns: threads that a mutant left hanging must not keep the process."""
    status = 1
    try:
        os.setpgid(0, 0)
        log = os.open(place / "log", os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        result = run_tests(place / "tree", tests, place)
        (place / "result.part").write_text(json.dumps(result))
        (place / "result.part").rename(place / "result.json")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


# --- judging ----------------------------------------------------------------------------------


def matching(outcomes: dict[str, str], test: str) -> dict[str, str]:
    """The outcomes of a named test: of that parameter, or of all where it names none."""
    return {
        node: outcome
        for node, outcome in outcomes.items()
        if node == test or ("[" not in test and node.startswith(f"{test}["))
    }


def verdict(mutation: Mutation, run: Run) -> tuple[bool, str]:
    """Whether it was caught, and how or why not."""
    if not run.result:
        hung = run.seconds >= run.timeout
        if hung and mutation.may_hang:
            return True, "hung, as it may"
        return False, "hung" if hung else "the run crashed"
    if run.result["uncollected"]:
        return False, f"not collected: {run.result['uncollected'][0]}"
    how = []
    for test in mutation.tests:
        outcomes = matching(run.result["outcomes"], test)
        failed = [node for node, outcome in outcomes.items() if outcome == "failed"]
        if not failed:
            reasons = [
                run.result["reasons"].get(node, outcome) for node, outcome in outcomes.items()
            ]
            return False, f"{test} did not fail: {reasons or 'no such test'}"
        how.append(run.result["reasons"][failed[0]])
    return True, how[0]


def faults_of_unmutated(run: Run) -> list[str]:
    """What is wrong with the tree before anything was planted."""
    if not run.result:
        return [f"{run.name}: {'hung' if run.seconds >= run.timeout else 'crashed'}\n{run.log}"]
    faults = list(run.result["uncollected"])
    outcomes = run.result["outcomes"]
    for test in run.tests:
        found = matching(outcomes, test)
        if not found:
            faults.append(f"{test}: no such test")
        faults += [
            f"{node}: {run.result['reasons'].get(node)}"
            for node, outcome in found.items()
            if outcome != "passed"
        ]
    return faults


# --- the whole --------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Plant every known fault and see it caught.")
    parser.add_argument("--only", nargs="+", metavar="ID", help="these mutations alone")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--verbose", action="store_true", help="print the log of every survivor")
    options = parser.parse_args(arguments)
    mutations = load_mutations()
    if options.only:
        unknown = set(options.only) - {mutation.id for mutation in mutations}
        if unknown:
            parser.error(f"no mutation {', '.join(sorted(unknown))}")
        mutations = [mutation for mutation in mutations if mutation.id in options.only]
    changes = {mutation.id: (mutation.file, mutated(mutation, ROOT)) for mutation in mutations}
    for name, (file, text) in changes.items():
        if file.endswith(".py"):
            compile(text, f"{file} ({name})", "exec")
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        return _run(mutations, changes, Path(scratch), options.jobs, options.verbose)


def _run(
    mutations: list[Mutation],
    changes: dict[str, tuple[str, str]],
    scratch: Path,
    jobs: int,
    verbose: bool,
) -> int:
    started = time.monotonic()
    tree = _copy_tree(scratch / "tree")
    _warm_up(scratch)
    print(f"ready to fork after {time.monotonic() - started:.0f} s", flush=True)
    server = ForkServer(tree, scratch, jobs)

    faults: list[str] = []
    shards = _shards(sorted({test for mutation in mutations for test in mutation.tests}), jobs)
    runs = [
        Run(f"unmutated-{number}", tests, UNMUTATED_SECONDS) for number, tests in enumerate(shards)
    ]
    server.run_all(runs, lambda run: faults.extend(faults_of_unmutated(run)))
    if faults:
        print("These tests must pass before anything is planted:", *faults, sep="\n  ")
        return 1
    num_tests = sum(len(run.result["outcomes"]) for run in runs)
    seconds = time.monotonic() - started
    print(f"{num_tests} tests pass as the tree is, after {seconds:.0f} s", flush=True)

    by_id = {mutation.id: mutation for mutation in mutations}
    survivors: list[str] = []

    def judge(run: Run) -> None:
        caught, how = verdict(by_id[run.name], run)
        line = " ".join(how.split())
        word = "caught  " if caught else "SURVIVED"
        print(f"{word} {run.seconds:5.1f} s  {run.name:34} {line[:110]}")
        if not caught:
            survivors.append(run.name)
            print(f"    {how}\n{run.log if verbose else ''}")
        sys.stdout.flush()

    server.run_all([Run(m.id, m.tests, MUTATION_SECONDS, changes[m.id]) for m in mutations], judge)
    seconds = time.monotonic() - started
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{len(mutations) - len(survivors)} of {len(mutations)} caught in {seconds:.0f} s,"
        f" {used.ru_utime + used.ru_stime:.0f} s of processor time"
    )
    if survivors:
        print(f"survivors: {' '.join(survivors)}")
    return 1 if survivors else 0


def _copy_tree(tree: Path) -> Path:
    """What the tests need, compiled by content: a mutant's time stamps say nothing."""
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc", ".hypothesis")
    tree.mkdir()
    for name in TREES:
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    for name in FILES:
        shutil.copy2(ROOT / name, tree / name)
    mode = py_compile.PycInvalidationMode.CHECKED_HASH
    for name in ("engine", "api", "offload", "tests"):
        # pytest compiles test modules itself.
        compileall.compile_dir(
            tree / name, quiet=1, invalidation_mode=mode, rx=re.compile(r"/(test_|conftest)")
        )
    return tree


def _warm_up(scratch: Path) -> None:
    """Import everything but ours; nothing is computed, so no thread is started."""
    os.environ["MUTANTS_CACHE"] = str(_cache_directory(scratch))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name in WARM:
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    ours = [name for name in sys.modules if name.split(".")[0] in ("engine", "api", "offload")]
    assert not ours, f"{ours[0]} was imported before the fork"
    gc.collect()
    gc.freeze()  # or collecting in a child would copy every page


def _cache_directory(scratch: Path) -> Path:
    """Where the children build the kernels: once, for they are named by their content."""
    return scratch / "cache"


def _shards(tests: list[str], count: int) -> list[list[str]]:
    """Whole files to each shard, so that what a module sets up is set up once."""
    files: dict[str, list[str]] = {}
    for test in tests:
        files.setdefault(test.partition("::")[0], []).append(test)
    shards: list[list[str]] = [[] for _ in range(count)]
    for number, file in enumerate(sorted(files, key=lambda file: -len(files[file]))):
        shards[number % count] += files[file]
    return [shard for shard in shards if shard]


if __name__ == "__main__":
    sys.exit(main())
