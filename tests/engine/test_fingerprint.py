"""Every part of the identity changes the fingerprint; what computes nothing does not."""

from __future__ import annotations

from typing import Any

import pytest

from engine import fingerprint
from engine.fingerprint import model_fingerprint

PARTS: dict[str, Any] = {
    "weight_digests": ["aa", "bb"],
    "architecture": "LlamaForCausalLM",
    "config": {"rope_theta": 1e4, "sliding_window": None, "eps": 1e-5},
    "rope": {},
    "dtype": "float32",
    "quantisation": "none",
}


def test_is_32_bytes_and_the_same_in_every_process() -> None:
    assert model_fingerprint(**PARTS).hex() == (
        "f1ae7916f3b4f05fc6d68e3f224054baac3437c181ba507c13a3849115fb2d80"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"weight_digests": ["bb", "aa"]},
        {"weight_digests": ["aa"]},
        {"weight_digests": ["aabb"]},
        {"architecture": "MistralForCausalLM"},
        {"config": {**PARTS["config"], "rope_theta": 1e5}},
        {"config": {**PARTS["config"], "sliding_window": 64}},
        {"config": {**PARTS["config"], "new_field": 1}},
        {"rope": {"rotary": ["longrope", [1.0]]}},
        {"dtype": "bfloat16"},
        {"quantisation": "int8"},
    ],
)
def test_each_part_counts(change: dict[str, Any]) -> None:
    assert model_fingerprint(**{**PARTS, **change}) != model_fingerprint(**PARTS)


def test_names_and_roles_do_not_count() -> None:
    config = {**PARTS["config"], "_name_or_path": "x", "eos_token_id": 3, "torch_dtype": "float16"}
    assert model_fingerprint(**{**PARTS, "config": config}) == model_fingerprint(**PARTS)


def test_version_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = model_fingerprint(**PARTS)
    monkeypatch.setattr(fingerprint, "VERSION", fingerprint.VERSION + 1)
    assert model_fingerprint(**PARTS) != before
