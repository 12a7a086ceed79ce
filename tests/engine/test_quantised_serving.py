"""A GGUF is served from its quantised weights: the same answers to the bit, the same identity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf

from engine.async_engine import AsyncEngine
from engine.model_loader import load_model
from engine.packed_model import describe
from engine.quantised_weights import quantised_file
from tests.engine.test_gguf_conversion import convert
from tests.running_engine import Answer, ask, engine_config, greedy, running_engine
from tests.tiny_gguf import LAYERS, write_gguf

Q4_0, Q4_1 = gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q4_1
KINDS = {f"attn_{part}.weight": Q4_1 for part in "qkv"} | {"ffn_down.weight": Q4_0}
PROMPT = [5 + i % 50 for i in range(30)]


def formats(engine: AsyncEngine) -> set[str]:
    """Of the packed weights of the served model."""
    served: Any = engine._parts.core._runner._model
    return {each.split()[1] for each in describe(served).split(", ")}


async def test_the_answer_is_the_one_of_the_float32_weights_to_the_bit(
    tmp_path: Path, kernel_cache: Path
) -> None:
    directory = convert(write_gguf(tmp_path / "tiny.gguf", kinds=KINDS), tmp_path / "cache")
    answers: list[Answer] = []
    fingerprints = []
    for used in (True, False):
        async with running_engine(directory, kernel_cache) as engine:
            # q, k, v; down; o, gate, up and the tied vocabulary.
            assert formats(engine) == ({"q4_1", "q4_0", "q8_0"} if used else {"float32"})
            assert "quantised-" not in Path("/proc/self/maps").read_text()  # packed, let go
            answers.append(await ask(engine, PROMPT, greedy(8)))
            fingerprints.append(engine._parts.fingerprint)
        if used:
            path = quantised_file(directory)
            assert path is not None
            path.unlink()
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].logprobs == answers[1].logprobs
    assert fingerprints[0] == fingerprints[1]


def test_weights_in_another_dtype_have_no_quantised_form(
    tmp_path: Path, kernel_cache: Path
) -> None:
    directory = convert(write_gguf(tmp_path / "tiny.gguf"), tmp_path / "cache")
    for dtype, count in [("float32", 7 * LAYERS + 1), ("bfloat16", 0)]:
        config = engine_config(directory, kernel_cache, dtype=dtype)
        loaded = load_model(config, lambda *_: None, attention="eager")
        assert len(loaded.quantised) == count
