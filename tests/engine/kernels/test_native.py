from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
import logging
import shutil
from pathlib import Path

import pytest
import torch

from engine import attention
from engine.kernels import Kernels, build_library, detect_variant, load_kernels, native
from engine.kernels.build import DIGEST_BYTES
from engine.kv_cache import KVCache
from engine.kv_layout import KVLayout
from engine.paged_batch import PagedBatch


def seal(path: Path, content: bytes) -> None:
    """Write `content` as a library that counts as written whole."""
    path.write_bytes(content + hashlib.sha256(content).digest())


def test_the_kernels_load_and_name_their_variant(kernel_cache: Path) -> None:
    kernels = load_kernels(kernel_cache)
    assert kernels is not None
    assert kernels.variant == detect_variant()
    assert kernels.path == build_library(kernel_cache, detect_variant())


def test_the_threads_are_those_of_torchs_own_openmp(tmp_path: Path) -> None:
    """Other packages bring runtimes of their own into the process."""
    (own,) = (Path(torch.__file__).parent / "lib").glob("libgomp*")
    ctypes.CDLL(shutil.copy(own, tmp_path / "libgomp-of-another.so.1"))
    address = native._find_parallel()
    assert address is not None
    homes = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            homes.append(Path(line.split()[-1]))
    (home,) = homes
    assert home.parent == Path(torch.__file__).parent / "lib"


def test_without_a_compiler_the_reference_gives_the_same_and_one_line_says_so(
    kernel_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kernels = load_kernels(kernel_cache)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with caplog.at_level(logging.INFO):
        assert load_kernels(tmp_path) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no C++ compiler" in caplog.text

    torch.manual_seed(0)
    module = torch.nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    query, key, value = torch.randn(1, 4, 9, 16), torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16)
    results = []
    for each in (kernels, None):
        paged = PagedBatch(
            torch.tensor([0, 9], dtype=torch.int32),
            torch.tensor([9], dtype=torch.int32),
            torch.tensor([[2, 0, 1]], dtype=torch.int32),
            torch.tensor([8, 9, 10, 11, 0, 1, 2, 3, 4]),
            KVCache(3, KVLayout(1, 2, 16, 4, "float32")),
            each,
        )
        results.append(
            attention.overwinter_paged_attention(
                module, query, key, value, None, scaling=0.25, paged=paged
            )[0]
        )
    torch.testing.assert_close(results[0], results[1], atol=2e-6, rtol=2e-6)


def test_a_library_that_does_not_load_is_built_again(
    kernel_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = build_library(kernel_cache, detect_variant())
    (tmp_path / "kernels").mkdir()
    bad = tmp_path / "kernels" / good.name
    seal(bad, b"\x7fELF of another machine")
    body = good.read_bytes()[:-DIGEST_BYTES]
    # The compile itself has its own tests: here it hands over what was built before.
    monkeypatch.setattr("engine.kernels.build._compile", lambda command, path: seal(path, body))
    kernels = load_kernels(tmp_path)
    assert kernels is not None
    assert kernels.path == bad
    assert bad.read_bytes() == good.read_bytes()


def test_a_library_that_never_loads_is_given_up_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        "engine.kernels.build._compile", lambda command, path: path.write_bytes(b"")
    )
    (tmp_path / "kernels").mkdir()
    assert load_kernels(tmp_path) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_library_without_the_functions_is_an_os_error() -> None:
    libc = ctypes.util.find_library("m")
    assert libc is not None
    with pytest.raises(OSError, match="lacks a function"):
        Kernels(Path(libc), "portable")


@pytest.mark.parametrize("change", ["longer", "more", "fewer"])
def test_a_library_of_other_structures_is_an_os_error(
    kernel_cache: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    path = build_library(kernel_cache, detect_variant())
    structures = native._STRUCTURES
    other = {
        "longer": (*structures[:-1], ctypes.c_uint64 * 100),
        "more": (*structures, ctypes.c_uint64),
        "fewer": structures[:-1],
    }[change]
    monkeypatch.setattr(native, "_STRUCTURES", other)
    with pytest.raises(OSError, match="otherwise"):
        Kernels(path, detect_variant())


def test_running_out_of_memory_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match=r"\(1\)"):
        native._check(1)
    native._check(0)
