"""The three packages come from our distribution, and its wheel holds them and nothing else."""

import importlib
import importlib.metadata
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest

import api

ROOT = Path(__file__).parents[1]
PACKAGES = ("engine", "api", "offload")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    directory = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (built,) = directory.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        yield archive


@pytest.mark.parametrize("package", PACKAGES)
def test_the_packages_come_from_our_distribution(package):
    distribution = importlib.metadata.distribution("overwinter")
    module = Path(importlib.import_module(package).__file__).resolve()
    installed = {Path(distribution.locate_file(name)).resolve() for name in distribution.files}
    editable = None
    if direct_url := distribution.read_text("direct_url.json"):
        editable = Path(unquote(urlparse(json.loads(direct_url)["url"]).path)).resolve()
    assert module in installed or module == (editable or ROOT) / package / "__init__.py"
    if editable is not None:
        assert editable == ROOT


def test_the_version_is_one():
    assert importlib.metadata.version("overwinter") == api.__version__
    assert f"## {api.__version__}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_command_is_installed():
    (entry,) = importlib.metadata.distribution("overwinter").entry_points.select(
        group="console_scripts"
    )
    assert (entry.name, entry.value) == ("overwinter", "api.cli:main")


def test_the_wheel_holds_the_three_packages_and_nothing_else(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert tops == {*PACKAGES, f"overwinter-{api.__version__}.dist-info"}
    sources = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".cpp", ".h")
    }
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == sources


def test_the_wheels_metadata(wheel):
    (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = wheel.read(name).decode()
    assert "\nClassifier: Private :: Do Not Upload\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert "\nRequires-Python: >=3.11\n" in metadata
    assert "\nRequires-Dist: torch==2.13.0\n" in metadata
    assert any(n.endswith(".dist-info/licenses/LICENSE") for n in wheel.namelist())


def test_torch_is_pinned_where_make_finds_it():
    """The Makefile installs torch first, alone, by the line that it finds in pyproject.toml."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r'^ *"(torch==[^"]*)"', project, re.MULTILINE) == ["torch==2.13.0"]
