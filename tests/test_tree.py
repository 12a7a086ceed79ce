"""Rules for the tree as a whole; they hold for every file that is part of the project."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("engine", "api", "offload")

# Spelt apart, so that this file does not find itself.
OUTSIDE = ["../" + "shared", "/" + "work/", "interfaces" + ".md"]


def project_files():
    """What git tracks or would track; without git (an unpacked archive) every file there is."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
    )
    if listing.returncode == 0:
        names = listing.stdout.decode().split("\0")
        return sorted(ROOT / name for name in names if name and (ROOT / name).is_file())
    ours = (*PACKAGES, "tests", "benchmarks", "docs", ".ci")
    return sorted(path for name in ours for path in (ROOT / name).rglob("*") if path.is_file())


FILES = project_files()
PYTHON = [path for path in FILES if path.suffix == ".py"]


def relative(path):
    return str(path.relative_to(ROOT))


def test_there_is_a_tree_to_look_at():
    names = {relative(path) for path in FILES}
    assert {"engine/__init__.py", "api/__main__.py", "offload/__init__.py"} <= names
    assert len(PYTHON) > 20


@pytest.mark.parametrize("outside", OUTSIDE)
def test_nothing_outside_the_tree_is_mentioned(outside):
    texts = ((path, path.read_bytes()) for path in FILES)
    assert [relative(path) for path, text in texts if outside.encode() in text] == []


def test_every_module_says_what_it_is_for():
    modules = [path for path in PYTHON if path.relative_to(ROOT).parts[0] in PACKAGES]
    silent = [relative(m) for m in modules if ast.get_docstring(ast.parse(m.read_text())) is None]
    assert silent == []


def test_no_test_is_switched_off():
    off = re.compile(r"pytest\.(mark\.)?(skip|xfail|importorskip)|unittest\.skip")
    tests = [path for path in PYTHON if path.relative_to(ROOT).parts[0] == "tests"]
    assert [relative(t) for t in tests if t != Path(__file__) and off.search(t.read_text())] == []


def test_nothing_is_left_for_later():
    later = re.compile("TO" + "DO|FIX" + "ME|XX" + "X")
    assert [relative(path) for path in PYTHON if later.search(path.read_text())] == []


def test_the_map_of_the_tree_is_true():
    """`docs/structure.md` names every module, and nothing that is not there."""
    text = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:engine|api|offload)/[\w/.]*\.(?:py|cpp|h))`", text))
    modules = {
        relative(path)
        for path in FILES
        if path.relative_to(ROOT).parts[0] in PACKAGES
        and path.suffix in (".py", ".cpp", ".h")
        and path.name != "__init__.py"
    }
    assert (sorted(modules - named), sorted(named - modules)) == ([], [])
