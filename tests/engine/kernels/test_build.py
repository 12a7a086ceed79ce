from __future__ import annotations

from pathlib import Path

import pytest

from engine.kernels import build as module
from engine.kernels.__main__ import main
from engine.kernels.build import (
    VARIANTS,
    KernelBuildError,
    build_library,
    cpu_flags,
    detect_variant,
    find_compiler,
    is_intact,
)

CXX = """#!/bin/sh
case "$1" in --version) echo "{version}"; exit 0;; esac
echo x >> "{log}"
for last; do :; done
{body}
"""


class FakeCompiler:
    """A script in $CXX's place that counts its runs: what is compiled is not the matter here."""

    def __init__(self, directory: Path, body: str = 'echo library > "$last"') -> None:
        self.path, self.log, self.body = directory / "cxx", directory / "log", body
        self.set_version("fake 1")

    def set_version(self, version: str) -> None:
        self.path.write_text(CXX.format(version=version, log=self.log, body=self.body))
        self.path.chmod(0o755)

    @property
    def runs(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    compiler = FakeCompiler(tmp_path)
    monkeypatch.setenv("CXX", str(compiler.path))
    return compiler


def test_a_second_build_compiles_nothing(fake: FakeCompiler, tmp_path: Path) -> None:
    first = build_library(tmp_path, "portable")
    assert build_library(tmp_path, "portable") == first
    assert fake.runs == 1
    assert first.parent == tmp_path / "kernels"
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_flags_source_and_compiler_are_in_the_key(
    fake: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {build_library(tmp_path, "portable"), build_library(tmp_path, "avx2")}
    fake.set_version("fake 2")
    paths.add(build_library(tmp_path, "portable"))
    monkeypatch.setattr(module, "COMMON_FLAGS", (*module.COMMON_FLAGS, "-g"))
    paths.add(build_library(tmp_path, "portable"))
    for name in (*module.SOURCES, *module.HEADERS):
        (tmp_path / name).write_bytes((module.SOURCE_DIR / name).read_bytes())
    monkeypatch.setattr(module, "SOURCE_DIR", tmp_path)
    for name in (*module.SOURCES, *module.HEADERS):
        with (tmp_path / name).open("a") as source:
            source.write("// changed\n")
        paths.add(build_library(tmp_path, "portable"))
    assert len(paths) == fake.runs == 4 + len(module.SOURCES) + len(module.HEADERS)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_a_damaged_library_is_built_again(fake: FakeCompiler, tmp_path: Path, damage: str) -> None:
    path = build_library(tmp_path, "portable")
    whole = path.read_bytes()
    spoilt = {"truncated": whole[:-3], "flipped": b"L" + whole[1:], "empty": b""}[damage]
    path.write_bytes(spoilt)
    assert not is_intact(path)
    assert build_library(tmp_path, "portable") == path
    assert path.read_bytes() == whole
    assert fake.runs == 2


def test_without_a_compiler_a_library_built_before_serves(
    fake: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build_library(tmp_path, "portable")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert find_compiler() is None
    assert build_library(tmp_path, "portable") == path
    with pytest.raises(KernelBuildError, match=r"no C\+\+ compiler"):
        build_library(tmp_path, "avx2")
    path.write_bytes(b"")
    with pytest.raises(KernelBuildError, match=r"no C\+\+ compiler"):
        build_library(tmp_path, "portable")


def test_a_failing_compiler_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = 'echo partial > "$last"; echo "x.cpp: note: a" >&2; echo "error: too old" >&2; exit 3'
    monkeypatch.setenv("CXX", str(FakeCompiler(tmp_path, body).path))
    with pytest.raises(KernelBuildError, match=r"status 3: error: too old$"):
        build_library(tmp_path, "portable")
    assert list((tmp_path / "kernels").iterdir()) == []


def test_a_compiler_that_cannot_say_its_version_is_a_build_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(KernelBuildError, match="status 1"):
        build_library(tmp_path, "portable")


def test_a_directory_that_cannot_be_written_is_a_build_error(
    fake: FakeCompiler, tmp_path: Path
) -> None:
    (tmp_path / "kernels").write_text("a file where the directory should be")
    with pytest.raises(KernelBuildError, match="cannot build in"):
        build_library(tmp_path, "portable")


def test_cxx_may_carry_arguments_and_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "env g++ -pipe")
    found = find_compiler()
    assert found is not None
    assert found[0].endswith("/env")
    assert found[1:] == ["g++", "-pipe"]
    monkeypatch.setenv("CXX", "no-such-compiler-here")
    monkeypatch.setattr(module.shutil, "which", {"c++": "/bin/c++"}.get)
    assert find_compiler() == ["/bin/c++"]


def test_the_variant_follows_what_the_processor_reports() -> None:
    avx2 = frozenset({"avx2", "fma", "f16c", "sse2"})
    avx512 = avx2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
    assert detect_variant(frozenset()) == "portable"
    assert detect_variant(avx2 - {"fma"}) == "portable"
    assert detect_variant(avx2) == "avx2"
    assert detect_variant(avx512 - {"avx512dq"}) == "avx2"
    assert detect_variant(avx512) == "avx512"
    assert VARIANTS[detect_variant()].needs <= cpu_flags()


def test_cpu_flags_are_read_from_the_first_flags_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.platform, "machine", lambda: "x86_64")
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nvmx flags\t: none\nflags\t\t: fpu avx2 fma\nflags\t: x\n")
    assert cpu_flags(cpuinfo) == {"fpu", "avx2", "fma"}
    assert cpu_flags(tmp_path / "missing") == frozenset()
    monkeypatch.setattr(module.platform, "machine", lambda: "aarch64")
    assert cpu_flags(cpuinfo) == frozenset()


def test_the_command_builds_ahead_and_prints_where(
    fake: FakeCompiler, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--cache-dir", str(tmp_path), "--variant", "portable", "--variant", "avx512"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out.split()
    assert printed == [
        str(build_library(tmp_path, "portable")),
        str(build_library(tmp_path, "avx512")),
    ]
    assert main(["--cache-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(build_library(tmp_path, detect_variant()))


def test_the_command_exits_2_with_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "false")
    assert main(["--cache-dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")
