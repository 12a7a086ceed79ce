"""`docs/invariants.md` is true: its tests exist, its mutations exist, and they belong together."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NUM_INVARIANTS = 46
LATER: set[str] = set()  # rows that wait for what is not there yet
KINDS = {"poison", "lost reuse", "race", "isolation", "failure", "live", "fairness", "leak"}


def load_runner() -> Any:
    """`tests/mutants/run.py`, which is a script."""
    spec = importlib.util.spec_from_file_location("run", ROOT / "tests" / "mutants" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["run"] = module  # a dataclass looks its module up
    spec.loader.exec_module(module)
    return module


runner = load_runner()
MUTATIONS = {mutation.id: mutation for mutation in runner.load_mutations()}


@dataclass(frozen=True)
class Row:
    number: str
    promise: str
    tests: tuple[str, ...]
    mutations: tuple[str, ...]


def read_rows() -> list[Row]:
    text = (ROOT / "docs" / "invariants.md").read_text(encoding="utf-8")
    rows = []
    for line in text.splitlines():
        if not line.startswith("| ") or line.startswith(("| nr ", "| kind ")):
            continue
        number, promise, tests, mutations = (
            cell.strip() for cell in line.strip().strip("|").split("|")
        )
        ids = [tuple(re.findall(r"`([^`]+)`", cell)) for cell in (tests, mutations)]
        rows.append(Row(number, promise, *ids))
    return rows


ROWS = read_rows()


@functools.cache
def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in tree.body if isinstance(node, kinds)}


def exists(test: str) -> bool:
    """Whether a test of that name is there; its parameters are for the runner to find."""
    file, _, name = test.partition("::")
    path = ROOT / file
    return path.is_file() and name.partition("[")[0] in functions_of(path)


def test_every_invariant_has_its_row() -> None:
    numbered = [row.number for row in ROWS if row.number.isdigit()]
    assert numbered == [str(number) for number in range(1, NUM_INVARIANTS + 1)]
    assert {row.number for row in ROWS} >= KINDS


def test_every_row_names_tests_and_mutations() -> None:
    bare = {row.number for row in ROWS if not row.tests or not row.mutations}
    assert bare == LATER


def test_every_named_test_exists() -> None:
    named = [f"tests/{test}" for row in ROWS for test in row.tests]
    named += [test for mutation in MUTATIONS.values() for test in mutation.tests]
    assert [test for test in named if not exists(test)] == []


def test_every_mutation_has_its_row_and_every_named_one_exists() -> None:
    named = {mutation for row in ROWS for mutation in row.mutations}
    assert (sorted(named - MUTATIONS.keys()), sorted(MUTATIONS.keys() - named)) == ([], [])


def test_a_rows_mutations_are_found_by_a_rows_tests() -> None:
    unrelated = []
    for row in ROWS:
        tests = {f"tests/{test}" for test in row.tests}
        for name in row.mutations:
            found_by = {test.partition("[")[0] for test in MUTATIONS[name].tests}
            if not tests & found_by:
                unrelated.append((row.number, name))
    assert unrelated == []


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_applies_and_compiles(name: str) -> None:
    """Its snippet stands in the file exactly once: who moves the code moves the mutation too."""
    mutation = MUTATIONS[name]
    text = runner.mutated(mutation, ROOT)
    if mutation.file.endswith(".py"):
        compile(text, mutation.file, "exec")
