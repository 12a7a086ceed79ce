"""A draft model made ready: loaded like the target, refused where its guesses could be none.

`load_draft_model` comes before the target has its KV pool, because the two share `--kv-memory`;
`build_model_drafter` comes once that is divided.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from engine.block_hash import kv_fingerprint
from engine.compute_path import use_kernels
from engine.config import EngineConfig
from engine.draft_model import ModelDrafter
from engine.drafter_loader import draft_model_of
from engine.errors import StartupError
from engine.kernels import Kernels
from engine.kv_cache import KVCache
from engine.kv_cache_manager import KVCacheManager
from engine.kv_groups import KVGroup, describe_groups, group_layers
from engine.kv_layout import KVLayout
from engine.model_info import ModelInfo, ProgressFn
from engine.model_loader import LoadedModel, load_model
from engine.model_runner import ModelRunner
from engine.self_test import Reference, check_model, reference_of
from engine.tokenizer import Tokenizer
from offload.manager import OffloadManager

KV_FORMAT_VERSION = 1  # of KV that never leaves the process

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A loaded draft model of the target's vocabulary, without KV yet."""

    spec: str  # as given to --speculative
    loaded: LoadedModel
    reference: Reference
    groups: Sequence[KVGroup]
    layout: KVLayout

    @property
    def token_bytes(self) -> int:
        """KV bytes that one token takes, of all groups."""
        return len(self.groups) * self.layout.token_bytes


def load_draft_model(
    config: EngineConfig, spec: str, target: LoadedModel, progress: ProgressFn
) -> DraftModel:
    """The model that `spec`, "draft:MODEL", names: found, converted and loaded as the target was.

    It serves as far as its own positions reach. Raises StartupError in one line: no such model,
    none that pages can hold, or another vocabulary.
    """
    model = draft_model_of(spec)
    assert model is not None
    own = dataclasses.replace(config, model=model, max_model_len=target.info.max_model_len)
    try:
        loaded = load_model(own, _named(progress), clip_len=True)
        _check_vocabulary(loaded, target)
        reference = reference_of(loaded)
    except StartupError as error:
        raise StartupError(f"--speculative {spec}: {error}") from error
    _warn_if_larger(spec, loaded, target)
    info = loaded.info
    groups = group_layers(info.sliding_windows, info.max_model_len)
    layout = KVLayout.of_model(info, groups, config.block_size)
    return DraftModel(spec, loaded, reference, groups, layout)


def build_model_drafter(
    config: EngineConfig,
    draft: DraftModel,
    target: ModelInfo,
    kernels: Kernels | None,
    kv_memory: int | None,
    progress: ProgressFn,
) -> ModelDrafter:
    """The drafter with its KV pool, tested. `kv_memory` is the draft's share in bytes; None:
    `config.kv_blocks` blocks. Raises StartupError where that is too little or the test fails."""
    info = draft.loaded.info
    num_blocks = _num_blocks(config, draft, kv_memory)
    device = next(draft.loaded.model.parameters()).device
    vocab_size = min(info.vocab_size, target.vocab_size)
    use_kernels(draft.loaded.model, kernels, draft.loaded.quantised)
    cache = KVCache(num_blocks, draft.layout, device)
    runner = ModelRunner(draft.loaded.model, cache, kernels, vocab_size, draft.groups)
    progress("draft model: self-test", 0.0)
    try:
        # Its own width: the reference has logits for every id.
        tested = ModelRunner(draft.loaded.model, cache, kernels, info.vocab_size, draft.groups)
        check_model(draft.loaded, tested, draft.reference, config.block_size, num_blocks)
    except StartupError as error:
        raise StartupError(f"--speculative {draft.spec}: {error}") from error
    logger.info(
        "Draft model %s: KV for %d tokens, %d blocks of %d bytes",
        info.name,
        num_blocks // len(draft.groups) * config.block_size,
        num_blocks,
        draft.layout.block_bytes,
    )
    return ModelDrafter(
        runner,
        KVCacheManager(
            num_blocks,
            config.block_size,
            OffloadManager([], block_bytes=draft.layout.block_bytes),
            groups=draft.groups,
        ),
        fingerprint=kv_fingerprint(
            info.fingerprint,
            kv_dtype=info.dtype,
            layout=describe_groups(draft.groups),
            block_size=config.block_size,
            format_version=KV_FORMAT_VERSION,
        ),
        vocab_size=vocab_size,
        max_model_len=info.max_model_len,
        max_rows=config.max_num_batched_tokens,
        eos_token_ids=target.eos_token_ids,
    )


def divide_kv_memory(kv_memory: int, target_bytes: int, draft_bytes: int) -> tuple[int, int]:
    """Bytes for the target and for the draft: as many tokens for one as for the other, where a
    token takes `target_bytes` and `draft_bytes`."""
    share = kv_memory * target_bytes // (target_bytes + draft_bytes)
    return share, kv_memory - share


def _num_blocks(config: EngineConfig, draft: DraftModel, kv_memory: int | None) -> int:
    least = len(draft.groups)
    if kv_memory is None:
        assert config.kv_blocks is not None
        num_blocks, given = config.kv_blocks, f"--kv-blocks {config.kv_blocks}"
    else:
        num_blocks, given = kv_memory // draft.layout.block_bytes, "its share of --kv-memory"
    if num_blocks < least:
        raise StartupError(
            f"--speculative {draft.spec}: {given} holds {num_blocks} of the draft model's KV"
            f" blocks, and it needs {least} at least; raise it"
        )
    return num_blocks


def _named(progress: ProgressFn) -> ProgressFn:
    return lambda phase, percent: progress(f"draft model: {phase}", percent)


def _check_vocabulary(draft: LoadedModel, target: LoadedModel) -> None:
    """A guess is an id, so that each id must be the same token to both.

    The widths of the logits may differ by padding, which is never drawn.
    """
    theirs, ours = target.tokenizer.vocabulary(), draft.tokenizer.vocabulary()
    if theirs != ours:
        raise StartupError(
            f"the vocabularies differ: {_difference(target.tokenizer, draft.tokenizer)}; choose a"
            f" draft model that shares the tokenizer of {target.info.name}"
        )
    needed = min(target.info.vocab_size, target.tokenizer.vocab_size)
    if draft.info.vocab_size < needed:
        raise StartupError(
            f"its logits cover {draft.info.vocab_size} of the {needed} tokens of"
            f" {target.info.name}; choose a draft model of the same vocabulary"
        )


def _difference(target: Tokenizer, draft: Tokenizer) -> str:
    """One token that tells them apart, special ones first, and how many more there are."""
    theirs, ours = target.vocabulary(), draft.vocabulary()
    differing = [text for text in theirs.keys() | ours.keys() if theirs.get(text) != ours.get(text)]
    special_ids = target.special_ids | draft.special_ids

    def is_plain(text: str) -> bool:
        return not {theirs.get(text), ours.get(text)} & special_ids

    first = min(differing, key=lambda text: (is_plain(text), theirs.get(text, len(theirs)), text))
    return (
        f"token {first!r} has {_id(theirs.get(first))} in the target and"
        f" {_id(ours.get(first))} in the draft model, and {len(differing) - 1} others differ"
    )


def _id(token_id: int | None) -> str:
    return "no id" if token_id is None else f"id {token_id}"


def _warn_if_larger(spec: str, draft: LoadedModel, target: LoadedModel) -> None:
    ours, theirs = (sum(p.numel() for p in m.model.parameters()) for m in (draft, target))
    if ours > theirs:
        logger.warning(
            "--speculative %s: the draft model has %d million parameters, more than the target's"
            " %d million: it cannot make anything faster",
            spec,
            ours // 10**6,
            theirs // 10**6,
        )
