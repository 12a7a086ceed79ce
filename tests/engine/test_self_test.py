"""What serves is compared with the model as transformers has it, whatever was put in its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine import attention, layer_reading
from engine.compute_path import use_kernels
from engine.errors import StartupError
from engine.fused_layers import FusedDecoder
from engine.kernels import load_kernels
from engine.kernels.layer_ops import Norm
from engine.kv_cache import KVCache
from engine.kv_groups import group_layers
from engine.kv_layout import KVLayout
from engine.model_loader import LoadedModel, load_model
from engine.model_runner import ModelRunner
from engine.self_test import NUM_TOKENS, Reference, check_model, reference_of
from tests.running_engine import engine_config, running_engine


@pytest.fixture
def loaded(tiny_llama: Path, kernel_cache: Path) -> LoadedModel:
    attention.register()
    return load_model(engine_config(tiny_llama, kernel_cache), lambda *_: None)


def check(loaded: LoadedModel, reference: Reference, cache_dir: Path, num_blocks: int) -> float:
    kernels, info = load_kernels(cache_dir), loaded.info
    groups = group_layers(info.sliding_windows, info.max_model_len)
    cache = KVCache(num_blocks, KVLayout.of_model(info, groups, 4))
    runner = ModelRunner(loaded.model, cache, kernels, info.vocab_size, groups)
    return check_model(loaded, runner, reference, 4, num_blocks)


@pytest.mark.parametrize("num_blocks", [12, 5])
def test_a_fused_model_passes_and_a_wrong_one_is_refused(
    loaded: LoadedModel, kernel_cache: Path, num_blocks: int
) -> None:
    """A pool of fewer tokens than the reference tells it, too."""
    reference = reference_of(loaded)
    assert len(reference.token_ids) == len(reference.logits) == NUM_TOKENS
    use_kernels(loaded.model, load_kernels(kernel_cache))
    assert check(loaded, reference, kernel_cache, num_blocks) < 1e-5
    decoder: Any = loaded.model.model
    decoder._whole._layers[1].scale *= 1.2
    with pytest.raises(StartupError, match=r"LlamaForCausalLM cannot be served: .* differ"):
        check(loaded, reference, kernel_cache, num_blocks)


def test_a_model_that_has_no_reference_is_refused(loaded: LoadedModel) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise NotImplementedError("no eager attention")

    loaded.model.forward = fails  # type: ignore[method-assign]
    with pytest.raises(StartupError, match="no eager attention"):
        reference_of(loaded)


async def test_an_engine_and_its_draft_model_run_on_what_was_fused(
    tiny_llama: Path, kernel_cache: Path
) -> None:
    async with running_engine(
        tiny_llama, kernel_cache, speculative=f"draft:{tiny_llama}"
    ) as engine:
        core: Any = engine._core
        for runner in (core._runner, core._speculation._drafter._drafter._runner):
            assert isinstance(runner._model.model, FusedDecoder)


async def test_a_start_with_a_layer_that_was_misread_is_refused(
    tiny_llama: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reference was taken before."""
    monkeypatch.setattr(
        layer_reading, "_read_norm", lambda *_: Norm(torch.ones(64), 1e-5, rounds_once=False)
    )
    with pytest.raises(StartupError, match="cannot be served"):
        async with running_engine(tiny_llama, kernel_cache):
            pass
