"""The tests' own models: equal for equal arguments, and sensitive to every token they attend to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_models import FAMILIES, make_tiny_model


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_equal_arguments_make_equal_files(family: str, tmp_path: Path) -> None:
    first = files(make_tiny_model(tmp_path / "a", family, seed=5))
    assert first == files(make_tiny_model(tmp_path / "b", family, seed=5))
    other = files(make_tiny_model(tmp_path / "c", family, seed=6))
    assert {name for name in first if first[name] != other[name]} == {"model.safetensors"}


@torch.no_grad()
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_an_early_token_shows_in_later_logits(family: str, tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(
        str(make_tiny_model(tmp_path / "model", family)), attn_implementation="eager"
    )
    ids = torch.arange(10, 30)[None]
    changed = ids.clone()
    changed[0, 4] = 99
    difference = (model(ids).logits[0, -1] - model(changed).logits[0, -1]).abs().max()
    assert difference > 0.05


def test_overrides_reach_the_config(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "model", num_hidden_layers=1)
    names = (directory / "config.json").read_text()
    assert '"num_hidden_layers": 1' in names
