"""The real default model, converted once per test process into a directory of its own."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from engine.config import EngineConfig
from engine.gguf_conversion import converted_directory
from engine.model_source import INSTALL_DEFAULT, default_model_path
from engine.weight_files import DigestMemo


def smollm2_gguf() -> Path:
    """The default model's file; `make setup` installs it."""
    path = default_model_path()
    assert path is not None, f"the default model is missing: {INSTALL_DEFAULT}"
    return path


@functools.cache
def smollm2_cache_dir() -> Path:
    """A cache directory that holds the float32 conversion; gone when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="overwinter-test-cache-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    memo = DigestMemo(folder / "digests.json")
    converted_directory(smollm2_gguf(), "float32", folder, memo, lambda *_: None)
    return folder


def smollm2_config() -> EngineConfig:
    """A float32 CPU configuration of the default model."""
    return EngineConfig(
        model=str(smollm2_gguf()), cache_dir=smollm2_cache_dir(), device="cpu", dtype="float32"
    )
