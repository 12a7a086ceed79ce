"""Compile the kernels' sources into one cached shared library, keyed by all that shaped it.

    <cache_dir>/kernels/kernels-<variant>-<source digest>-<compiler digest>.so

The file ends in the SHA-256 of what precedes it, which dynamic linkers ignore: a library that was
truncated or damaged is found out before it is mapped, where it could only be found by a crash.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

SOURCE_DIR = Path(__file__).parent
SOURCES = ("abi.cpp", "decoder.cpp", "layer_ops.cpp", "linear.cpp", "paged_attention.cpp")
HEADERS = (
    "abi.h",
    "decoder.h",
    "layer_ops.h",
    "matmul.h",
    "panels.h",
    "scratch.h",
    "simd.h",
    "team.h",
)
DIGEST_BYTES = hashlib.sha256().digest_size
COMPILE_SECONDS = 180.0

COMMON_FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
)


@dataclass(frozen=True, slots=True)
class Variant:
    """Compiler flags of an instruction set and what the processor must report to run it.

    The flags name each extension: `-march=native` of an older compiler misreads newer
    processors, and a cache directory may move between machines.
    """

    flags: tuple[str, ...]
    needs: frozenset[str]  # of /proc/cpuinfo


_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")

# Best first.
VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "avx512": Variant(
            _AVX2 + _AVX512,
            frozenset({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq"}),
        ),
        "avx2": Variant(_AVX2, frozenset({"avx2", "fma", "f16c"})),
        "portable": Variant((), frozenset()),
    }
)


class KernelBuildError(Exception):
    """There is no compiler, or it failed; the message is one line."""


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Instruction set extensions the processor reports; empty where it reports none."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def detect_variant(flags: frozenset[str] | None = None) -> str:
    """Name of the best variant that a processor with these flags (None: this one's) can run."""
    reported = cpu_flags() if flags is None else flags
    return next(name for name, variant in VARIANTS.items() if variant.needs <= reported)


def build_library(cache_dir: Path, variant: str) -> Path:
    """Path of the library for `variant`, compiled unless an intact one is there.

    Without a compiler one built by any compiler from these very sources will do. Raises
    KernelBuildError where there is none, the compiler fails or the directory cannot be written.
    """
    directory = cache_dir / "kernels"
    source_key = _digest(*((SOURCE_DIR / name).read_bytes() for name in (*SOURCES, *HEADERS)))
    stem = f"kernels-{variant}-{source_key}"
    compiler = find_compiler()
    if compiler is None:
        for path in sorted(directory.glob(f"{stem}-*.so")):
            if is_intact(path):
                return path
        raise KernelBuildError("no C++ compiler found ($CXX, g++, c++, clang++)")
    flags = COMMON_FLAGS + VARIANTS[variant].flags
    tool_key = _digest(compiler_version(compiler).encode(), *(f.encode() for f in flags))
    path = directory / f"{stem}-{tool_key}.so"
    if not is_intact(path):
        _compile([*compiler, *flags, *(str(SOURCE_DIR / name) for name in SOURCES)], path)
    return path


def find_compiler() -> list[str] | None:
    """The command of the C++ compiler: $CXX, which may carry arguments, else the usual names."""
    for command in (os.environ.get("CXX", ""), "g++", "c++", "clang++"):
        words = shlex.split(command)
        if words and (found := shutil.which(words[0])):
            return [found, *words[1:]]
    return None


def compiler_version(compiler: list[str]) -> str:
    """What the compiler says of itself. Raises KernelBuildError if it does not run."""
    return _run([*compiler, "--version"], timeout=30.0)


def is_intact(path: Path) -> bool:
    """Whether `path` is a library that was written whole and not changed since."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    body, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    return hashlib.sha256(body).digest() == digest


def _compile(command: list[str], path: Path) -> None:
    """Run the compiler into a temporary file and publish it whole under `path`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".building-") as scratch:
            target = Path(scratch) / "library.so"
            _run([*command, "-o", str(target)], timeout=COMPILE_SECONDS)
            with target.open("ab") as library:
                library.write(hashlib.sha256(target.read_bytes()).digest())
            # Two processes may build at once: each publishes a whole file, the last one stays.
            target.replace(path)
    except OSError as error:
        raise KernelBuildError(f"cannot build in {path.parent}: {error}") from error


def _run(command: list[str], timeout: float) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelBuildError(f"{command[0]} did not run: {error}") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        first = next((line for line in lines if "error" in line), lines[0] if lines else "")
        raise KernelBuildError(f"{command[0]} failed with status {done.returncode}: {first}")
    return done.stdout


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]
