"""A draft model is loaded like the target, and refused in one line where its guesses are no use."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from engine import assembly, attention
from engine.architecture import max_model_len
from engine.draft_loading import (
    DraftModel,
    build_model_drafter,
    divide_kv_memory,
    load_draft_model,
)
from engine.errors import StartupError
from engine.model_loader import LoadedModel, load_model
from tests.running_engine import engine_config
from tests.tiny_models import VOCAB_SIZE, make_draft_model, make_tiny_model


@pytest.fixture(scope="module")
def target(tiny_llama: Path, kernel_cache: Path) -> LoadedModel:
    attention.register()
    return load_model(engine_config(tiny_llama, kernel_cache), lambda *_: None)


def load(
    target: LoadedModel, cache_dir: Path, draft: Path | str, **settings: Any
) -> tuple[DraftModel, list[str]]:
    """The draft model, and the phases of loading it."""
    config = engine_config(Path(target.info.path), cache_dir, **settings)
    phases: list[str] = []
    spec = f"draft:{draft}"
    return load_draft_model(config, spec, target, lambda phase, _: phases.append(phase)), phases


def retokenized(directory: Path, change: dict[str, str]) -> Path:
    """A tiny model whose vocabulary has other spellings for some tokens."""
    make_tiny_model(directory, num_hidden_layers=1)
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    content["model"]["merges"] = []  # they would name tokens that are no more
    for old, new in change.items():
        vocab[new] = vocab.pop(old)
        for token in content["added_tokens"]:
            token["content"] = new if token["content"] == old else token["content"]
    path.write_text(json.dumps(content))
    return directory


def test_it_is_loaded_as_the_target_is(
    target: LoadedModel, tiny_llama: Path, kernel_cache: Path, tmp_path: Path
) -> None:
    directory = make_draft_model(tiny_llama, tmp_path / "draft", 2)
    draft, phases = load(target, kernel_cache, directory)
    info = draft.loaded.info
    assert (info.num_layers, info.dtype) == (2, target.info.dtype)
    assert info.fingerprint != target.info.fingerprint
    assert (
        draft.token_bytes == 2 * 2 * 2 * 16 * 4
    )  # layers, keys and values, heads, elements, bytes
    assert "draft model: loading" in phases
    assert all(phase.startswith("draft model: ") for phase in phases)


@pytest.mark.parametrize(("own", "targets", "expected"), [(512, 2048, 512), (2048, 100, 100)])
def test_it_serves_as_far_as_its_own_positions_reach(
    target: LoadedModel,
    kernel_cache: Path,
    tmp_path: Path,
    own: int,
    targets: int,
    expected: int,
) -> None:
    directory = make_tiny_model(
        tmp_path / "draft", num_hidden_layers=1, max_position_embeddings=own
    )
    info = dataclasses.replace(target.info, max_model_len=targets)
    draft, _ = load(dataclasses.replace(target, info=info), kernel_cache, directory)
    assert draft.loaded.info.max_model_len == expected


def test_only_a_draft_model_is_clipped_silently() -> None:
    class Config:
        max_position_embeddings = 512

    assert max_model_len(Config(), 2048, clip=True) == 512
    with pytest.raises(StartupError, match="exceeds the model's 512 positions"):
        max_model_len(Config(), 2048)


def test_padding_of_the_logits_is_no_difference(
    target: LoadedModel, kernel_cache: Path, tmp_path: Path
) -> None:
    directory = make_tiny_model(tmp_path / "draft", num_hidden_layers=1, vocab_size=VOCAB_SIZE + 64)
    draft, _ = load(target, kernel_cache, directory)
    config = engine_config(directory, kernel_cache)
    drafter = build_model_drafter(config, draft, target.info, None, None, lambda *_: None)
    assert drafter._runner._vocab_size == drafter._vocab_size == VOCAB_SIZE


REFUSED = [
    ({"Ġthe": "Ġzebra"}, "token 'Ġthe' has id 262 in the target and no id in the draft model"),
    (
        {"<|im_end|>": "<|end|>", "Ġthe": "Ġzebra"},
        "token '<|im_end|>' has id 2 in the target and no id in the draft model",
    ),
]


@pytest.mark.parametrize(("change", "said"), REFUSED, ids=["plain", "special"])
def test_another_vocabulary_is_refused(
    target: LoadedModel, kernel_cache: Path, tmp_path: Path, change: dict[str, str], said: str
) -> None:
    """One token is named, a special one first, and the others are counted."""
    directory = retokenized(tmp_path / "draft", change)
    expected = (
        f"--speculative draft:{directory}: the vocabularies differ: {said}, and"
        f" {2 * len(change) - 1} others differ; choose a draft model that shares the tokenizer of"
        f" {target.info.name}"
    )
    with pytest.raises(StartupError) as error:
        load(target, kernel_cache, directory)
    assert str(error.value) == expected


def test_swapped_ids_are_refused(target: LoadedModel, kernel_cache: Path, tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "draft", num_hidden_layers=1)
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(content))
    with pytest.raises(StartupError, match=r"token 'a' has id \d+ in the target and id \d+ in the"):
        load(target, kernel_cache, directory)


def test_a_head_of_too_few_tokens_is_refused(
    target: LoadedModel, kernel_cache: Path, tmp_path: Path
) -> None:
    directory = make_tiny_model(tmp_path / "draft", num_hidden_layers=1, vocab_size=VOCAB_SIZE - 9)
    needed = target.tokenizer.vocab_size
    with pytest.raises(StartupError) as error:
        load(target, kernel_cache, directory)
    assert str(error.value) == (
        f"--speculative draft:{directory}: its logits cover {VOCAB_SIZE - 9} of the {needed} tokens"
        f" of {target.info.name}; choose a draft model of the same vocabulary"
    )


def test_what_cannot_be_loaded_is_refused_under_the_options_name(
    target: LoadedModel, kernel_cache: Path, tmp_path: Path
) -> None:
    missing = tmp_path / "missing.gguf"
    with pytest.raises(StartupError) as error:
        load(target, kernel_cache, missing)
    assert str(error.value).startswith(f"--speculative draft:{missing}: model {missing} does not")


def test_a_pool_that_holds_no_block_is_refused(
    target: LoadedModel, tiny_llama: Path, kernel_cache: Path, tmp_path: Path
) -> None:
    draft, _ = load(target, kernel_cache, make_draft_model(tiny_llama, tmp_path / "draft", 1))
    config = engine_config(tiny_llama, kernel_cache)
    with pytest.raises(StartupError) as error:
        build_model_drafter(config, draft, target.info, None, 1000, lambda *_: None)
    assert str(error.value) == (
        f"--speculative {draft.spec}: its share of --kv-memory holds 0 of the draft model's KV"
        " blocks, and it needs 1 at least; raise it"
    )


def test_a_larger_model_is_served_with_a_warning(
    target: LoadedModel, kernel_cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "engine.draft_loading"):
        load(target, kernel_cache, make_tiny_model(tmp_path / "small", num_hidden_layers=2))
        assert caplog.messages == []
        load(target, kernel_cache, make_tiny_model(tmp_path / "large", num_hidden_layers=4))
    assert len(caplog.messages) == 1
    assert "more than the target's" in caplog.messages[0]


def test_kv_memory_is_divided_by_bytes_per_token() -> None:
    assert divide_kv_memory(1000, 300, 100) == (750, 250)
    assert sum(divide_kv_memory(1001, 300, 7)) == 1001


async def test_the_engine_does_not_start_with_one_that_is_refused(
    tiny_llama: Path, kernel_cache: Path, tmp_path: Path
) -> None:
    directory = retokenized(tmp_path / "draft", {"Ġthe": "Ġzebra"})
    config = engine_config(tiny_llama, kernel_cache, speculative=f"draft:{directory}")
    with pytest.raises(StartupError, match="the vocabularies differ"):
        await assembly.assemble(config, lambda *_: None)
