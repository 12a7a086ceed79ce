"""The Dockerfile refers to what exists, and its container needs no privileges.

The image itself is not built here: the README says so.
"""

import json
import re
from pathlib import Path

import pytest

from api.cli.options import OPTIONS

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def instructions():
    """(instruction, rest) in order, continuation lines joined."""
    joined = re.sub(r"\\\n\s*", "", DOCKERFILE)
    lines = [line for line in joined.splitlines() if line and not line.startswith("#")]
    return [tuple(line.split(" ", 1)) for line in lines]


def all_of(name):
    return [rest for instruction, rest in instructions() if instruction == name]


def test_the_base_is_a_python_that_we_support():
    (base,) = all_of("FROM")
    assert base == "python:3.11-slim"
    assert 'requires-python = ">=3.11"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_ours_runs_without_privileges():
    names = [name for name, _ in instructions()]
    assert all_of("USER") == ["overwinter"]
    # What comes from the tree is built and run by that user.
    assert names.index("USER") < names.index("COPY")
    before = instructions()[: names.index("USER")]
    assert "useradd" in next(rest for name, rest in reversed(before) if name == "RUN")
    assert all(rest.startswith("--chown=overwinter:overwinter ") for rest in all_of("COPY"))


def test_everything_copied_exists_and_reaches_the_build():
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for rest in all_of("COPY"):
        *sources, _ = rest.split(" ")[1:]
        for source in sources:
            assert (ROOT / source).exists(), source
            assert f"!{source}" in ignored


def test_setup_is_the_makes_own():
    run = all_of("RUN")[-1]
    assert run == 'make setup TORCH_ARGS="$TORCH_ARGS"'
    assert re.search(r"^setup:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert all_of("ARG") == ["TORCH_ARGS="]


def test_all_that_make_setup_reads_is_copied():
    copied = {source for rest in all_of("COPY") for source in rest.split(" ")[1:-1]}
    assert {"pyproject.toml", "Makefile", "README.md", "LICENSE"} <= copied
    assert {"engine", "api", "offload"} <= copied


def test_the_entry_point_uses_flags_that_exist():
    (entry,) = all_of("ENTRYPOINT")
    command = json.loads(entry)
    assert command[:2] == ["overwinter", "serve"]
    flags = {named.flag for named in OPTIONS}
    given = [word for word in command if word.startswith("--")]
    assert given
    assert set(given) <= flags


def test_state_lives_in_the_volume():
    (volume,) = all_of("VOLUME")
    assert f"XDG_CACHE_HOME={volume} " in all_of("ENV")[0]
    (entry,) = all_of("ENTRYPOINT")
    command = json.loads(entry)
    assert command[command.index("--disk-tier") + 1].startswith(f"{volume}/")


@pytest.fixture
def health_command():
    (check,) = all_of("HEALTHCHECK")
    return json.loads(check.split("CMD ", 1)[1])


def test_the_health_check_asks_the_port_that_is_served(health_command):
    assert all_of("EXPOSE") == ["8000"]
    (port,) = [named for named in OPTIONS if named.flag == "--port"]
    assert port.option.default_text == "8000"
    assert health_command[:2] == ["python", "-c"]
    assert "http://127.0.0.1:8000/health" in health_command[2]


def test_the_health_check_tells_health_from_the_lack_of_it(health_command):
    import subprocess
    import sys

    from tests.api.scripted_server import scripted

    answers = [200, 503]
    with scripted({"/health": lambda body: (answers.pop(0), b"{}")}) as server:
        script = health_command[2].replace("http://127.0.0.1:8000", server.url)
        codes = [
            subprocess.run([sys.executable, "-c", script], capture_output=True).returncode
            for _ in range(2)
        ]
    assert codes == [0, 1]
