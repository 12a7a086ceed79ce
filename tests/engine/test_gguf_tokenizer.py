"""Tokenisation from GGUF metadata equals the original tokenizers', id for id.

`goldens/KIND.json` hold texts, ids of the original tokenizer and the fragment of its vocabulary
that these texts can touch (how: `goldens/derive.py`). `goldens/smollm2.json` holds ids made with
SmolLM2's published definition (single digits, then byte level) over the whole vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import StartupError
from engine.gguf_file import GGUFHeader
from engine.gguf_tokenizer import build_tokenizer, save_tokenizer, stop_ids
from engine.tokenizer import load_tokenizer
from tests.smollm2 import smollm2_gguf

GOLDENS = Path(__file__).parent / "goldens"
FRAGMENTS = sorted(path.stem for path in GOLDENS.glob("*.json") if path.stem != "smollm2")
KEY = "tokenizer.ggml."


def golden(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((GOLDENS / f"{name}.json").read_text(encoding="utf-8"))
    return content


def fragment_header(part: dict[str, Any], **changes: Any) -> tuple[GGUFHeader, dict[int, int]]:
    """A header with the fragment's tokens renumbered densely; and the old ids' new numbers."""
    number = {old: new for new, (old, _, _) in enumerate(part["tokens"])}
    metadata: dict[str, Any] = {
        KEY + "model": part["model"],
        KEY + "pre": part["pre"],
        KEY + "tokens": [text for _, text, _ in part["tokens"]],
        KEY + "token_type": [kind for _, _, kind in part["tokens"]],
        KEY + "merges": part["merges"],
        KEY + "scores": part.get("scores"),
        KEY + "add_space_prefix": part.get("add_space_prefix", True),
        KEY + "unknown_token_id": number.get(part.get("unknown_token_id", -1)),
    }
    metadata |= {KEY + key: value for key, value in changes.items()}
    return GGUFHeader(Path("fragment.gguf"), "llama", metadata, (), 0), number


def test_goldens_cover_every_family() -> None:
    assert FRAGMENTS == [
        "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "llama-bpe", "llama-spm",
        "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder",
    ]  # fmt: skip


@pytest.mark.parametrize("name", FRAGMENTS)
def test_ids_equal_the_original_tokenizer(name: str) -> None:
    part = golden(name)
    header, number = fragment_header(part)
    tokenizer = build_tokenizer(header)
    assert len(part["cases"]) >= 46
    for text, ids in part["cases"]:
        expected = [number[i] for i in ids]
        assert tokenizer.encode(text, add_special_tokens=False).ids == expected, text


@pytest.mark.parametrize("name", FRAGMENTS)
def test_decoding_gives_the_text_back(name: str) -> None:
    part = golden(name)
    header, number = fragment_header(part)
    tokenizer = build_tokenizer(header)
    for text, ids in part["cases"]:
        assert tokenizer.decode([number[i] for i in ids], skip_special_tokens=False) == text


@pytest.mark.parametrize("wrong", ["gpt-2", "llama-bpe", "qwen2"])
def test_goldens_notice_a_wrong_kind(wrong: str) -> None:
    part = golden("starcoder")
    header, number = fragment_header(part, pre=wrong)
    tokenizer = build_tokenizer(header)
    differing = [
        text
        for text, ids in part["cases"]
        if tokenizer.encode(text, add_special_tokens=False).ids != [number[i] for i in ids]
    ]
    assert differing


def test_smollm2_digits_spaces_cjk_and_emoji() -> None:
    tokenizer = build_tokenizer(GGUFHeader.read(smollm2_gguf()))
    cases = dict(map(tuple, golden("smollm2")["cases"]))
    for text, ids in cases.items():
        assert tokenizer.encode(text, add_special_tokens=True).ids == ids, text
    # Before a digit both spaces are one token; before a letter the second belongs to the word.
    assert tokenizer.encode("a  1").tokens == ["a", "ĠĠ", "1"]
    assert tokenizer.encode("In  2024").tokens == ["In", "ĠĠ", "2", "0", "2", "4"]
    assert tokenizer.encode("a  b").tokens == ["a", "Ġ", "Ġb"]


def test_unknown_pre_tokenizer_is_refused_by_name() -> None:
    header, _ = fragment_header(golden("gpt-2"), pre="klingon")
    with pytest.raises(StartupError, match="pre-tokenizer 'klingon'"):
        build_tokenizer(header)


def test_missing_pre_tokenizer_is_refused() -> None:
    header, _ = fragment_header(golden("gpt-2"), pre=None)
    with pytest.raises(StartupError, match="does not name its pre-tokenizer"):
        build_tokenizer(header)


def test_unknown_tokenizer_model_is_refused_by_name() -> None:
    header, _ = fragment_header(golden("gpt-2"), model="bert")
    with pytest.raises(StartupError, match="tokenizer model 'bert'"):
        build_tokenizer(header)


def test_damaged_vocabulary_is_refused() -> None:
    header, _ = fragment_header(golden("gpt-2"), merges=["Ġ nowhere"])
    with pytest.raises(StartupError, match=r"vocabulary of fragment\.gguf is damaged"):
        build_tokenizer(header)


def test_file_without_vocabulary_is_refused() -> None:
    with pytest.raises(StartupError, match="holds no tokenizer"):
        build_tokenizer(GGUFHeader(Path("empty.gguf"), "llama", {}, (), 0))


@pytest.mark.parametrize(
    ("changes", "starts", "ends"),
    [
        ({}, True, False),  # llama-bpe adds BOS by itself
        ({"add_bos_token": False}, False, False),
        ({"add_bos_token": True, "add_eos_token": True}, True, True),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(
    changes: dict[str, Any], starts: bool, ends: bool
) -> None:
    part = golden("llama-bpe")
    first = part["tokens"][0][0]
    part["tokens"] += [[first + 10**6, "<bos>", 3], [first + 10**6 + 1, "<eos>", 3]]
    header, number = fragment_header(part)
    bos, eos = number[first + 10**6], number[first + 10**6 + 1]
    header.metadata.update({KEY + "bos_token_id": bos, KEY + "eos_token_id": eos})
    header.metadata.update({KEY + key: value for key, value in changes.items()})
    tokenizer = build_tokenizer(header)
    body = tokenizer.encode("Hello", add_special_tokens=False).ids
    expected = [bos] * starts + body + [eos] * ends
    assert tokenizer.encode("Hello").ids == expected
    assert tokenizer.decode(expected) == "Hello"


def test_saved_tokenizer_loads_with_roles_and_template(tmp_path: Path) -> None:
    save_tokenizer(GGUFHeader.read(smollm2_gguf()), tmp_path, 8192)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.special_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
    }
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.vocab_size == 49152
    assert tokenizer.special_ids == frozenset(range(17))
    assert tokenizer.chat_template is not None
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["model_max_length"] == 8192


def test_stop_ids_are_eos_and_the_ends_of_turns() -> None:
    metadata = {
        KEY + "tokens": ["a", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>"],
        KEY + "token_type": [1, 3, 3, 1],  # the last is an ordinary token that looks like one
        KEY + "eos_token_id": 1,
    }
    assert stop_ids(metadata) == [1, 2]
    assert stop_ids(GGUFHeader.read(smollm2_gguf()).metadata) == [2]
